"""Work on a dataset as a list of independent units, done here, in threads or on a cluster.

A unit is a pure function's argument: what it makes goes to the job's folder, what it finds comes
back small, and the command that began the job finishes it by itself. Results come in the order of
the units wherever they were made, so what is summed up of them is the same to the last bit.
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
"""Called with the further amount of work that is done, in the job's own measure."""
Work = Callable[[U, Done], R]
"""Does a unit and returns its result; pickles, for other threads and machines."""


class RunUnits(Protocol):
    """Does units, and gives their results in the order of the units."""

    def __call__(self, work: Work[U, R], units: Sequence[U], done: Done) -> Iterator[R]: ...


def alone(work: Work[U, R], units: Sequence[U], done: Done) -> Iterator[R]:
    """One unit after the other, each when its result is asked for."""
    for unit in units:
        yield work(unit, done)


def in_threads(workers: int, *, shared: bool = False) -> RunUnits:
    """Does `workers` units at a time in this process. Every worker has the work for itself, as
    pickle copies it, unless it is `shared`; a unit that fails ends the others at their next
    `done`."""

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
    """Results of the units, in their order, made where `running` says; `here` if it says nothing.

    Raises:
      BaseException: as `work`; the first unit's, in their order, that failed.
    """
    run: Any = _chosen.get() or here
    return run(work, units, done)


@contextmanager
def running(run: RunUnits | None) -> Iterator[None]:
    """Lets every job of a block be done by `run`; None leaves them where they are."""
    if run is None:
        yield
        return
    token = _chosen.set(run)
    try:
        yield
    finally:
        _chosen.reset(token)


def cores() -> int:
    """Cores that the unit in work may use."""
    return _cores.get() or os.cpu_count() or 1


@contextmanager
def using_cores(number: int) -> Iterator[None]:
    """Lets units of a block, in this thread, use no more cores."""
    token = _cores.set(number)
    try:
        yield
    finally:
        _cores.reset(token)


_chosen: ContextVar[RunUnits | None] = ContextVar("run", default=None)
_cores: ContextVar[int | None] = ContextVar("cores", default=None)
