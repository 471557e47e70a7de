"""Imports RLDS as TFDS stores it: each record is an episode, and its steps are the frames
(data/rlds reads them).

A source is a column or camera under its name in the RLDS dataset: `action`, or `observation.image`.
A LeRobot episode has one instruction: the first one of its steps that is not empty, from the field
that the layout's task names, or from all fields with instructions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import overload

import numpy as np

from data.columns import BOOKKEEPING
from data.errors import DatasetError, short
from data.lerobot.importing.arrays import (
    as_column,
    chosen,
    column_type,
    dim_names,
    oriented,
)
from data.lerobot.importing.layout import ImportLayout
from data.lerobot.importing.recording import (
    CheckedRecording,
    ImportedEpisode,
    PendingEpisode,
    RecordingFormat,
    instruction,
)
from data.rlds.dataset import RldsDataset, open_rlds
from models.files.terminal import logger

_FILES = ("features.json", "dataset_info.json")
_WORDINGS = "language_instruction"

_log = logger(__name__)


def _recognises(path: Path) -> bool:
    return all((path / name).is_file() for name in _FILES)


def _check(path: Path, layout: ImportLayout) -> CheckedRecording:
    dataset, resolved = _opened(path, layout.fps), _resolved(path, layout)
    for camera in resolved.camera_paths:
        seen = dataset.present[:, dataset.cameras.index(camera)]
        if not seen.all():
            raise DatasetError(
                path,
                f"'{camera}'",
                f"is missing in episode {int(np.argmin(seen))}, but every episode needs every "
                "camera; leave this camera out of the layout.",
            )
    _check_told(path, dataset, resolved)
    shapes: dict[str, tuple[int, ...] | None] = {
        name: tuple(dataset.features[camera.path]["shape"])
        for name, camera in resolved.cameras.items()
    }
    types = {
        name: column_type([dataset.features[source.path]["dtype"] for source in sources])
        for name, sources in resolved.columns.items()
    }
    names = {*dataset.column_names, *dataset.cameras, *dataset.depth_cameras} - {*BOOKKEEPING}
    unused = resolved.unused(names)
    return CheckedRecording(dataset.num_episodes, shapes | dict.fromkeys(types), types, unused)


@contextmanager
def _episodes(path: Path, layout: ImportLayout) -> Iterator[Sequence[PendingEpisode]]:
    yield _Records(path, _opened(path, layout.fps), _resolved(path, layout))


RLDS = RecordingFormat("RLDS", _recognises, _check, _episodes)


class _Records(Sequence[PendingEpisode]):
    """Episodes of a dataset, made on access, because there may be many."""

    def __init__(self, path: Path, dataset: RldsDataset, layout: ImportLayout) -> None:
        self._path, self._dataset, self._layout = path, dataset, layout

    def __len__(self) -> int:
        return self._dataset.num_episodes

    @overload
    def __getitem__(self, at: int) -> PendingEpisode: ...

    @overload
    def __getitem__(self, at: slice) -> list[PendingEpisode]: ...

    def __getitem__(self, at: int | slice) -> PendingEpisode | list[PendingEpisode]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        read = partial(_read, self._path, self._dataset, self._layout, range(len(self))[at])
        return PendingEpisode(f"{self._path}, episode {at}", read)


def _read(path: Path, dataset: RldsDataset, layout: ImportLayout, number: int) -> ImportedEpisode:
    names = sorted({source.path for sources in layout.columns.values() for source in sources})
    (block,) = dataset.stream(names, [number])
    flat = {name: values.reshape(len(values), -1) for name, values in block.items()}
    columns = {
        name: as_column([chosen(path, f"'{s.path}'", flat[s.path], s.dims) for s in sources])
        for name, sources in layout.columns.items()
    }
    frames = {
        name: oriented(dataset.frames(number, camera.path), camera)
        for name, camera in layout.cameras.items()
    }
    return ImportedEpisode(columns, frames, _told(path, dataset, layout, number), dim_names(layout))


@lru_cache(1)
def _opened(path: Path, fps: int) -> RldsDataset:
    return open_rlds(path, fps)


def _resolved(path: Path, layout: ImportLayout) -> ImportLayout:
    """The layout without patterns, which match numeric columns or, among cameras, images."""
    if layout.time:
        raise DatasetError(
            "layout", "time", "is given, but RLDS has steps at a steady rate; leave it out."
        )
    dataset = _opened(path, layout.fps)
    numbers = [
        name
        for name in dataset.column_names
        if name not in BOOKKEEPING and dataset.features[name]["dtype"] != "string"
    ]
    columns = replace(layout, cameras={}).resolved(numbers, path).columns
    cameras = replace(layout, columns={}).resolved(dataset.cameras, path).cameras
    return replace(layout, columns=columns, cameras=cameras)


def _told(path: Path, dataset: RldsDataset, layout: ImportLayout, number: int) -> str:
    """The instruction of an episode: the layout's, or the first that its steps name."""

    def steps(where: str) -> str:
        if where == _WORDINGS:
            mine = slice(*np.searchsorted(dataset.runs.episode, [number, number + 1]))
            texts = [dataset.prompts[task][0] for task in dataset.runs.task[mine].tolist()]
        else:
            texts = dataset.column(where, [number]).ravel().tolist()
        text = next((text for text in texts if text.strip()), "")
        if not text:
            raise DatasetError(
                path,
                f"episode {number}",
                f"names no instruction in '{where}'; give one for all with --task 'lift the cup', "
                "or train on the RLDS dataset directly, without importing it.",
            )
        return text

    return instruction(path, layout.task, steps)


def _check_told(path: Path, dataset: RldsDataset, layout: ImportLayout) -> None:
    """Checks the instructions of all episodes, if no record has to be read for them, and warns if
    only the first of several is used."""
    where = layout.task.path
    if where and where != _WORDINGS:
        texts = [n for n in dataset.column_names if dataset.features[n]["dtype"] == "string"]
        if where not in texts:
            raise DatasetError(
                path,
                f"'{where}'",
                f"is not a text column of the steps, which are {short(texts)}; correct 'task' in "
                "the layout.",
            )
        return
    for episode in range(dataset.num_episodes):
        _told(path, dataset, layout, episode)
    several = np.flatnonzero(np.bincount(dataset.runs.episode) > 1)
    if where and len(several):
        _log.warning(
            "%s: %d episodes have several instructions, one after the other (first: episode %d); "
            "each gets only its first.",
            path,
            len(several),
            several[0],
        )
