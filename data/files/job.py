"""Work on a dataset as a list of independent units, run here, in threads or on a cluster.

What a unit produces goes to the job's folder, and its small results are returned. They come in the
order of the units, wherever they were computed, so sums over them are the same to the last bit.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, local
from typing import Any, Protocol, TypeVar

U = TypeVar("U")
R = TypeVar("R")

Done = Callable[[int], None]
"""Called with the additional amount of work done, in the job's own measure."""
Work = Callable[[U, Done], R]
"""Does a unit and returns its result; can be pickled, for other threads and machines."""


def adding_up(report: Callable[[int, int], object] | None, total: int) -> Done:
    """Reports all work done so far, and the total, whenever more of it is done."""
    done = 0

    def told(amount: int) -> None:
        nonlocal done
        done += amount
        if report is not None:
            report(done, total)

    return told


class RunUnits(Protocol):
    """Does units and yields their results in the order of the units."""

    def __call__(self, work: Work[U, R], units: Sequence[U], done: Done) -> Iterator[R]: ...


def alone(work: Work[U, R], units: Sequence[U], done: Done) -> Iterator[R]:
    """Does one unit after the other, each when its result is requested."""
    for unit in units:
        yield work(unit, done)


def in_threads(workers: int, *, shared: bool = False) -> RunUnits:
    """Does `workers` units at a time in this process. Every worker has its own copy of the work,
    made by pickle, unless it is `shared`. If a unit fails, the others end at their next `done`."""

    def run(work: Work[U, R], units: Sequence[U], done: Done) -> Iterator[R]:
        if min(workers, len(units)) <= 1:
            yield from alone(work, units, done)
            return
        content = b"" if shared else pickle.dumps(work)
        own, stopped, lock = local(), Event(), Lock()

        def told(amount: int) -> None:
            if stopped.is_set():
                raise InterruptedError("Another unit failed.")
            with lock:
                done(amount)

        def make(unit: U) -> R:
            if not hasattr(own, "work"):
                own.work = work if shared else pickle.loads(content)
            with using_cores(-(-(os.cpu_count() or 1) // workers)):
                made: R = own.work(unit, told)
            return made

        pool = ThreadPoolExecutor(workers)
        try:
            for future in [pool.submit(make, unit) for unit in units]:
                yield future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)

    return run


def run_job(
    work: Work[U, R],
    units: Sequence[U],
    done: Done = lambda amount: None,
    here: RunUnits = alone,
) -> Iterator[R]:
    """Results of the units, in order, computed by the function that `running` set, or else by
    `here`.

    Raises:
      BaseException: as `work`; the error of the first unit, in order, that failed.
    """
    run: Any = _chosen.get() or here
    return run(work, units, done)


@contextmanager
def running(run: RunUnits | None) -> Iterator[None]:
    """Runs every job of a block by `run`; None changes nothing."""
    token = _chosen.set(run or _chosen.get())
    try:
        yield
    finally:
        _chosen.reset(token)


def cores() -> int:
    """Number of cores that the current unit may use."""
    return _cores.get() or os.cpu_count() or 1


@contextmanager
def using_cores(number: int) -> Iterator[None]:
    """Limits units of a block, in this thread, to this number of cores."""
    token = _cores.set(number)
    try:
        yield
    finally:
        _cores.reset(token)


_chosen: ContextVar[RunUnits | None] = ContextVar("run", default=None)
_cores: ContextVar[int | None] = ContextVar("cores", default=None)
