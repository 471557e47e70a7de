"""Recordings of other formats: files or folders that hold episodes, found by their names."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import DatasetError
from data.lerobot.importing.layout import ImportLayout, TaskSource


class ImportedEpisode(NamedTuple):
    """Columns [T, n] and images uint8 [T, h, w, 3] by name (or their videos, once encoded),
    dimension names of the columns that have some, and the instruction."""

    columns: dict[str, np.ndarray]
    frames: dict[str, Any]
    task: str
    names: dict[str, tuple[str, ...]]


Shapes = Mapping[str, tuple[int, ...] | None]
"""Shape of a frame's value by column and camera; None if only the data tell."""


class CheckedRecording(NamedTuple):
    """Number of a recording's episodes (1 if only the data tell), the shapes and, where known,
    column types that all of them have, and the names of what the layout takes nothing from."""

    episodes: int
    shapes: Shapes
    types: Mapping[str, str] = {}
    unused: tuple[str, ...] = ()


class PendingEpisode(NamedTuple):
    """An episode that is not read yet; messages call it `name`. `left_out`: seconds of the
    recording that gaps have cut out, counted with this episode."""

    name: str
    read: Callable[[], ImportedEpisode]
    left_out: float = 0.0


@dataclass(frozen=True)
class RecordingFormat:
    """One kind of recording.

    `recognises` decides by the name of a file or folder. `check` looks for all that can be wrong
    without reading images and columns. `episodes` opens the recording for a block, in which its
    episodes can be read in order. `beside` lists further files that hold its content.
    """

    name: str
    recognises: Callable[[Path], bool]
    check: Callable[[Path, ImportLayout], CheckedRecording]
    episodes: Callable[[Path, ImportLayout], AbstractContextManager[Sequence[PendingEpisode]]]
    beside: Callable[[Path, ImportLayout], Sequence[Path]] = lambda path, layout: ()


def require_alike(
    file: Path, place: str, found: CheckedRecording, first: CheckedRecording, other: str
) -> None:
    """Compares the columns and cameras of some episodes with those of the first one, named `other`
    in messages.

    Raises:
      DatasetError: one has columns or cameras that the other lacks, or of another shape or type.
    """
    for name in {**first.shapes, **found.shapes}:
        if (name in first.shapes) != (name in found.shapes):
            which = f"lacks '{name}', which" if name in first.shapes else f"has '{name}', which"
            has = "has" if name in first.shapes else "lacks"
            raise DatasetError(
                file,
                place or "recording",
                f"{which} {other} {has}; leave out one of the recordings, or what differs.",
            )
        for what, mine, theirs in (
            ("shape", found.shapes[name], first.shapes[name]),
            ("type", found.types.get(name), first.types.get(name)),
        ):
            if None not in (mine, theirs) and mine != theirs:
                raise DatasetError(
                    file,
                    f"{place} '{name}'".strip(),
                    f"has {what} {mine}, but {theirs} in {other}; import it separately, or leave "
                    "it out.",
                )


def library(module: str, what: str) -> Any:
    """Imports a module of the extra `import`.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{what} needs the package {module.partition('.')[0]}; run `pip install -e "
            "'.[import]'`, which installs all that importing needs."
        ) from None


def instruction(file: Path, task: TaskSource, read: Callable[[str], str]) -> str:
    """A recording's instruction, in one line; `read` gives the text at a path.

    Raises:
      DatasetError: there is no instruction.
    """
    text = task.text
    if task.path:
        text = read(task.path)
    elif task.file:
        stem = file.name.partition(".")[0]
        match = re.fullmatch(task.file, stem)
        if match is None:
            raise DatasetError(
                file, "name", f"does not fit the layout's pattern '{task.file}'; give --task."
            )
        text = (match[1] or "").replace("_", " ")
    text = " ".join(text.split())
    if not text:
        raise DatasetError(
            file, "task", "the recording names no instruction; give it as --task 'lift the cup'."
        )
    return text


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts demo_2 before demo_10."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", text) if p]
