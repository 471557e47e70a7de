"""Imports zarr replay buffers: diffusion policy's folders, and UMI's `dataset.zarr.zip` with JPEG
XL.

`data/*` holds the frames of all episodes end to end, and `meta/episode_ends` where each ends. The
zarr package reads formats 2 and 3 of zarr; imagecodecs reads JPEG XL.
"""

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from data.errors import DatasetError, naming_damage, short
from data.files.json_file import read_json
from data.files.limits import require_budget, require_text
from data.lerobot.importing.arrays import (
    Unwritten,
    check_rows,
    described,
    pending,
    read_rows,
    require_filled,
    require_written,
    unwritten,
    without_depth,
)
from data.lerobot.importing.layout import ImportLayout
from data.lerobot.importing.recording import (
    CheckedRecording,
    ImportedEpisode,
    PendingEpisode,
    RecordingFormat,
    instruction,
    library,
)
from models.files.terminal import first_line

_ENDS = "meta/episode_ends"
_GROUP_FILES = (".zgroup", "zarr.json")
_METADATA = (*_GROUP_FILES, ".zarray", ".zattrs")
_KEY = re.compile(r"(?:c[./])?(\d+(?:[./]\d+)*)")
"""Names of the files of chunks, in formats 2 and 3."""


def _recognises(path: Path) -> bool:
    if path.is_dir():
        return path.suffix == ".zarr" or any((path / name).is_file() for name in _GROUP_FILES)
    return path.name.endswith((".zarr.zip", ".zarr"))


def _check(path: Path, layout: ImportLayout) -> CheckedRecording:
    with _open(path) as buffer:
        resolved, arrays, ends = _rows_of(buffer, layout)
        require_written(path, "", resolved, _lost(buffer, resolved, arrays).get)
        _pending(buffer, resolved, arrays, ends)
        return described(len(ends), resolved, arrays, buffer.names)


@contextmanager
def _episodes(path: Path, layout: ImportLayout) -> Iterator[list[PendingEpisode]]:
    with _open(path) as buffer:
        yield _pending(buffer, *_rows_of(buffer, layout))


ZARR = RecordingFormat("zarr", _recognises, _check, _episodes)


def _pending(
    buffer: "_Buffer", layout: ImportLayout, arrays: Any, ends: Int64[np.ndarray, " e"]
) -> list[PendingEpisode]:
    """Episodes of the buffer, cut where their times have gaps; the layout has no patterns."""
    path, text, begin = buffer.path, _told(buffer, layout), 0
    found = list[PendingEpisode]()
    for number, end in enumerate(ends.tolist()):
        rows, place = slice(begin, end), f"episode {number} "
        begin, read = end, partial(_read, path, place, layout, arrays, rows, text)
        times = None
        if layout.time:
            with _reading(path, place):
                times = np.asarray(arrays[layout.time][rows])
        found += pending(path, place, layout, times, read)
    return found


def _lost(
    buffer: "_Buffer", layout: ImportLayout, arrays: Mapping[str, Any]
) -> dict[str, Unwritten]:
    """Chunks that no file holds, by path. They may be zeros, which zarr leaves out, in a column of
    integers, of one or two numbers, or with rows of zeros elsewhere, unless there are rows that all
    columns lack."""
    paths = dict.fromkeys([*layout.column_paths, *layout.camera_paths])
    found = {path: lost for path in paths if (lost := buffer.lost(path)) is not None}
    columns = dict.fromkeys(layout.column_paths)
    lacking = [found[path].rows for path in columns if path in found]
    if len(lacking) == len(columns) > 1 and np.all(lacking, axis=0).any():
        return found
    for path in (path for path in columns if path in found):
        with _reading(buffer.path, f"'{path}'"):
            values = np.asarray(arrays[path][:])
        there = values.reshape(len(values), -1)[~found[path].rows]
        rest = not there.any(axis=1).all()
        zeros = there.dtype.kind != "f" or rest or len(np.unique(there)) <= 2
        found[path] = found[path]._replace(zeros=bool(zeros))
    return found


