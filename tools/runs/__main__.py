"""List, compare and plot runs of tools.train and tools.rl: a table, the differences between their
configs, an HTML page with learning curves and films, or an animated image of the films alone.

    python -m tools.runs list runs
    python -m tools.runs compare runs/small runs/large
    python -m tools.runs plot runs/small runs/large --out runs.html
    python -m tools.runs plot runs/large --watch
    python -m tools.runs film runs/large --out large.webp

PATH is the folder of a run, or a folder of several runs; runs may still be in progress.
"""

import time
from pathlib import Path
from typing import Annotated

import tyro

from models.files.terminal import Console, guard_tracebacks, say
from models.files.whole_text import write_whole
from tools.command_line.commands import Commands
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.runs.films import read_films
from tools.runs.page import METRICS, render
from tools.runs.run_record import find_runs, read_runs
from tools.runs.sheet import write_sheet
from tools.runs.table import show_differences, show_runs

RunPaths = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH …")]

app = Commands()

_SECONDS = 5


@app.command(name="list")
def list_command(paths: RunPaths = (Path("runs"),)) -> None:
    """Print a table of runs: their progress, losses, success and time.

    Args:
      paths: folders of runs, or folders that hold several.
    """
    show_runs(read_runs(find_runs(paths)), Console())


@app.command(name="compare")
def compare_command(paths: RunPaths = (Path("runs"),)) -> None:
    """Print the table, and the fields in which the runs' configs differ.

    Args:
      paths: folders of runs, or folders that hold several.
    """
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
    """Write one HTML page: table, learning curves, differences between configs, films.

    Args:
      paths: folders of runs, or folders that hold several.
      out: page to write.
      metrics: names from metrics.jsonl to draw, or patterns such as 'val_*'.
      watch: rewrite the page as long as one of the runs is in progress; the page reloads itself.
    """
    console = Console()
    say(console, f"Page: {out}")
    while True:
        begin = time.monotonic()
        runs = read_runs(find_runs(paths))
        live = watch and any(run.at_work for run in runs)
        write_whole(out, render(runs, metrics, _SECONDS if live else 0))
        if not live:
            break
        time.sleep(max(_SECONDS, 5 * (time.monotonic() - begin)))
    if watch:
        console.print("No run is in progress; the page is complete.")


@app.command(name="film")
def film_command(
    paths: RunPaths = (Path("runs"),),
    out: Path = Path("runs.webp"),
    edge: int = 160,
    quality: int = 50,
) -> None:
    """Write the films from the runs' reports side by side, as one animated image (WebP).

    Args:
      paths: folders of runs, or folders that hold several.
      out: image to write.
      edge: edge of a film, in pixels.
      quality: WebP quality, 0 to 100, on which the size of a film in the file depends.
    """
    found = [read_films(path) for path in find_runs(paths)]
    console = Console()
    for sentence in (sentence for _, damage in found for sentence in damage):
        say(console, sentence)
    films = [film for of_run, _ in found for film in of_run]
    if not films:
        raise ValueError(
            f"There are no films in {', '.join(map(str, paths))}; `python -m tools.evaluate --out "
            "RUN/evaluation` writes a report with some."
        )
    write_sheet(out, films, edge, quality)
    say(console, f"{out}: {len(films)} films, {out.stat().st_size:,} bytes")


def main() -> None:
    """Command line."""
    with in_a_line("An existing page is left unchanged."):
        cli(app, prog="python -m tools.runs", description=__doc__)


if __name__ == "__main__":
    guard_tracebacks()
    main()
