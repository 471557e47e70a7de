"""Imports a CSV that has a row for each frame, with numbers and names of images in a folder.

A file is one episode, or several that a column distinguishes. An image name must lead to a file
within the folder of the CSV, or it is refused.
"""

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from data.errors import DatasetError, naming_damage, short
from data.files.names import is_within
from data.lerobot.importing.arrays import check_rows, described, pending, read_rows
from data.lerobot.importing.layout import ImportLayout
from data.lerobot.importing.recording import (
    CheckedRecording,
    PendingEpisode,
    RecordingFormat,
    instruction,
)


class _Sheet(NamedTuple):
    """Cells of a CSV by column."""

    path: Path
    cells: Mapping[str, list[str]]

    def column(self, name: str) -> list[str]:
        if name not in self.cells:
            raise DatasetError(
                self.path,
                f"'{name}'",
                f"is not a column; the columns are {short(list(self.cells))}.",
            )
        return self.cells[name]

    def numbers(self, name: str) -> Float64[np.ndarray, " n"]:
        cells = self.column(name)
        try:
            return np.array(cells, np.float64)
        except ValueError:
            bad = next(k for k, cell in enumerate(cells) if not _is_number(cell))
            raise self.wrong(name, bad, "give a number, or leave the episode out.") from None

    def wrong(self, name: str, row: int, remedy: str) -> DatasetError:
        said = f"has {short(self.cells[name][row])} in line {row + 2}; {remedy}"
        return DatasetError(self.path, f"'{name}'", said)


class _PictureFiles:
    """Encoded images of a column, read on access."""

    def __init__(self, sheet: _Sheet, name: str) -> None:
        cells = sheet.column(name)
        self.shape, self.dtype = (len(cells),), np.dtype(object)
        self._paths = [sheet.path.parent / cell for cell in cells]
        for row, cell in enumerate(cells):
            if not cell or not is_within(cell):
                raise sheet.wrong(name, row, "name a file within the folder of the CSV.")
            if not self._paths[row].is_file():
                raise sheet.wrong(name, row, "there is no such file; copy it, or cut the episode.")

    def __getitem__(self, row: int) -> bytes:
        return self._paths[row].read_bytes()


def _recognises(path: Path) -> bool:
    return path.suffix == ".csv" and not path.is_dir()


def _check(path: Path, layout: ImportLayout) -> CheckedRecording:
    sheet = _read_sheet(path)
    resolved, arrays = _arrays(sheet, layout)
    _pending(sheet, resolved, arrays)
    return described(len(_runs(sheet, layout)), resolved, arrays, sheet.cells)


def _pictures(path: Path, layout: ImportLayout) -> list[Path]:
    """The image files that a CSV names."""
    sheet = _read_sheet(path)
    cameras = layout.resolved(sheet.cells, path).camera_paths
    return [path.parent / cell for name in cameras for cell in sheet.cells[name]]


@contextmanager
def _episodes(path: Path, layout: ImportLayout) -> Iterator[list[PendingEpisode]]:
    sheet = _read_sheet(path)
    yield _pending(sheet, *_arrays(sheet, layout))


CSV = RecordingFormat("CSV", _recognises, _check, _episodes, _pictures)


def _pending(
    sheet: _Sheet, layout: ImportLayout, arrays: Mapping[str, Any]
) -> list[PendingEpisode]:
    """Episodes of the sheet, cut where their times have gaps; the layout has no patterns."""
    path, found, runs = sheet.path, list[PendingEpisode](), _runs(sheet, layout)
    for number, rows in enumerate(runs):
        place = f"episode {number} " if len(runs) > 1 else ""
        read = partial(read_rows, path, place, layout, arrays, rows, _told(sheet, layout, rows))
        times = sheet.numbers(layout.time)[rows] if layout.time else None
        found += pending(path, place, layout, times, read)
    return found


def _read_sheet(path: Path) -> _Sheet:
    sentence = "is not a readable CSV file ({reason}); write it as UTF-8 with commas."
    with (
        naming_damage(path, "file", sentence, caught=(csv.Error, UnicodeDecodeError)),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        rows = csv.reader(file, strict=True)
        names = next(rows, [])
        found = [row for row in rows if row]
    if len(set(names)) != len(names) or not found:
        what = "no rows" if not found else "a column twice"
        raise DatasetError(path, "file", f"has {what}; its header is {short(names)}.")
    for number, row in enumerate(found, 2):
        if len(row) != len(names):
            raise DatasetError(
                path,
                f"line {number}",
                f"has {len(row)} cells, but there are {len(names)} columns; correct it.",
            )
    return _Sheet(path, dict(zip(names, map(list, zip(*found, strict=True)), strict=True)))


def _arrays(sheet: _Sheet, layout: ImportLayout) -> tuple[ImportLayout, dict[str, Any]]:
    """Layout without patterns, and the columns that it uses."""
    resolved = layout.resolved(sheet.cells, sheet.path)
    arrays: dict[str, Any] = {name: sheet.numbers(name) for name in resolved.column_paths}
    arrays |= {name: _PictureFiles(sheet, name) for name in resolved.camera_paths}
    check_rows(sheet.path, "", resolved, arrays, lambda name: sheet.path.stat().st_size)
    return resolved, arrays


def _runs(sheet: _Sheet, layout: ImportLayout) -> list[slice]:
    """Rows of the episodes: runs of one value of the column that numbers them."""
    count = len(next(iter(sheet.cells.values())))
    if not layout.episodes:
        return [slice(0, count)]
    cells = sheet.column(layout.episodes)
    starts = [k for k in range(count) if k == 0 or cells[k] != cells[k - 1]]
    known: set[str] = set()
    for start in starts:
        if cells[start] in known:
            raise sheet.wrong(layout.episodes, start, "sort the rows by episode.")
        known.add(cells[start])
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]


def _told(sheet: _Sheet, layout: ImportLayout, rows: slice) -> str:
    """The instruction of an episode, the same in all its rows."""

    def text(name: str) -> str:
        cells = sheet.column(name)[rows]
        for number, cell in enumerate(cells):
            if cell != cells[0]:
                raise sheet.wrong(
                    name, rows.start + number, f"other rows of the episode say {short(cells[0])}."
                )
        return cells[0]

    return instruction(sheet.path, layout.task, text)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