def _read(path: Path, place: str, *rows: Any) -> ImportedEpisode:
    with _reading(path, place):
        found = read_rows(path, place, *rows)
    require_filled(path, place, found.columns)
    return found


def _reading(path: Path, place: str) -> AbstractContextManager[None]:
    """Turns what zarr and the codecs raise on damage into an error that names the file."""
    return naming_damage(
        path,
        place.strip() or "file",
        "cannot be read ({reason}): it was cut off or damaged; copy it again.",
        kept=(MemoryError,),
    )


@contextmanager
def _open(path: Path) -> Iterator["_Buffer"]:
    zarr = library("zarr", "A zarr replay buffer")
    _register_codecs()
    with ExitStack() as stack:
        if path.is_dir():
            files: Any = path
            _require_sizes(path, files)
            store = zarr.storage.LocalStore(path, read_only=True)
        else:
            try:
                files = zipfile.Path(stack.enter_context(zipfile.ZipFile(path)))
            except (zipfile.BadZipFile, EOFError):
                raise DatasetError(
                    path, "file", "is not a readable zip file: it was cut off; copy it again."
                ) from None
            _require_sizes(path, files)
            store = zarr.storage.ZipStore(path, mode="r", read_only=True)
        stack.callback(store.close)
        if not any((files / name).is_file() for name in _GROUP_FILES):
            raise DatasetError(
                path, "file", "has no .zgroup or zarr.json, so it is not a zarr group."
            )
        with _reading(path, "file"):
            root = zarr.open_group(store, mode="r", use_consolidated=False)
        yield _Buffer(path, root, files)


def _require_sizes(path: Path, files: Any) -> None:
    """Raises DatasetError if metadata, or an entry of a zip file, unpacks to far too much, or a
    folder's entry is no file."""
    if isinstance(files, zipfile.Path):
        size = path.stat().st_size
        for entry in files.root.infolist():
            if entry.filename.rpartition("/")[2] in _METADATA:
                require_text(path, f"'{entry.filename}'", entry.file_size)
            require_budget(path, f"'{entry.filename}'", entry.file_size, size)
        return
    for folder, _, names in os.walk(path):
        for file in (Path(folder, name) for name in names):
            if not file.is_file():
                raise DatasetError(file, "file", "is not a regular file; copy the buffer again.")
            if file.name in _METADATA:
                require_text(path, f"'{file.relative_to(path)}'", file.stat().st_size)


class _Buffer(NamedTuple):
    """An open group, and its files, for what zarr does not report."""

    path: Path
    root: Any
    files: Any

    def array(self, name: str) -> Any:
        """An array whose codecs are known and run no code from the file."""
        codecs = self._codecs(name)
        if any("pickle" in codec for codec in codecs):
            raise self._wrong(name, "holds Python objects, which are not read; write numbers.")
        try:
            found = self.root[name]
        except Exception as error:
            named = "imagecodecs" in str(codecs)
            also = " (for those of imagecodecs, `pip install imagecodecs`)" if named else ""
            raise self._wrong(
                name,
                f"cannot be opened ({first_line(error)}), with codecs {', '.join(codecs)}; install "
                f"the package that has them{also}, or write the array without them.",
            ) from None
        if not hasattr(found, "shape"):
            raise self._wrong(name, "is not an array; give another layout.")
        return found

    @property
    def names(self) -> list[str]:
        """Names of the arrays of frames."""
        folder = self.files / "data"
        found = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        return sorted(name for name in found if not name.startswith(".") and name != "zarr.json")

    def size(self, name: str) -> int:
        """Bytes on disk of an array, or of the zip file that holds it."""
        if self.path.is_file():
            return self.path.stat().st_size
        return sum(file.stat().st_size for file in (self.path / name).rglob("*"))

    def lost(self, name: str) -> Unwritten | None:
        """Chunks of an array of frames that no file holds."""
        array, place = self.root[f"data/{name}"], f"data/{name}/"
        chunk = array.shards or array.chunks
        if 0 in chunk:
            raise self._wrong(f"data/{name}", "has chunks of no rows or dims; write it again.")
        keys = (_KEY.fullmatch(file.removeprefix(place)) for file in self._within(place))
        there = (tuple(map(int, re.split(r"[./]", key[1]))) for key in keys if key)
        return unwritten(array.shape, chunk, there)

    def _within(self, folder: str) -> list[str]:
        """Names of the files of a folder."""
        if isinstance(self.files, zipfile.Path):
            return [name for name in self.files.root.namelist() if name.startswith(folder)]
        found = (self.path / folder).rglob("*")
        return [file.relative_to(self.path).as_posix() for file in found]

    def _codecs(self, name: str) -> list[str]:
        """Names of an array's codecs, from its metadata."""
        for file in (".zarray", "zarr.json"):
            if (self.files / name / file).is_file():
                said = read_json(self.files / name / file, f"{self.path}/{name}/{file}", "copy it")
                with _reading(self.path, name):
                    codecs = [said.get("compressor"), *(said.get("filters") or ())]
                    codecs += said.get("codecs") or ()
                    return [str(c.get("id") or c.get("name")) for c in codecs if c]
        raise self._wrong(name, "is missing; give another layout.")

    def _wrong(self, name: str, sentence: str) -> DatasetError:
        return DatasetError(self.path, f"'{name}'", sentence)


