"""Check a dataset, show its statistics and episodes, convert, verify and push it.

Conversion runs by itself when training starts. Use `convert` to do it beforehand, on a machine with
enough disk space and cores.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Column, Table
from rich.text import Text

from data import open_dataset
from data.files.checksums import CHECKSUMS, damaged_files, write_checksums
from data.files.folder import open_folder
from data.files.job import in_threads, running
from data.lerobot.card import dataset_card
from data.lerobot.upgrade import upgrade
from data.statistics.difference import difference
from data.statistics.stats import Stats, compute, compute_together
from data.store.convert import DESCRIPTION
from data.store.store import Encoding, build_store, damaged_store_files
from data.validation.validate import validate
from data.view.view import write_page, write_recording
from models import Scaling
from models.files.address import parse
from models.files.terminal import Console, counted, guard_tracebacks, say
from models.files.whole_text import write_whole
from tools.command_line.bars import progress, steps
from tools.command_line.commands import Commands
from tools.command_line.consent import consent
from tools.command_line.ending import following, in_a_line
from tools.command_line.options import cli
from tools.command_line.push import PushOptions, licence, push
from tools.command_line.versions import own_version
from tools.datasets.browse import browse_command
from tools.datasets.catalogue import catalogue_command
from tools.datasets.edit import edit_command
from tools.datasets.from_robot import from_robot_command
from tools.datasets.idle import idle_command
from tools.datasets.importing import import_command
from tools.datasets.place import ALONE, HERE, LakeOptions, RayOptions, lake, on_cluster
from tools.datasets.shown import (
    console_for,
    robot_of,
    show_dataset,
    show_difference,
    show_statistics,
    warn_of_depth,
)
from tools.recipes.insulation import VOCABULARY, measured, opened, trained
from tools.recipes.presets import load_preset, presets

DatasetPath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
FirstPath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
SecondPath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
StorePath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
DatasetPaths = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH …")]
Episode = Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")]
Out = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
DataFormat = Annotated[str, tyro.conf.arg(metavar="FILE.py:NAME")]
JsonFile = Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")]

app = Commands()
app.command(name="browse")(browse_command)
app.command(name="catalogue")(catalogue_command)
app.command(name="edit")(edit_command)
app.command(name="idle")(idle_command)
app.command(name="from-robot")(from_robot_command)
app.command(name="import")(import_command)

_PARTS = ("data", "images", "meta", "videos")
"""Folders of a LeRobot dataset; nothing beside them is pushed."""
INFO = "meta/info.json"
_PUSHED = PushOptions()


@app.command(name="validate")
def validate_command(
    path: DatasetPath,
    json_file: JsonFile = None,
    columns: tuple[str, ...] = (),
    look: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    data_format: DataFormat = "",
    options: Annotated[RayOptions, tyro.conf.arg(name="")] = HERE,
) -> None:
    """Check a dataset; exits with code 1 if it has errors.

    Args:
        path: Folder of the dataset (the one that holds meta/), hf://OWNER/NAME or a bucket's URL.
        json_file: File to write the findings to.
        columns: Columns to train on, whose values are checked most; default: those named as states
            and actions usually are.
        look: Also look at pictures of up to 64 episodes, for cameras that show nothing, stand still
            or show the same as another one.
        data_format: Your own format to read it with; the file is run (docs/own_dataset.md).
        options: Work on a cluster.
    """
    console = console_for(data_format)
    with on_cluster(options, console, data_format), steps() as report:
        where = parse(path).absolute if options.chosen else path
        problems = validate(where, report, columns, look)
    if json_file is not None:
        write_whole(json_file, json.dumps([asdict(p) for p in problems], indent=2) + "\n")
    errors = sum(problem.severity == "error" for problem in problems)
    if problems:
        finding = Column("Finding", overflow="fold")
        table = Table("", finding, title=path, title_justify="left", show_lines=True)
        for problem in problems:
            colour = "red" if problem.severity == "error" else "yellow"
            table.add_row(Text(problem.severity, colour), problem.message)
        console.print(table)
    say(
        console,
        f"{counted(errors, 'error')}, {counted(len(problems) - errors, 'warning')} in {path}.",
    )
    sys.exit(1 if errors else 0)


@app.command(name="checksums")
def checksums_command(path: DatasetPath) -> None:
    """Write the size and SHA-256 of every file to meta/checksums.json, so that `validate` finds any
    later damage. Datasets recorded by Chiliad have this file.

    Args:
        path: Folder of a local dataset.
    """
    open_dataset(path)
    write_checksums(Path(path))
    say(Console(), f"{Path(path) / CHECKSUMS}: written.")


@app.command(name="verify")
def verify_command(path: StorePath) -> None:
    """Compare every file of a frame store, or of a dataset that has meta/checksums.json, with the
    SHA-256 taken when it was written; exits with code 1 if any is damaged.

    Args:
        path: Folder of a frame store or dataset, or its URL.
    """
    console, folder = Console(), open_folder(path)
    if folder.exists(DESCRIPTION):
        damaged = damaged_store_files
    elif folder.exists(CHECKSUMS):
        damaged = damaged_files
    else:
        raise FileNotFoundError(
            f"{path}: has neither {DESCRIPTION} nor {CHECKSUMS}, so its files cannot be "
            "checked; finish the conversion of a frame store, or write a dataset's checksums "
            "with `python -m tools.data checksums`."
        )
    with progress("Verifying", "MB") as report:
        found = list(damaged(folder, lambda done, total: report(done // 10**6, total // 10**6)))
    for error in found:
        say(console, f"{error}")
    say(console, f"{counted(len(found), 'damaged file')} in {path}.")
    sys.exit(1 if found else 0)


@app.command(name="stats")
def stats_command(
    paths: DatasetPaths,
    json_file: JsonFile = None,
    data_format: DataFormat = "",
    options: Annotated[RayOptions, tyro.conf.arg(name="")] = HERE,
) -> None:
    """Show a dataset's size, tasks and exact statistics. For several datasets, also show the
    statistics of each robot's frames together, as in a mixture.

    Args:
        paths: Folder of the dataset (the one that holds meta/), hf://OWNER/NAME or a bucket's URL.
        json_file: File to write the statistics to.
        data_format: Your own format to read them with; the file is run (docs/own_dataset.md).
        options: Work on a cluster.
    """
    console = console_for(data_format)
    datasets = {
        path: open_dataset(parse(path).absolute if options.chosen else path) for path in paths
    }
    robots: dict[str, list[str]] = {}
    for path, dataset in datasets.items():
        robots.setdefault(robot_of(dataset), []).append(path)
    with on_cluster(options, console, data_format), steps() as report:
        of_path = {path: compute(dataset, None, None, report) for path, dataset in datasets.items()}
        of_robot = {
            robot: of_path[group[0]]
            if len(group) == 1
            else compute_together([datasets[path] for path in group], report)
            for robot, group in robots.items()
        }
    for path, dataset in datasets.items():
        show_dataset(console, path, dataset)
        show_statistics(console, of_path[path], dataset)
    for robot, group in robots.items():
        if len(group) > 1:
            say(console, f"{robot}: {', '.join(group)} together")
            show_statistics(console, of_robot[robot], datasets[group[0]])
    if json_file is not None:
        plain = {path: _plain(stats) for path, stats in of_path.items()}
        joint = {robot: _plain(stats) for robot, stats in of_robot.items()}
        several = {"robots": joint, "datasets": plain}
        said = json.dumps(several if len(plain) > 1 else plain[paths[0]], indent=2)
        write_whole(json_file, said + "\n")


@app.command(name="diff")
def diff_command(
    first: FirstPath, second: SecondPath, json_file: JsonFile = None, data_format: DataFormat = ""
) -> None:
    """Compare two datasets, or a dataset with what a robot sent (tools.serve --record): rate,
    cameras, ranges, prompts and images.

    Args:
        first: Folder of the dataset that a policy was trained on, or its URL.
        second: Folder of the other dataset or recording, or its URL.
        json_file: File to write the whole comparison to.
        data_format: Your own format to read them with; the file is run (docs/own_dataset.md).
    """
    console = console_for(data_format)
    ours, theirs = open_dataset(first), open_dataset(second)
    for dataset in (ours, theirs):
        warn_of_depth(console, dataset)
    with steps() as report:
        found = difference(ours, theirs, report)
    if json_file is not None:
        write_whole(json_file, json.dumps(found.to_json(), indent=2) + "\n")
    show_difference(console, found)


@app.command(name="view")
def view_command(
    path: DatasetPath,
    episode: Episode,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None,
    rerun: Annotated[Path | None, tyro.conf.arg(metavar="FILE.rrd")] = None,
    data_format: DataFormat = "",
) -> None:
    """Write a page of an episode to open in a browser: its videos, state and actions.

    Args:
        path: Folder of the dataset (the one that holds meta/), hf://OWNER/NAME or a bucket's URL.
        episode: Number of the episode, from 0.
        out: Page to write; episode-NUMBER.html if neither --out nor --rerun is given.
        rerun: Recording to write for rerun's viewer (needs `pip install -e '.[view]'`).
        data_format: Your own format to read it with; the file is run (docs/own_dataset.md).
    """
    console = console_for(data_format)
    dataset = open_dataset(path)
    warn_of_depth(console, dataset)
    if out is not None or rerun is None:
        out = out or Path(f"episode-{episode}.html")
        write_page(dataset, episode, out)
        say(console, f"{out}: open it in a browser.")
    if rerun is not None:
        write_recording(dataset, episode, rerun)
        say(console, f"{rerun}: open it with `rerun {rerun}`.")


@app.command(name="convert")
def convert_command(
    path: DatasetPath,
    out: Out,
    to: Literal["store", "v3.0"] = "store",
    image_size: int = 224,
    encoding: Encoding = "jpeg",
    resize: str = "antialiased",
    workers: int | None = None,
    data_format: DataFormat = "",
    options: Annotated[LakeOptions, tyro.conf.arg(name="")] = ALONE,
) -> None:
    """Decode a dataset once into a frame store that training reads; resumes where it stopped. Or
    convert a LeRobot v2.1 dataset to v3.0, with the same videos.

    Args:
        path: Folder of the dataset, or its URL.
        out: Folder or URL (s3://…, gs://…) for the new store, or folder for the new dataset.
        to: "store" for a frame store, "v3.0" for a LeRobot dataset (which no later option changes).
        image_size: Side of the images as the model sees them, in pixels.
        encoding: "jpeg" (quality 95), or "raw" for small images and the least work in training.
        resize: How images are fitted to that side. "antialiased" keeps the aspect ratio, with black
            borders; "bilinear" and "bilinear-dark" are LeRobot's for π0 and π0.5, "stretched" and
            "stretched-middle" GR00T's (docs/groot.md).
        workers: Shards made at the same time; default: one for every four cores.
        data_format: Your own format to read it with; the file is run (docs/own_dataset.md).
        options: Work on a cluster, and a catalogue.
    """
    if data_format and to == "v3.0":
        raise ValueError(
            f"--data-format is {data_format}, but only LeRobot v2.1 can be converted to v3.0; "
            "make a frame store (--to store)."
        )
    console = console_for(data_format)
    made = lake(options, console, [path], data_format=data_format)
    if to == "v3.0":
        with in_a_line(writing=out), made as note, progress("Copying") as report:
            upgraded = upgrade(parse(path).absolute, out, progress=report)
            note(out)
        say(console, f"{out}: LeRobot v3.0, {upgraded.num_frames} frames.")
        return
    threads = running(in_threads(workers)) if workers and not options.chosen else nullcontext()
    kept = "The finished part of the store is kept; run the same command again to continue."
    with in_a_line(kept, writing=out), made as note, threads, progress("Decoding") as report:
        dataset = open_dataset(parse(path).absolute)
        warn_of_depth(console, dataset)
        store = build_store(dataset, out, image_size, encoding, report, resize)
        note(out)
    say(console, f"{out}: {store.lengths.sum()} frames of {len(store.cameras)} cameras.")
    names = ("tiny", "pi05", *presets())
    if name := next((n for n in names if presets()[n].model.edge == image_size), ""):
        say(console, following("train", "--data", out, "--preset", name))


@app.command(name="push")
def push_command(
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")],
    options: Annotated[PushOptions, tyro.conf.arg(name="")] = _PUSHED,
) -> None:
    """Upload a LeRobot dataset, with a card, to the Hugging Face hub or a bucket, from where --data
    can read it.

    Args:
        path: Folder of the dataset (the one that holds meta/).
        url: hf://ORG/NAME, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.
        options: Licence, branch, and treatment of what is there already.
    """
    console, info = Console(), path / INFO
    if not info.is_file():
        raise FileNotFoundError(f"{info} is missing; give the folder of a LeRobot dataset.")
    dataset, kind = open_dataset(path), licence(options, console)
    if wrong := [p for p in validate(path) if p.severity == "error"]:
        raise ValueError(f"{path} has {counted(len(wrong), 'error')}, first: {wrong[0].message}")
    there = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    names = [n for n in sorted(there) if n.partition("/")[0] in _PARTS and n != INFO] + [INFO]
    card = dataset_card(url, kind, dataset, own_version())
    tag = str(json.loads(info.read_bytes())["codebase_version"])
    page = push(path, names, url, card, options, kind="dataset", tag=tag)
    say(console, f"Pushed {path} to {page}; train on it with --data {url}.")


@app.command(name="fast")
def fast_command(
    path: DatasetPath,
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")],
    preset: str = "tiny",
    horizon: int | None = None,
    action_scaling: Scaling | None = None,
    vocabulary: int = VOCABULARY,
    scale: float = 10.0,
    trust: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    data_format: DataFormat = "",
) -> None:
    """Train a FAST tokenizer on a dataset's action chunks, scaled as tools.train scales them, and
    print how many tokens a chunk takes. Pass it to training with `tools.train --fast FOLDER`.

    Args:
        path: Folder of the dataset, a frame store, a mixture (.json, .toml) or a URL.
        out: Folder to create for the tokenizer, in the files that transformers' AutoProcessor
            reads.
        preset: Preset of the run; its chunks, scaling, held-out share and seed are used.
        horizon: Steps of a chunk; default: the preset's.
        action_scaling: Statistics that scale actions; default: the preset's.
        vocabulary: Largest number of tokens.
        scale: Steps that a normalised unit is divided into; more are finer and need more tokens.
        trust: Run the transforms that a mixture's file names.
        data_format: Your own format to read it with; the file is run (docs/own_dataset.md).
    """
    console, run = console_for(data_format), load_preset(preset)
    if out.exists():
        raise ValueError(f"{out}: already exists; delete it or choose another folder.")
    if horizon is not None and horizon < 1:
        raise ValueError(f"--horizon is {horizon}; a chunk has at least 1 step.")
    with (
        in_a_line(writing=out),
        opened(
            path,
            horizon=horizon or run.model.horizon,
            action_scaling=action_scaling or run.data.action_scaling,
            holdout=run.data.holdout,
            seed=run.trainer.seed,
            console=console,
            consent=consent(trust, True, console),
        ) as spelling,
    ):
        fast = trained(spelling, vocabulary, console, scale)
        found = measured(spelling, fast, console)
        robot = spelling.processor.embodiments[0]
        fast.save(out, spelling.processor.horizon, len(robot.actions.offset))
    say(
        console,
        f"{out}: {fast.size} tokens. A chunk of {found.values} numbers takes {found.tokens:.1f} "
        f"(at most {found.longest}), {found.compression:.1f} numbers to a token; decoded, it is "
        f"{found.error:.4f} off in normalised units (RMS over {found.chunks} chunks).",
    )


def _plain(statistics: dict[str, Stats]) -> dict[str, dict[str, list]]:
    return {n: {k: v.tolist() for k, v in s.items()} for n, s in statistics.items()}


if __name__ == "__main__":
    guard_tracebacks()
    with in_a_line():
        cli(app, prog="python -m tools.data", description=__doc__)
