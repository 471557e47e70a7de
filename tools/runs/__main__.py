"""List, compare and plot runs of tools.train and tools.rl: a table, their configs' differences, one
page of HTML with learning curves and films, or a moving picture of the films alone.

    python -m tools.runs list runs
    python -m tools.runs compare runs/small runs/large
    python -m tools.runs plot runs/small runs/large --out runs.html
    python -m tools.runs plot runs/large --watch
    python -m tools.runs film runs/large --out large.webp

PATH is the folder of a run, or of several; what is read may be under way.
"""

import time
from pathlib import Path
from typing import Annotated

import tyro

from models.terminal import Console, guard_tracebacks
from sim.report.page import write_page
from tools.command_line.ending import in_a_line
from tools.runs.films import read_films
from tools.runs.page import METRICS, render
from tools.runs.seen import find_runs, read_runs
from tools.runs.sheet import write_sheet
from tools.runs.table import show_differences, show_runs

RunPaths = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH …")]

app = tyro.extras.SubcommandApp()

_SECONDS = 5


@app.command(name="list")
def list_command(paths: RunPaths = (Path("runs"),)) -> None:
    """Print a table of runs: where they stand, their losses, success, and time."""
    show_runs(read_runs(find_runs(paths)), Console())


@app.command(name="compare")
def compare_command(paths: RunPaths = (Path("runs"),)) -> None:
    """Print the table, and which fields of the runs' configs differ."""
    runs, console = read_runs(find_runs(paths)), Console()
    show_runs(runs, console)
    if len(runs) > 1:
        console.print()
        show_differences(runs, console)


@app.command(name="plot")
def plot_command(
    paths: RunPaths = (Path("runs"),),
    out: Path = Path("runs.html"),
    metrics: tuple[str, ...] = METRICS,
    watch: bool = False,
) -> None:
    """Write one page of HTML: table, learning curves, differences of configs, films.

    Args:
      out: the page.
      metrics: names of metrics.jsonl to draw, or patterns such as 'val_*'.
      watch: write the page again as long as one of the runs is under way; it reads itself again.
    """
    console = Console()
    console.print(f"Page: {out}", soft_wrap=True)
    while True:
        begin = time.monotonic()
        runs = read_runs(find_runs(paths))
        live = watch and any(run.at_work for run in runs)
        write_page(out, render(runs, metrics, _SECONDS if live else 0))
        if not live:
            break
        time.sleep(max(_SECONDS, 5 * (time.monotonic() - begin)))
    if watch:
        console.print("No run is under way; the page is complete.")


@app.command(name="film")
def film_command(
    paths: RunPaths = (Path("runs"),),
    out: Path = Path("runs.webp"),
    edge: int = 160,
    quality: int = 50,
) -> None:
    """Write the films of the runs' reports side by side, as one moving picture (animated WebP).

    Args:
      out: the picture.
      edge: of a film, pixels.
      quality: of WebP, 0 to 100: what a film takes in the file.
    """
    found = [read_films(path) for path in find_runs(paths)]
    console = Console()
    for sentence in (sentence for _, damage in found for sentence in damage):
        console.print(sentence, soft_wrap=True)
    films = [film for of_run, _ in found for film in of_run]
    if not films:
        raise ValueError(
            f"There are no films in {', '.join(map(str, paths))}; `python -m tools.evaluate --out "
            "RUN/evaluation` writes a report with some."
        )
    write_sheet(out, films, edge, quality)
    console.print(f"{out}: {len(films)} films, {out.stat().st_size:,} bytes", soft_wrap=True)


def main() -> None:
    """Command line."""
    with in_a_line("A page that was there stays as it is."):
        app.cli(prog="python -m tools.runs", description=__doc__)


if __name__ == "__main__":
    guard_tracebacks()
    main()
