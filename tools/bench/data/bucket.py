"""A frame store read from a bucket by 1, 2, 4 and 8 readers at once, compared with the same store
on disk.

The bucket is a server on this machine that speaks Amazon S3's protocol (moto, in Python, in a
process of its own). It shares the processors with the readers, so the figures show how reading
scales with readers here, not how fast a cloud's storage is. A reader is a process with a cache of
its own, like a host of a run: it opens the store and loads every frame once in random order. Then
it loads the frames again, when all of them are in its cache. On disk, it opens the store and loads
the frames once; the operating system has the files in memory.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from data import open_dataset
from data.frames import ACTION, STATE
from data.store.store import Store, cached_store, open_store
from models.files.bucket import file_system
from models.files.terminal import Console
from models.inputs.pictures import shape_of
from tools.bench.data.data import CACHE
from tools.bench.ladder.dataset import make
from tools.bench.timing import timed

READERS = (1, 2, 4, 8)
_EPISODES, _FRAMES, _SIZE, _BATCH, _CHUNK, _ROUNDS = 16, 100, 224, 32, 50, 3
_BUCKET = "chiliad-bench"
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class BucketSizes(NamedTuple):
    """Number and length of episodes, and numbers of readers."""

    episodes: int
    frames: int
    readers: tuple[int, ...]
    rounds: int


FULL = BucketSizes(_EPISODES, _FRAMES, READERS, _ROUNDS)
TINY = BucketSizes(2, 60, (1, 2), 1)


class Pass(NamedTuple):
    """Every frame loaded by each of several readers: seconds from the first's start to the last's
    end, and CPU-seconds of all of them."""

    seconds: float
    cpu: float


def run(console: Console, tiny: bool = False, cache: Path = CACHE) -> dict[str, Any]:
    """Samples a second of all readers together, for each number of readers: `ratio` is that of the
    most readers over one, from the bucket.

    Args:
      tiny: two short episodes and up to two readers.
      cache: holds the dataset and the store for the next run.

    Raises:
      ValueError: moto or s3fs is not installed, or a reader ended before it had answered.
    """
    if absent := [name for name in ("moto", "s3fs") if find_spec(name) is None]:
        raise ValueError(
            f"The bucket benchmark needs {' and '.join(absent)}; install the extra dev "
            "(pip install -e '.[dev]')."
        )
    sizes, load = TINY if tiny else FULL, os.getloadavg()[0]
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        url = f"s3://{_BUCKET}/store"
        environment = stack.enter_context(s3_server())
        root = make(cache / f"bucket-{sizes.episodes}", sizes.episodes, sizes.frames, _SIZE)
        store = cached_store(open_dataset(root), _SIZE, "jpeg", cache / "stores")
        upload(Path(store.path), url)
        rows = [
            measured(store.path, url, count, sizes, environment, console) for count in sizes.readers
        ]
    frames, size = int(store.lengths.sum()), size_of(Path(store.path))
    for row in rows:
        row["megabytes_per_second"] = row["readers"] * size / 1e6 / row["bucket"]["seconds"]
        for name in ("bucket", "cached", "disk"):
            row[name]["samples_per_second"] = row["readers"] * frames / row[name]["seconds"]
    first, last = rows[0], rows[-1]
    return {
        "ratio": last["bucket"]["samples_per_second"] / first["bucket"]["samples_per_second"],
        "ours": f"{last['bucket']['samples_per_second']:.0f} samples/s by {last['readers']} readers"
        f" of a bucket, {last['megabytes_per_second']:.0f} MB/s",
        "other": f"{first['bucket']['samples_per_second']:.0f} by one",
        "unit": "samples/s",
        "rows": {str(row["readers"]): row for row in rows},
        "frames": frames,
        "megabytes": size / 1e6,
        "cores": os.cpu_count(),
        "load": load,
    }


def measured(
    path: str,
    url: str,
    readers: int,
    sizes: BucketSizes,
    environment: Mapping[str, str],
    console: Console,
) -> dict[str, Any]:
    """Medians over the rounds, in each of which the bucket and the disk take turns."""
    rounds: dict[str, list[Pass]] = {"bucket": [], "cached": [], "disk": []}
    for number in range(sizes.rounds):
        console.print(f"{readers} readers: round {number + 1} of {sizes.rounds}", highlight=False)
        first, again = passes(url, readers, 2, environment)
        rounds["bucket"].append(first)
        rounds["cached"].append(again)
        rounds["disk"] += passes(path, readers, 1, environment)
    told: dict[str, Any] = {
        name: {
            "seconds": median(each.seconds for each in found),
            "cpu_seconds": median(each.cpu for each in found),
        }
        for name, found in rounds.items()
    }
    both = zip(rounds["bucket"], rounds["disk"], strict=True)
    share = median(disk.seconds / bucket.seconds for bucket, disk in both)
    return {"readers": readers, **told, "of_disk": share}


def passes(where: str, readers: int, count: int, environment: Mapping[str, str]) -> list[Pass]:
    """Passes of several readers, each a process with an empty cache, that begin each pass
    together."""
    found = []
    with ExitStack() as stack, _none_lost():
        pipes = [stack.enter_context(reader(where, k, environment)) for k in range(readers)]
        for pipe in pipes:
            pipe.recv()  # it has imported all that it needs
        for _ in range(count):
            with timed() as took:
                for pipe in pipes:
                    pipe.send(True)
                cpu = sum(pipe.recv() for pipe in pipes)
            found.append(Pass(took.wall, cpu))
        for pipe in pipes:
            pipe.send(False)
    return found


@contextmanager
def reader(where: str, number: int, environment: Mapping[str, str]) -> Iterator[Connection]:
    """A process that loads the store once whenever it is sent True, and ends when it is sent
    False."""
    context = get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as own:
        told = {**environment, "XDG_CACHE_HOME": own}
        process = context.Process(target=_read, args=(where, number, told, there), daemon=True)
        process.start()
        there.close()
        try:
            yield here
        finally:
            here.close()
            process.join(10)
            process.kill()


def _read(where: str, seed: int, environment: Mapping[str, str], pipe: Connection) -> None:
    os.environ |= environment
    pipe.send("ready")
    store: Store | None = None
    while pipe.recv():
        before = time.process_time()
        store = store or open_store(where)
        load(store, seed)
        pipe.send(time.process_time() - before)


def load(store: Store, seed: int) -> None:
    """Reads pictures of every camera, state and a chunk of actions of each frame, in random
    order."""
    order = np.random.default_rng(seed).permutation(int(store.lengths.sum()))
    squares = np.empty((_BATCH, *shape_of(store.image_size), 3), np.uint8)
    for start in range(0, len(order), _BATCH):
        rows = order[start : start + _BATCH]
        for camera in store.cameras:
            store.images(rows, camera, list(squares[: len(rows)]))
        store.column(STATE, rows)
        chunk = np.minimum(rows[:, None] + np.arange(_CHUNK), len(order) - 1)
        store.column(ACTION, chunk)


def upload(store: Path, url: str) -> None:
    """Copies a store's files into the bucket."""
    files, _ = file_system(url)
    files.mkdir(_BUCKET)
    for file in sorted(store.rglob("*")):
        if file.is_file():
            files.put_file(str(file), f"{url}/{file.relative_to(store).as_posix()}")


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextmanager
def s3_server() -> Iterator[Mapping[str, str]]:
    """An S3 server on this machine, in a process of its own, and the environment variables by which
    it is found; this process has them until the block ends."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    told = {**_CREDENTIALS, "AWS_ENDPOINT_URL": here.recv()}
    before = {name: os.environ.get(name) for name in told}
    os.environ |= told
    try:
        yield told
    finally:
        process.kill()
        process.join()
        for name, value in before.items():
            _restore(name, value)


@contextmanager
def _none_lost() -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise ValueError(
            "A reader ended before it had answered; its output says why, or a signal ended it."
        ) from error


def _restore(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def _serve(pipe: Connection) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    pipe.send(f"http://{host}:{port}")
    threading.Event().wait()
