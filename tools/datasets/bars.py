"""Progress of work on a dataset at the terminal: a bar with its rate and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from data.dataset import Report
from models.files.terminal import Progress, TextColumn


@contextmanager
def steps() -> Iterator[Report]:
    """A bar that restarts with every step of the work, with its rate and the time left."""
    with Progress(*_bar("{task.fields[rate]:,.0f}/s"), transient=True) as shown:
        task = shown.add_task("Opening", total=None, rate=0.0)

        def report(what: str, done: int, total: int) -> None:
            bar = shown.tasks[task]
            if bar.description != what or done < bar.completed:
                shown.reset(task, description=what, rate=0.0)
            rate = done / bar.elapsed if bar.elapsed else 0.0
            shown.update(task, completed=done, total=total, rate=rate)

        yield report


@contextmanager
def progress(what: str, unit: str = "frames") -> Iterator[Callable[[int, int], None]]:
    """A bar of the work done out of the total, with its rate and the time left."""
    with Progress(*_bar("{task.fields[rate]:.0f} " + f"{unit}/s")) as shown:
        task = shown.add_task(what, total=None, rate=0.0)

        def report(done: int, total: int) -> None:
            elapsed = shown.tasks[task].elapsed or 0.0
            rate = done / elapsed if elapsed else 0.0
            shown.update(task, completed=done, total=total, rate=rate)

        yield report


def _bar(rate: str) -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(rate),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
