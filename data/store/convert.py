"""A dataset into a frame store, as parts that any machine can make in any order.

Each part, a shard of consecutive episodes or the tables, is a pure function of the dataset's
content and the settings: the same bytes from any run, under a name that holds the digest of both.
A part's manifest comes after its files and `store.json` after all parts, so what was finished
before a crash is kept, and what was not is made again.
"""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock, local
from typing import Any, BinaryIO, Literal, NamedTuple

import google_crc32c
import numpy as np
import simplejpeg
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Int64, UInt8

from data.dataset import Dataset
from data.errors import DatasetError
from data.files.checksums import as_sums, sums_of
from data.files.folder import Folder, LocalFolder
from data.files.names import path_within
from data.store import tables
from models.inputs.pictures import fit

Encoding = Literal["jpeg", "raw"]
StoredResize = Literal["antialiased", "stretched", "stretched-middle"]
"""Ways to fit a picture that round to grey levels."""
Progress = Callable[[int, int], None]

FORMAT = 3
DESCRIPTION, FILES = "store.json", "files.json"
DEFAULTS = {"resize": "antialiased", "every": 1}
"""Settings that stores do not tell if they are these."""
SUFFIX = {"jpeg": ".array_record", "raw": ".rgb"}

_QUALITY, _SUBSAMPLING = 95, "420"
_SCRATCH, _LOCK = ".making-", ".lock"
_BLOCK = 16


@dataclass(frozen=True)
class Settings:
    """Settings of stored pictures: their side in pixels, their encoding, about how many frames of
    each camera a shard covers (a quarter of a gigabyte as JPEG at 224 pixels), how pictures are
    fitted to that side, one that rounds to grey levels, and frames of an episode from one stored
    picture to the next, as a mixture's `every` draws them."""

    image_size: int
    encoding: Encoding = "jpeg"
    shard_frames: int = 16384
    resize: StoredResize = "antialiased"
    every: int = 1

    @property
    def told(self) -> dict[str, Any]:
        """The settings as stores say them; those of before there was a choice do not tell it."""
        return {k: v for k, v in asdict(self).items() if (k, v) not in DEFAULTS.items()}


class WorkUnit(NamedTuple):
    """A unit of work: the shard of episodes `first` to `stop`, or the tables (`stop` is 0).
    `pictures` says how much work it is."""

    name: str
    first: int
    stop: int
    pictures: int

    @property
    def manifest(self) -> str:
        """The file that says the part is finished, with size and SHA-256 of each of its files."""
        return f"parts/{self.name}.json"


Done = Callable[[int], None]
"""Called with the number of further pictures made."""
Run = Callable[[Dataset, Sequence[WorkUnit], Settings, Folder, Done], None]
"""Makes parts: in this process (`in_threads`) or on a cluster (`data.store.ray_convert.on_ray`)."""


def content_key(dataset: Dataset, settings: Settings) -> str:
    """Names a store by its content: 16 hexadecimal digits of a SHA-256 over the dataset's digest
    and all that decides the bytes made of it."""
    content = [FORMAT, _QUALITY, _SUBSAMPLING, dataset.digest, *settings.told.values()]
    if getattr(dataset, "has_subtasks", False):  # stores made before they were read lack them
        content.append("subtasks")
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def shard_episodes(
    lengths: Int64[np.ndarray, " e"], shard_frames: int
) -> Int64[np.ndarray, " shards_plus_1"]:
    """The first episode of each shard, and the number of episodes: a shard takes episodes as long
    as it has at most `shard_frames` frames, and at least one."""
    ends = np.cumsum(lengths)
    firsts = [0]
    while firsts[-1] < len(lengths):
        first = firsts[-1]
        before = int(ends[first] - lengths[first])
        last = int(np.searchsorted(ends, before + shard_frames, "right"))
        firsts.append(max(first + 1, last))
    return np.array(firsts, np.int64)


