"""Progress of long work at the terminal: a bar with its rate and the time left."""

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
from models.files.terminal import Console, Progress, TextColumn


@contextmanager
def steps() -> Iterator[Report]:
    """A bar that restarts with every step of the work, with its rate and the time left."""
    rate = TextColumn("{task.fields[rate]:,.0f}/s")
    with Progress(*columns(rate), transient=True) as shown:
        task = shown.add_task("Opening", total=None, rate=0.0)

        def report(what: str, done: int, total: int) -> None:
            bar = shown.tasks[task]
            if bar.description != what or done < bar.completed:
                shown.reset(task, description=what, rate=0.0)
            rate = done / bar.elapsed if bar.elapsed else 0.0
            shown.update(task, completed=done, total=total, rate=rate)

        yield report


@contextmanager
def progress(
    what: str,
    unit: str = "frames",
    *,
    digits: int = 0,
    before: str = "",
    console: Console | None = None,
) -> Iterator[Callable[[int, int], None]]:
    """A bar of the work done out of the total, with its rate and the time left; it says `before`
    until the first report."""
    rate = TextColumn(f"{{task.fields[rate]:.{digits}f}} {unit}/s")
    with Progress(*columns(rate), console=console) as shown:
        task = shown.add_task(before or what, total=None, rate=0.0)

        def report(done: int, total: int) -> None:
            elapsed = shown.tasks[task].elapsed or 0.0
            rate = done / elapsed if elapsed else 0.0
            shown.update(task, completed=done, total=total, description=what, rate=rate)

        yield report


def columns(rate: ProgressColumn) -> tuple[ProgressColumn, ...]:
    """Columns of a bar that shows this rate."""
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
