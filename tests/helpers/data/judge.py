"""Reads all there is of a damaged dataset or frame store and judges the outcome, in processes of
its own, so that a crash or a hang of a native library is one more outcome."""

import hashlib
import multiprocessing
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from data import open_dataset
from data.columns import BOOKKEEPING
from data.rlds.dataset import RldsDataset
from data.store.store import open_store, verify
from data.validation.validate import validate
from tests.helpers.data.mutations import mutate

SECONDS = 60
MEMORY = 16 << 30

Facts = dict[tuple[int | str, str], str]
"""Digests of what a dataset gives, by episode and column, camera or "task"."""


class Verdict(NamedTuple):
    """Outcome of a mutation: "error" (reading raised), "reported" (by validation), "correct",
    "wrong" (other data and no word of it), "unclear" (an error that names no file), "crash" or
    "hang"."""

    seed: int
    mutation: str
    outcome: str
    detail: str


class Judges:
    """Processes that judge one mutation after another, started again when they die."""

    def __init__(self, workers: int) -> None:
        self._workers = [_Worker() for _ in range(workers)]

    def judge(self, source: Path, seeds: Sequence[int]) -> list[Verdict]:
        """Damages a copy of the dataset at `source` once for each seed."""

        def share(k: int) -> list[Verdict]:
            return [self._workers[k].judge(source, seed) for seed in seeds[k :: len(self._workers)]]

        with ThreadPoolExecutor(len(self._workers)) as pool:
            return sorted(v for found in pool.map(share, range(len(self._workers))) for v in found)

    def __enter__(self) -> "Judges":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        self._start()

    def judge(self, source: Path, seed: int) -> Verdict:
        mutation = "?"
        try:
            self._pipe.send((source, seed))
            while self._pipe.poll(SECONDS):
                told = self._pipe.recv()
                if isinstance(told, Verdict):
                    return told
                mutation = told
            outcome = "hang"
        except (EOFError, OSError):
            outcome = "crash"
            self._process.join(SECONDS)
        self.stop()
        code = self._process.exitcode
        self._start()
        return Verdict(seed, mutation, outcome, f"exit code {code}")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    originals: dict[Path, Facts] = {}
    while True:
        source, seed = pipe.recv()
        with tempfile.TemporaryDirectory() as place:
            os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
            if source not in originals:
                originals[source] = read_all(source)[0]
            root = Path(shutil.copytree(source, Path(place) / "dataset"))
            mutation = mutate(root, seed)
            pipe.send(mutation)
            pipe.send(Verdict(seed, mutation, *_outcome(root, originals[source])))


def read_all(root: Path) -> tuple[Facts, list[Exception]]:
    """All that a dataset or store gives, and the errors it gave instead."""
    facts: Facts = {}
    errors: list[Exception] = []

    def give(fact: tuple[int | str, str], read: Callable[[], Any]) -> str | None:
        try:
            value = np.asarray(read())
        except Exception as error:
            errors.append(error)
            return None
        raw = repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
        facts[fact] = f"{value.dtype}{value.shape}{hashlib.sha256(raw).hexdigest()}"
        return facts[fact]

    try:
        (_read_store if (root / "parts").is_dir() else _read_dataset)(root, give)
    except Exception as error:
        errors.append(error)
    return facts, errors


def _read_dataset(root: Path, give: Callable[..., str | None]) -> None:
    dataset = open_dataset(root)
    rlds = isinstance(dataset, RldsDataset)
    names = [n for n in dataset.column_names if not (rlds and n in BOOKKEEPING)]
    give((-1, "fps"), lambda: float(dataset.fps))
    for i, number in enumerate(dataset.episode_numbers.tolist()):
        if rlds:  # an episode has no number but the place of its record: it is what it holds
            number = give((-1, "some episode"), lambda i=i: dataset.column("action", [i]))
        for name in names:
            give((number, name), lambda i=i, name=name: dataset.column(name, [i]))
        for camera, there in zip(dataset.cameras, dataset.present[i], strict=True):
            if there:
                give((number, camera), lambda i=i, camera=camera: dataset.frames(i, camera))
        give((number, "task"), lambda i=i: dataset.task(i))


def _read_store(root: Path, give: Callable[..., str | None]) -> None:
    store = open_store(root)
    rows = np.arange(int(store.lengths.sum()))
    for fact in ("fps", "lengths", "duplicate_of", "prompts", "runs"):
        give((-1, fact), lambda fact=fact: np.array(getattr(store, fact), object))
    for name in store.columns:
        give((-1, name), lambda name=name: store.column(name, rows))
    for episode, camera in np.argwhere(store.present).tolist():
        mine = store.starts[episode] + np.arange(store.lengths[episode])

        def pictures(mine: np.ndarray = mine, camera: str = store.cameras[camera]) -> np.ndarray:
            out = np.zeros((len(mine), store.image_size, store.image_size, 3), np.uint8)
            store.images(mine, camera, list(out))
            return out

        give((episode, store.cameras[camera]), pictures)


def _outcome(root: Path, original: Facts) -> tuple[str, str]:
    found, errors = read_all(root)
    reported: list[str] = []
    try:
        if (root / "parts").is_dir():
            verify(open_store(root))
        else:
            reported = [p.message for p in validate(root) if p.severity == "error"]
    except Exception as error:
        errors.append(error)
        reported = [str(error)]
    for error in errors:
        if not _is_clear(error, root):
            return "unclear", f"{type(error).__name__}: {error}"
    differing = [
        fact
        for fact, digest in found.items()
        if original.get(fact) != digest and fact[1] != "some episode"
    ]
    if differing and not reported:
        return "wrong", f"{len(differing)} differ, {differing[:2]}"
    if errors:
        return "error", str(errors[0])
    return ("reported", reported[0]) if reported else ("correct", "")


def _is_clear(error: Exception, root: Path) -> bool:
    """True if it is one sentence that names a file of the dataset."""
    text = str(error)
    return (
        isinstance(error, ValueError | FileNotFoundError) and str(root) in text and text[-1] == "."
    )