def pictures_of(lengths: Int64[np.ndarray, " e"], every: int) -> Int64[np.ndarray, " e"]:
    """Stored pictures of a camera in episodes of these lengths."""
    return -(-lengths // every)


def parts_of(dataset: Dataset, settings: Settings) -> list[WorkUnit]:
    """All parts of a store: its tables and its shards."""
    key = content_key(dataset, settings)
    stored = pictures_of(dataset.lengths, settings.every)
    pictures = np.pad(np.cumsum(stored * dataset.present.sum(axis=1)), (1, 0))
    firsts = shard_episodes(dataset.lengths, settings.shard_frames)
    shards = [
        WorkUnit(
            f"{key}-{number:05d}", int(first), int(stop), int(pictures[stop] - pictures[first])
        )
        for number, (first, stop) in enumerate(pairwise(firsts))
    ]
    return [WorkUnit(f"{key}-tables", 0, 0, 0), *shards]


def convert(
    dataset: Dataset,
    folder: Folder,
    settings: Settings,
    run: Run | None = None,
    progress: Progress | None = None,
) -> None:
    """Makes the parts of a store that `folder` does not have yet, then describes it.

    Args:
      run: makes the parts; `in_threads` if None.
      progress: called with frames done and frames in all.

    Raises:
      ValueError: the folder holds something else, or the dataset no camera or column.
      DatasetError: a frame cannot be decoded; names the file. Finished parts stay.
    """
    if not dataset.cameras or not tables.numeric_columns(dataset):
        raise ValueError(
            f"{dataset.root}: has no {'numeric column' if dataset.cameras else 'camera'}; a policy "
            "learns from pictures and from numbers, record both."
        )
    parts = parts_of(dataset, settings)
    _require_ours(folder, parts)
    with _alone(folder):
        if folder.exists(DESCRIPTION):
            return
        finished = folder.list("parts/*.json")
        total, frames = sum(part.pictures for part in parts), int(dataset.lengths.sum())
        done, lock = sum(part.pictures for part in parts if part.manifest in finished), Lock()

        def report(pictures: int) -> None:
            nonlocal done
            with lock:
                done += pictures
                if progress is not None:
                    progress(frames * done // max(total, 1), frames)

        report(0)
        todo = [part for part in parts if part.manifest not in finished]
        (run or in_threads)(dataset, todo, settings, folder, report)
        _describe(dataset, folder, settings, parts)


def make_part(
    dataset: Dataset,
    part: WorkUnit,
    settings: Settings,
    folder: Folder,
    done: Done | None = None,
    threads: int | None = None,
) -> None:
    """Makes one part in a scratch folder, moves its files to their place and writes its
    manifest.

    Args:
      done: called after each episode of a camera.
      threads: that decode and encode; one for each core, if None.

    Raises:
      DatasetError: a frame or column cannot be read; names the file.
    """
    with _scratch(folder) as scratch:
        if part.stop:
            _write_shard(dataset, part, settings, scratch, done or (lambda _: None), threads)
        else:
            tables.write(dataset, scratch)
        names = sorted(p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file())
        manifest = sums_of(scratch, names)
        for name in names:
            _place(scratch, name, folder)
        _write_json(manifest, scratch, part.manifest, folder)


def in_threads(
    dataset: Dataset,
    parts: Sequence[WorkUnit],
    settings: Settings,
    folder: Folder,
    done: Done,
    workers: int | None = None,
) -> None:
    """Makes parts in this process, `workers` at a time (by the number of cores, if None).

    Decoding and encoding let go of Python's lock, so threads use the cores. Every worker has a
    dataset of its own and about four cores, as decoding takes a quarter of the work, and holds at
    most two decoded episodes of a camera.
    """
    cores = os.cpu_count() or 1
    workers = workers or max(1, cores // 4)
    if min(workers, len(parts)) <= 1:
        for part in parts:
            make_part(dataset, part, settings, folder, done)
        return
    threads = -(-cores // workers)
    place, own, stopped = pickle.dumps(dataset), local(), Event()

    def made(pictures: int) -> None:
        if stopped.is_set():
            raise InterruptedError("Another part failed.")
        done(pictures)

    def make(part: WorkUnit) -> None:
        if not hasattr(own, "dataset"):
            own.dataset = pickle.loads(place)
        make_part(own.dataset, part, settings, folder, made, threads)

    pool = ThreadPoolExecutor(workers)
    try:
        for future in [pool.submit(make, part) for part in parts]:
            future.result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def checksum(description: Mapping[str, Any]) -> str:
    """SHA-256 over what `store.json` says but for its "sum", which is this, hexadecimal."""
    told = {name: value for name, value in description.items() if name != "sum"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def shard_file(key: str, shard: int, camera: str, encoding: Encoding) -> str:
    """Name of a store's file for a camera's pictures of a shard."""
    return f"frames/{key}-{shard:05d}/{camera}{SUFFIX[encoding]}"


def raw_record(image_size: int) -> np.dtype:
    """A record of a raw shard: a picture, and the CRC-32C of its bytes."""
    return np.dtype([("picture", np.uint8, (image_size, image_size, 3)), ("crc", "<u4")])


def _write_shard(
    dataset: Dataset,
    part: WorkUnit,
    settings: Settings,
    folder: Path,
    done: Done,
    threads: int | None,
) -> None:
    """Writes the pictures of a shard, those of each camera in frame order; while an episode of a
    camera is encoded, the next one is decoded."""
    key, number = part.name.rsplit("-", 1)
    size, encoding, resize = settings.image_size, settings.encoding, settings.resize
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool, ExitStack() as closing:
        writers: dict[str, Any] = {}

        def encode(frames: UInt8[np.ndarray, "t h w 3"]) -> list[Future[list[bytes]]]:
            blocks = (frames[i : i + _BLOCK] for i in range(0, len(frames), _BLOCK))
            return [pool.submit(_encoded, block, size, encoding, resize) for block in blocks]

        def write(camera: str, blocks: list[Future[list[bytes]]]) -> None:
            if camera not in writers:
                path = path_within(folder, shard_file(key, int(number), camera, encoding))
                writers[camera] = closing.enter_context(_writer(path, encoding))
            for block in blocks:
                for record in block.result():
                    writers[camera].write(record)
                done(len(block.result()))

        lengths = dataset.lengths
        seen = np.argwhere(dataset.present[part.first : part.stop])
        waiting: tuple[str, list[Future[list[bytes]]]] | None = None
        for i, c in seen.tolist():
            camera = dataset.cameras[c]
            decoding = pool.submit(dataset.frames, part.first + i, camera)
            if waiting is not None:
                write(*waiting)
            frames = decoding.result()
            if len(frames) != lengths[part.first + i]:
                raise DatasetError(
                    str(dataset.root),
                    f"episode {part.first + i}, {camera}",
                    f"has {len(frames)} frames, expected {lengths[part.first + i]}; copy the "
                    "dataset again.",
                )
            waiting = camera, encode(frames[:: settings.every])
        if waiting is not None:
            write(*waiting)


def _encoded(
    frames: UInt8[np.ndarray, "t h w 3"], size: int, encoding: Encoding, resize: StoredResize
) -> list[bytes]:
    pictures = (np.ascontiguousarray(fit(frame, size, resize)) for frame in frames)
    if encoding == "raw":
        return [_with_crc(picture.tobytes()) for picture in pictures]
    return [simplejpeg.encode_jpeg(p, _QUALITY, "RGB", _SUBSAMPLING) for p in pictures]


def _with_crc(picture: bytes) -> bytes:
    return picture + google_crc32c.value(picture).to_bytes(4, "little")


@contextmanager
def _writer(path: Path, encoding: Encoding) -> Iterator[ArrayRecordWriter | BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if encoding == "raw":
        with path.open("wb") as file:
            yield file
        return
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    try:
        try:
            yield writer
        finally:
            writer.close()
    except RuntimeError as error:
        raise _of_the_disk(error, path) from error


def _of_the_disk(error: RuntimeError, path: Path) -> Exception:
    """The system's error that ArrayRecord puts into words."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE):
        if os.strerror(number) in str(error):
            return OSError(number, os.strerror(number), str(path))
    return error


def _require_ours(folder: Folder, parts: Sequence[WorkUnit]) -> None:
    """Raises ValueError if the folder holds something that is no part of this store."""
    strange = sorted(set(folder.list("parts/*.json")) - {part.manifest for part in parts})
    if isinstance(folder, LocalFolder) and folder.root.is_dir():
        names = sorted(path.name for path in folder.root.iterdir())
        strange += [n for n in names if n not in _ENTRIES and not n.startswith(_SCRATCH)]
    if strange:
        raise ValueError(
            f"{folder.url}: holds '{strange[0]}', which is not of the store to be made there; "
            "delete the folder or choose another."
        )


def _describe(
    dataset: Dataset, folder: Folder, settings: Settings, parts: Sequence[WorkUnit]
) -> None:
    """Writes which files the store has and, last, what it is."""
    files: dict[str, tuple[int, str]] = {}
    for part in parts:
        try:
            files |= as_sums(json.loads(folder.local(part.manifest).read_text()))
        except (ValueError, RecursionError):
            raise DatasetError(
                folder.path(part.manifest), "file", "is damaged; delete it and convert again."
            ) from None
    description = {
        "format": FORMAT,
        "key": content_key(dataset, settings),
        "name": dataset.name,
        "digest": dataset.digest,
        "fps": dataset.fps,
        "cameras": dataset.cameras,
        "columns": tables.numeric_columns(dataset),
        **settings.told,
        "files": hashlib.sha256(_json(files)).hexdigest(),
    }
    with _scratch(folder) as scratch:
        _write_json(files, scratch, FILES, folder)
        _write_json(description | {"sum": checksum(description)}, scratch, DESCRIPTION, folder)


_ENTRIES = (
    "parts",
    "frames",
    "columns",
    *tables.FILES,
    *tables.OPTIONAL,
    FILES,
    DESCRIPTION,
    _LOCK,
)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def _write_json(value: Any, scratch: Path, name: str, folder: Folder) -> None:
    path = scratch / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_json(value))
    _place(scratch, name, folder)


def _place(scratch: Path, name: str, folder: Folder) -> None:
    if isinstance(folder, LocalFolder):
        place = path_within(folder.root, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / name, place)
    else:
        folder.put(scratch / name, name)


@contextmanager
def _scratch(folder: Folder) -> Iterator[Path]:
    """A new folder to write files in that are then moved to their place at once."""
    root = folder.root if isinstance(folder, LocalFolder) else None
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=root) as scratch:
        yield Path(scratch)


@contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Keeps a second process from converting to the same local folder, and removes what one that
    was killed has left."""
    if not isinstance(folder, LocalFolder):
        yield
        return
    folder.root.mkdir(parents=True, exist_ok=True)
    with (folder.root / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.root.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left)
        yield