def _register_codecs() -> None:
    """Registers the image codecs that are installed."""
    try:
        from imagecodecs.numcodecs import register_codecs
    except ImportError:
        return
    register_codecs(verbose=False)


def _ends(buffer: _Buffer, frames: int) -> Int64[np.ndarray, " e"]:
    """Rows at which the episodes of so many frames end."""
    path = buffer.path
    array = buffer.array(_ENDS)
    if len(array.shape) != 1 or array.dtype.kind not in "iu":
        raise DatasetError(
            path,
            f"'{_ENDS}'",
            f"is {array.dtype} of shape {array.shape}, but should be whole numbers, one for each "
            "episode.",
        )
    if array.shape[0] > frames:
        raise DatasetError(
            path,
            f"'{_ENDS}'",
            f"has {array.shape[0]} episodes, but the arrays have {frames} frames; copy it again.",
        )
    asked = array.dtype.itemsize * array.chunks[0]
    require_budget(path, f"'{_ENDS}'", asked, buffer.size(_ENDS))
    with _reading(path, _ENDS):
        ends = np.asarray(array[:]).astype(np.int64)
    if not len(ends) or (np.diff(ends, prepend=0) < 1).any():
        raise DatasetError(
            path, f"'{_ENDS}'", f"is {short(ends.tolist())}, but should increase, from above 0."
        )
    return ends


def _rows_of(
    buffer: _Buffer, layout: ImportLayout
) -> tuple[ImportLayout, dict[str, Any], Int64[np.ndarray, " e"]]:
    """Layout without patterns, arrays, each of as many rows as the episodes have frames, and the
    rows at which the episodes end."""
    path = buffer.path
    every = layout.resolved(buffer.names, path)
    paths = [*every.column_paths, *every.camera_paths]
    arrays = {name: buffer.array(f"data/{name}") for name in paths}
    resolved = without_depth(layout, every, arrays)
    count = check_rows(path, "", resolved, arrays, lambda name: buffer.size(f"data/{name}"))
    ends = _ends(buffer, count)
    if count != ends[-1]:
        raise DatasetError(
            path,
            f"'{_ENDS}'",
            f"ends at {ends[-1]}, but the arrays have {count} frames; was the recording cut off?",
        )
    return resolved, arrays, ends


def _told(buffer: _Buffer, layout: ImportLayout) -> str:
    """The instruction of all episodes: the layout's, or an attribute of the root, `@NAME`."""

    def attribute(where: str) -> str:
        value = buffer.root.attrs.get(where.removeprefix("@"))
        if not isinstance(value, str):
            raise DatasetError(
                buffer.path,
                f"'{where}'",
                "is not an attribute that holds text; give --task 'lift it'.",
            )
        return value

    return instruction(buffer.path, layout.task, attribute)
