"""The command `python -m tools.data browse`: a page of a whole dataset, alone or beside another."""

from pathlib import Path
from typing import Annotated

import tyro

from data import open_dataset
from data.statistics.idle import IdleLimits
from data.view.browse import write_browser
from models.files.terminal import counted, say
from tools.command_line.bars import steps
from tools.command_line.ending import in_a_line
from tools.datasets.shown import console_for, warn_of_depth

BrowsedPath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
_LIMITS = IdleLimits()


def browse_command(
    path: BrowsedPath,
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("browse"),
    against: Annotated[str, tyro.conf.arg(metavar="PATH")] = "",
    still: float = _LIMITS.still,
    seconds: float = _LIMITS.seconds,
    columns: tuple[str, ...] = (),
    data_format: Annotated[str, tyro.conf.arg(metavar="FILE.py:NAME")] = "",
) -> None:
    """Write a page of all episodes to open in a browser: images, tasks and what is odd, to filter
    and to flag for `edit`. Resumes where it stopped.

    Args:
        path: Folder of the dataset (the one that holds meta/), hf://OWNER/NAME or a bucket's URL.
        out: Folder to create; index.html in it is the page.
        against: Another dataset; its distributions are drawn beside this one's.
        still: Share of each dimension's range (1st to 99th percentile) that a still robot keeps to.
        seconds: Shortest time for which it does so, in seconds.
        columns: Columns that show movement; default: those named as states and actions usually are.
        data_format: Your own format to read it with; the file is run (docs/own_dataset.md).
    """
    limits, console = IdleLimits(still, seconds), console_for(data_format)
    dataset = open_dataset(path)
    warn_of_depth(console, dataset)
    other = open_dataset(against) if against else None
    kept = "Finished images are kept; run the same command again to continue."
    with in_a_line(kept, writing=out), steps() as report:
        counts = write_browser(dataset, out, report, against=other, limits=limits, columns=columns)
    said = ", ".join(f"{count} {mark}" for mark, count in counts.items() if count)
    say(
        console,
        f"{out / 'index.html'}: {counted(len(dataset.lengths), 'episode')} "
        f"({said or 'none is odd'}); open it "
        "in a browser.",
    )
