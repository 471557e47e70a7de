"""The command `python -m tools.data idle`: stretches in which nothing happens, for a mixture to
leave out."""

import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.table import Column

from data import open_dataset
from data.dataset import dimension_names
from data.statistics.idle import IdleFrames, IdleLimits, find_idle, noisy_dims, to_json
from data.view.idle_page import write_idle_page
from models.files.terminal import Console, counted, say
from models.files.whole_text import write_whole
from tools.command_line.bars import steps
from tools.datasets.shown import console_for, table

IdlePath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
_LIMITS = IdleLimits()
_MOST_LISTED, _MOST_NOISY = 20, 3


def idle_command(
    path: IdlePath,
    still: float = _LIMITS.still,
    seconds: float = _LIMITS.seconds,
    columns: tuple[str, ...] = (),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE.json")] = None,
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None,
    data_format: Annotated[str, tyro.conf.arg(metavar="FILE.py:NAME")] = "",
) -> None:
    """Find stretches in which the robot stands still, and frames that were recorded twice. A
    mixture can leave them out of training (`frames`), without a copy of the dataset.

    Args:
        path: Folder of the dataset (the one that holds meta/), hf://OWNER/NAME or a bucket's URL.
        still: Share of its range (1st to 99th percentile) that every dimension stays within.
        seconds: Shortest time for which it does so, in seconds.
        columns: Columns that show movement; default: those named as states and actions usually are.
        json_file: File to write the remaining frames to, for a mixture.
        plot: Page to draw the stretches on.
        data_format: Your own format to read it with; the file is run (docs/own_dataset.md).
    """
    limits, console = IdleLimits(still, seconds), console_for(data_format)
    dataset = open_dataset(path)
    with steps() as report:
        found = list(find_idle(dataset, limits, columns, report))
    _show(console, found)
    total = int(dataset.lengths.sum())
    counts = (sum(int(getattr(one, kind).sum()) for one in found) for kind in ("still", "doubled"))
    shares = [f"{count} frames ({100 * count / total:.1f} %)" for count in counts]
    say(
        console,
        f"{path}: {shares[0]} still (within {100 * still:g} % of each dimension's range for "
        f"{seconds:g} s or more); {shares[1]} doubled (the same values as the frame before).",
    )
    noisy = noisy_dims(dataset, limits, found, columns)
    for one in noisy[:_MOST_NOISY]:
        names = dataset.features[one.column].get("names")
        size = math.prod(dataset.features[one.column]["shape"])
        say(
            console,
            f"never still: {one.column} '{dimension_names(names, size)[one.dim]}', which passes "
            f"through {100 * one.quietest:.2g} % of its range in its quietest {seconds:g} s, as "
            f"with noise of {100 * one.noise:.2g} %.",
        )
    if noisy:
        least = math.ceil(120 * noisy[0].quietest) / 100
        say(
            console,
            f"{counted(len(noisy), 'noisy dimension')} may hide what else stands still; give "
            f"--still {least:g}, or name quieter columns with --columns.",
        )
    if json_file is not None:
        write_whole(json_file, json.dumps(to_json(dataset, limits, found, columns)) + "\n")
        console.print(f'{json_file}: give it as "frames" of the dataset in a mixture.')
    if plot is not None:
        write_idle_page(dataset, limits, found, plot)
        say(console, f"{plot}: open it in a browser.")


def _show(console: Console, found: list[IdleFrames]) -> None:
    """Shows the episodes with the most idle frames, and where in them these frames lie."""
    names = ("Episode", "Frames", "Still at start", "Between", "At end", "Doubled")
    shown = table(*(Column(name, justify="right") for name in names))
    most = sorted(range(len(found)), key=lambda i: -int((found[i].still | found[i].doubled).sum()))
    listed = [i for i in most[:_MOST_LISTED] if (found[i].still | found[i].doubled).any()]
    for i in listed:
        still = found[i].still
        moving = np.flatnonzero(~still)
        first = int(moving[0]) if len(moving) else len(still)
        last = len(still) - 1 - int(moving[-1]) if len(moving) else 0
        between = int(still.sum()) - first - last
        numbers = (i, len(still), first, between, last, int(found[i].doubled.sum()))
        shown.add_row(*map(str, numbers))
    if listed:
        console.print(shown)
        console.print()
