"""Datasets, their statistics and their differences as tables at the terminal."""

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from data import Dataset
from data.columns import BOOKKEEPING
from data.dataset import dimension_names, first_prompts, use_format
from data.statistics.difference import CameraLooks, RecordingDifference, RecordingFacts
from data.statistics.scaling import narrow
from data.statistics.stats import Stats
from data.validation.check_pictures import check_depth
from models.files.terminal import Console, counted, say

_MOST_SHOWN = 1000
"""Largest number of characters of a task."""


def console_for(data_format: str) -> Console:
    """The terminal of a command that opens datasets, including those of a user's own format."""
    if data_format:
        use_format(data_format)
    return Console()


def show_dataset(console: Console, path: str, dataset: Dataset) -> None:
    """Size, rate and cameras, and how many episodes begin with each task."""
    say(
        console,
        Text(path, "bold"),
        f": {robot_of(dataset)}, {counted(len(dataset.lengths), 'episode')}, "
        f"{dataset.lengths.sum()} frames at {dataset.fps} fps, "
        f"cameras {', '.join(dataset.cameras) or 'none'}",
        sep="",
    )
    warn_of_depth(console, dataset)
    tasks = table(Column("Episodes", justify="right"), "Task")
    for task, count in first_prompts(dataset).most_common():
        more = "…" if len(task) > _MOST_SHOWN else ""
        tasks.add_row(str(count), task[:_MOST_SHOWN] + more)
    console.print(tasks)
    console.print()


def warn_of_depth(console: Console, dataset: Dataset) -> None:
    """A line about the depth cameras that a command leaves out."""
    for problem in check_depth(dataset):
        console.print(Text("warning", "yellow"), problem.message)


def show_statistics(console: Console, statistics: dict[str, Stats], dataset: Dataset) -> None:
    """A table per feature. Dimensions too narrow to divide by their range are yellow, and the lines
    below say how they are scaled instead."""
    shown = ("mean", "std", "min", "q01", "q99", "max")
    for name, stats in statistics.items():
        if name in BOOKKEEPING:
            continue
        feature = dataset.features[name]
        warnings = narrow(stats) if "float" in feature["dtype"] else {}
        numbers = (Column(key, justify="right", no_wrap=True) for key in shown)
        rows = table(name, *numbers)
        for dim, label in enumerate(dimension_names(feature.get("names"), stats["mean"].size)):
            values = (f"{np.ravel(stats[key])[dim]:.3g}" for key in shown)
            style = "yellow" if dim in warnings else None
            rows.add_row(label, *values, style=style)
        console.print(rows)
        console.print()
        for dim, why in warnings.items():
            console.print(Text("warning", "yellow"), f"{name}[{dim}]: {why}.")


def show_difference(console: Console, found: RecordingDifference) -> None:
    """Facts and ranges side by side, then each difference that matters."""
    facts = table("", "First", "Second")
    cameras = list(dict.fromkeys([*found.first.cameras, *found.second.cameras]))
    heads = ("path", "robot", "frames per second", "episodes, frames", "time between frames")
    sides = (_facts(side, cameras) for side in (found.first, found.second))
    for row in zip((*heads, *cameras, "prompts"), *sides, strict=True):
        facts.add_row(*row)
    console.print(facts)
    console.print()
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("B q01", "B q99"))
    own = (Column(name, justify="right", no_wrap=True) for name in ("A q01", "A q99"))
    ranges = table("Column", "Dim", *own, *numbers, "Outside of A", "By half ranges")
    for dim in found.dims:
        values = (dim.first[1], dim.first[3], dim.second[1], dim.second[3])
        ranges.add_row(
            *(dim.column, dim.name, *(f"{value:.3g}" for value in values)),
            *(f"{100 * dim.outside:.3g} %", f"{dim.beyond:.3g}"),
            style="yellow" if dim.outside else None,
        )
    console.print(ranges)
    console.print()
    for finding in found.findings:
        say(console, Text("differs", "yellow"), Text(finding))
    console.print(f"{counted(len(found.findings), 'difference')} that matter.")


def robot_of(dataset: Dataset) -> str:
    """Key of datasets that are scaled alike: the robot type, or the dataset if its robot is
    unknown."""
    return dataset.robot_type or str(dataset.root)


def table(*columns: Column | str) -> Table:
    """A table in the style that all of them share, which never cuts a name."""
    folded = (Column(c, overflow="fold") if isinstance(c, str) else c for c in columns)
    return Table(*folded, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)


def _facts(side: RecordingFacts, cameras: list[str]) -> list[str]:
    looks = [side.cameras.get(camera) for camera in cameras]
    return [
        side.path,
        side.robot or "unknown",
        f"{side.fps:g}",
        f"{side.episodes}, {side.frames}",
        f"{side.delta_t[0]:.3g} s, up to {side.delta_t[1]:.3g}" if side.delta_t else "unknown",
        *("none" if look is None else _look(look) for look in looks),
        f"{len(side.prompts)}",
    ]


def _look(look: CameraLooks) -> str:
    return f"{look.size[0]} × {look.size[1]}, RGB {' '.join(f'{v:.2f}' for v in look.mean)}"
