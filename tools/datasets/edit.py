"""The command `python -m tools.data edit`: turns its options into an edit of data/edit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from data.edit.edit import edit_dataset
from data.edit.plan import Edit, EditPlan, Numbers, Trim
from data.errors import DatasetError
from data.files.partial import partial_of
from data.video.encoding import Codec, VideoEncoding
from models.files.address import parse, whole
from models.files.terminal import Console, counted, say
from tools.command_line.bars import progress
from tools.command_line.ending import in_a_line
from tools.datasets.place import ALONE, LakeOptions, lake

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
Pairs = tyro.conf.UseAppendAction[tuple[tuple[str, str], ...]]
EditedPaths = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH …")]


@dataclass(frozen=True)
class EditOptions:
    """Changes. Episodes are numbered from 0, through all datasets if there are several, and named
    as in 3,7-9 (9 included)."""

    delete: Annotated[str, tyro.conf.arg(metavar="EPISODES")] = ""
    """Episodes to leave out."""
    keep: Annotated[str | None, tyro.conf.arg(metavar="EPISODES")] = None
    """Episodes to keep; all others are left out."""
    order: Annotated[str, tyro.conf.arg(metavar="EPISODES")] = ""
    """Episodes that come first, in this order; the other episodes that stay follow."""
    split: Annotated[Pairs, tyro.conf.arg(metavar="NAME EPISODES")] = ()
    """Dataset to write at OUT/NAME: of these episodes, or of a share such as 0.8, in order."""
    trim: Annotated[Pairs, tyro.conf.arg(metavar="EPISODES FRAMES")] = ()
    """Frames to keep of these episodes ("all" for every one), as in 10-89, 10- or -89."""
    task: Annotated[Pairs, tyro.conf.arg(metavar="EPISODES TEXT")] = ()
    """New instruction of these episodes ("all" for every one); the last one given counts."""
    rename_task: Annotated[Pairs, tyro.conf.arg(metavar="OLD NEW")] = ()
    """New wording of an instruction, wherever it occurs."""
    rename: Annotated[Pairs, tyro.conf.arg(metavar="OLD NEW")] = ()
    """New name of a camera or column."""
    drop: Annotated[Repeated, tyro.conf.arg(metavar="NAME")] = ()
    """Camera or column to leave out."""
    cast: Annotated[Pairs, tyro.conf.arg(metavar="NAME DTYPE")] = ()
    """New type of a column of numbers, such as float32, whatever type its files have."""
    fps: float | None = None
    """Lower rate, at which the nearest frames are kept. Videos are re-encoded, as h264 unless
    --codec says otherwise."""
    codec: Codec | None = None
    """Codec to re-encode all cameras with; cameras stored as images become videos. Without it,
    video packets are copied, and no frame changes."""
    crf: int | None = None
    """Quality with --codec; 0 is best; default: 14 for h264, 16 for hevc, 20 for av1."""
    keyframes: int | None = None
    """Frames from one keyframe to the next with --codec; default: 2."""
    robot: str = ""
    """New name of the robot."""


_NONE = EditOptions()
_MOST_EPISODES = 10_000_000


def edit_command(
    paths: EditedPaths,
    out: Annotated[Path | None, tyro.conf.arg(metavar="OUT")] = None,
    in_place: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    options: Annotated[EditOptions, tyro.conf.arg(name="")] = _NONE,
    where: Annotated[LakeOptions, tyro.conf.arg(name="")] = ALONE,
) -> None:
    """Edit a LeRobot dataset into a new one, or join several: delete, keep, order and split
    episodes, trim frames, rename tasks, cameras and columns, drop cameras and columns, re-encode.
    Resumes where it stopped.

    Args:
        paths: Folder of the dataset, or its URL; several datasets are joined in this order.
        out: Folder to create for the new dataset (v3.0).
        in_place: Put the new dataset in the old one's place, and move the old one to PATH.old.
        options: Changes.
        where: Work on a cluster, and a catalogue.
    """
    if not paths:
        raise ValueError("Give the folder of a dataset to edit.")
    if (out is None) != in_place:
        raise ValueError(
            "Give either --out with a folder for the new dataset, or --in-place to put it in "
            "the place of the old one."
        )
    if out is None:
        if len(paths) != 1 or parse(paths[0]).is_remote:
            raise ValueError(
                f"--in-place is for one dataset on disk, not {', '.join(paths)}; give --out."
            )
        out = whole(parse(paths[0]).path)
    elif any(parse(path).same_as(out) for path in paths):
        raise ValueError(
            f"--out is {out}, which is a dataset to edit; choose another folder, or give "
            "--in-place instead of --out to put the new dataset in the place of the old one."
        )
    edit, console = read_edit(options), Console()
    kept = "Finished work is kept; run the same command again to continue."
    made = lake(where, console, paths)
    with in_a_line(kept, writing=out), made as note, progress("Writing") as report:
        try:
            plans = edit_dataset(
                [parse(path).absolute for path in paths], out, edit, progress=report
            )
        except DatasetError as error:
            if not (partial := partial_of(out)).exists():
                raise
            raise ValueError(f"{error} {kept} Or delete {partial} to start over.") from None
        for name in plans:
            note(out / name)
    for name, plan in plans.items():
        say(console, f"{out / name}: {_said(plan)}")
    if in_place:
        console.print(f"{out}.old is the dataset as it was; delete it when you no longer need it.")


def read_edit(options: EditOptions) -> Edit:
    """The edit that the options describe.

    Raises:
      ValueError: an option is malformed; the message names it.
    """
    encoding = None
    if options.codec is not None:
        interval = 2 if options.keyframes is None else options.keyframes
        encoding = VideoEncoding(options.codec, options.crf, interval)
    elif given := [n for n in ("crf", "keyframes") if getattr(options, n) is not None]:
        raise ValueError(f"--{given[0]} is given without --codec; give --codec too.")
    return Edit(
        delete=_numbers("--delete", options.delete),
        keep=None if options.keep is None else _numbers("--keep", options.keep),
        order=_numbers("--order", options.order),
        splits=tuple((name, _share(name, said)) for name, said in options.split),
        trims=tuple(_trim(*said) for said in options.trim),
        tasks=tuple((_some("--task", said), text) for said, text in options.task),
        task_names=options.rename_task,
        names=options.rename,
        drop=options.drop,
        casts=options.cast,
        encoding=encoding,
        fps=options.fps,
        robot=options.robot,
    )


def _said(plan: EditPlan) -> str:
    how = "copied" if plan.encoding is None else f"encoded as {plan.encoding.codec}"
    return (
        f"LeRobot v3.0, {counted(len(plan.parts), 'episode')}, {counted(plan.num_frames, 'frame')}"
        + f", videos {how}" * bool(plan.cameras)
        + "."
    )


def _numbers(option: str, text: str) -> Numbers:
    """Numbers as in 3,7-9, or those in a text file."""
    if text.endswith(".txt"):
        option, text = f"{option} {text}", _read(option, Path(text))
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ValueError(f"{option} is '{text}'; give episodes as in 3,7-9.")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"{option} has the range {part.strip()}, which ends before it begins.")
        if high >= _MOST_EPISODES:
            raise ValueError(f"{option} names episode {high}; give numbers below {_MOST_EPISODES}.")
        found += range(low, high + 1)
    return tuple(found)


def _read(option: str, file: Path) -> str:
    if not file.is_file():
        raise FileNotFoundError(
            f"{option}: {file} is missing; save it from the page of `python -m tools.data browse`, "
            "or write episodes into it as in 3,7-9."
        )
    return file.read_text().strip()


def _some(option: str, text: str) -> Numbers | None:
    return None if text == "all" else _numbers(option, text)


def _share(name: str, text: str) -> Numbers | float:
    if "." not in text:
        return _numbers(f"--split {name}", text)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--split {name} is '{text}'; give episodes as in 3,7-9, or a share as in 0.8."
        ) from None


def _trim(episodes: str, frames: str) -> Trim:
    first, dash, last = (piece.strip() for piece in frames.partition("-"))
    given = [piece for piece in (first, last) if piece]
    if not dash or not given or not all(map(_is_number, given)):
        raise ValueError(f"--trim {episodes} is '{frames}'; give frames as in 10-89, 10- or -89.")
    stop = int(last) + 1 if last else None
    return Trim(_some("--trim", episodes), int(first or 0), stop)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16
