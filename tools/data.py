"""Datasets at the command line: check one, see its statistics, convert it to a frame store.

Conversion happens by itself when training starts; the command is for doing it beforehand, on a
machine with the disk and the cores for it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from data import open_dataset
from data.columns import BOOKKEEPING
from data.convert import Run, in_threads
from data.ray_convert import on_ray
from data.stats import compute
from data.store import Encoding, build_store
from data.validate import validate

Dataset = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
Location = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
StoreLocation = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
JsonFile = Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")]

app = tyro.extras.SubcommandApp()


@app.command(name="validate")
def validate_command(path: Dataset, json_file: JsonFile = None) -> None:
    """Check a LeRobot v3.0 dataset; exits with 1 if it has errors.

    Args:
        path: Folder of the dataset (the one that holds meta/).
        json_file: File to write the findings to.
    """
    console = Console()
    with console.status("Checking") as status:
        problems = validate(path, lambda what: status.update(f"Checking {what}"))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(p) for p in problems], indent=2) + "\n")
    errors = sum(problem.severity == "error" for problem in problems)
    if problems:
        table = Table("", "Finding", title=str(path), title_justify="left", show_lines=True)
        for problem in problems:
            colour = "red" if problem.severity == "error" else "yellow"
            table.add_row(f"[{colour}]{problem.severity}", problem.message)
        console.print(table)
    console.print(f"{errors} errors, {len(problems) - errors} warnings in {path}.", soft_wrap=True)
    sys.exit(1 if errors else 0)


@app.command(name="stats")
def stats_command(path: Dataset, json_file: JsonFile = None) -> None:
    """Show a dataset's size, tasks and exact statistics.

    Args:
        path: Folder of the dataset (the one that holds meta/).
        json_file: File to write the statistics to.
    """
    console, dataset = Console(), open_dataset(path)
    statistics = compute(dataset)
    if json_file is not None:
        plain = {n: {k: v.tolist() for k, v in s.items()} for n, s in statistics.items()}
        json_file.write_text(json.dumps(plain, indent=2) + "\n")
    console.print(
        f"{path}: {dataset.num_episodes} episodes, {dataset.num_frames} frames at {dataset.fps} "
        f"fps, cameras {', '.join(dataset.cameras) or 'none'}",
        soft_wrap=True,
    )
    tasks = Table("Episodes", "Task")
    told = [dataset.task(i) for i in range(dataset.num_episodes)]
    for task in sorted(set(told)):
        tasks.add_row(str(told.count(task)), task)
    console.print(tasks)
    shown = ("mean", "std", "min", "q01", "q99", "max")
    table = Table(Column("Feature", no_wrap=True), "Dimension", *shown)
    for name in (n for n in statistics if n not in BOOKKEEPING):
        feature_stats = statistics[name]
        labels = _labels(dataset.features[name].get("names"), feature_stats["mean"].size)
        for dim, label in enumerate(labels):
            values = (f"{feature_stats[key].reshape(-1)[dim]:.3g}" for key in shown)
            table.add_row(name if dim == 0 else "", label, *values)
    console.print(table)


@app.command(name="convert")
def convert_command(
    path: Location,
    store: StoreLocation,
    image_size: int = 224,
    encoding: Encoding = "jpeg",
    workers: int | None = None,
    ray: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ray_address: str | None = None,
) -> None:
    """Decode a dataset once into a frame store that training reads; goes on where it stopped.

    Args:
        path: Folder of the dataset, or its URL.
        store: Folder or URL (s3://…, gs://…) to make the frame store at.
        image_size: Side of the pictures as the model sees them, in pixels.
        encoding: "jpeg" (quality 95), or "raw" for small pictures and the least work in training.
        workers: Shards made at a time; half as many as cores, if not given.
        ray: Make the shards with a Ray of this machine's own.
        ray_address: Make the shards on this Ray cluster ("auto": the one this machine is in).
    """
    run: Run | None = partial(in_threads, workers=workers) if workers else None
    if ray or ray_address:
        run = on_ray(ray_address or "local")
    with _progress("Decoding") as report:
        built = build_store(open_dataset(path), store, image_size, encoding, report, run)
    Console().print(
        f"{store}: {built.lengths.sum()} frames of {len(built.cameras)} cameras.", soft_wrap=True
    )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} frames/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=None, rate=0.0)

        def report(done: int, total: int) -> None:
            elapsed = progress.tasks[task].elapsed or 0.0
            rate = done / elapsed if elapsed else 0.0
            progress.update(task, completed=done, total=total, rate=rate)

        yield report


def _labels(names: object, size: int) -> list[str]:
    """Names of a feature's dimensions, which datasets give as a list, a dict of lists or not at
    all."""
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    if isinstance(names, list) and len(names) == size:
        return [str(name) for name in names]
    return [str(dim) for dim in range(size)]


if __name__ == "__main__":
    try:
        app.cli(prog="python -m tools.data", description=__doc__)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
