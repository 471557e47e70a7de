"""Imports HDF5: ALOHA's files of one episode each, robomimic's and LIBERO's groups in one file.

h5py reads a slice at a time. Links and storage that lead out of the file are refused, as an
untrusted file could fill a dataset with other content of the disk.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from data.errors import DatasetError, naming_damage, short
from data.files.limits import require_budget, require_text
from data.lerobot.importing.arrays import (
    Unwritten,
    check_rows,
    described,
    pending,
    read_rows,
    require_filled,
    require_written,
    stretches,
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
    natural,
    require_alike,
)
from models.files.foreign_json import DEEPEST

_SUFFIXES = (".hdf5", ".h5", ".hdf")


def _recognises(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not path.is_dir()


def _check(path: Path, layout: ImportLayout) -> CheckedRecording:
    """Checks the shapes, types and times of all episodes."""
    first: CheckedRecording | None = None
    with _open(path) as root, _reading(path, "file"):
        names = _episode_names(path, root, layout)
        for name in names:
            resolved, arrays, _ = _rows_of(path, root, name, layout)
            require_written(path, _place(name), resolved, partial(_lost, arrays))
            _told(path, root, name, layout)
            if layout.time:
                stretches(path, _place(name), arrays[layout.time][:], resolved)
            found = described(len(names), resolved, arrays, _names(_group(path, root, name)))
            first = first or found
            require_alike(path, name, found, first, names[0])
    assert first is not None
    return first


@contextmanager
def _episodes(path: Path, layout: ImportLayout) -> Iterator[list[PendingEpisode]]:
    with _open(path) as root:
        found = list[PendingEpisode]()
        with _reading(path, "file"):
            for name in _episode_names(path, root, layout):
                times = None
                if layout.time:
                    times = _rows_of(path, root, name, layout)[1][layout.time][:]
                read = partial(_read, path, root, name, layout)
                found += pending(path, _place(name), layout, times, read)
        yield found


HDF5 = RecordingFormat("HDF5", _recognises, _check, _episodes)


def _rows_of(
    path: Path, root: Any, name: str, layout: ImportLayout
) -> tuple[ImportLayout, dict[str, Any], int]:
    """Layout without patterns, arrays and number of frames of an episode."""
    group = _group(path, root, name)
    every = layout.resolved(_names(group), path)
    arrays = _arrays(path, _place(name), group, every)
    resolved = without_depth(layout, every, arrays)
    size = path.stat().st_size
    return resolved, arrays, check_rows(path, _place(name), resolved, arrays, lambda _: size)


def _read(
    path: Path,
    root: Any,
    name: str,
    layout: ImportLayout,
    rows: Int64[np.ndarray, " t"] | None,
) -> ImportedEpisode:
    with _reading(path, name or "file"):
        resolved, arrays, count = _rows_of(path, root, name, layout)
        whole, task = slice(0, count), _told(path, root, name, layout)
        found = read_rows(path, _place(name), resolved, arrays, whole, task, rows)
    require_filled(path, _place(name), found.columns)
    return found


def _reading(path: Path, place: str) -> AbstractContextManager[None]:
    """Turns what h5py raises on damage, of many types, into an error that names the file."""
    sentence = "cannot be read ({reason}); copy the file again."
    return naming_damage(path, place, sentence, kept=(MemoryError,))


def _lost(arrays: Mapping[str, Any], name: str) -> Unwritten | None:
    """Chunks of a dataset that were never written; one that is not chunked counts as one."""
    array = arrays[name]
    if array.chunks is None:
        return None if array.id.get_storage_size() else Unwritten(1, 1, np.ones(len(array), bool))
    starts = list[tuple[int, ...]]()
    array.id.chunk_iter(lambda chunk: starts.append(chunk.chunk_offset))
    places = (tuple(a // b for a, b in zip(s, array.chunks, strict=True)) for s in starts)
    return unwritten(array.shape, array.chunks, places)


def _place(name: str) -> str:
    return f"{name} " if name else ""


def _open(path: Path) -> Any:
    h5py = library("h5py", "An HDF5 file")
    sentence = (
        "is not a readable HDF5 file ({reason}): it was cut off or is something else; copy it "
        "again."
    )
    with naming_damage(path, "file", sentence, caught=(OSError,), kept=(FileNotFoundError,)):
        return h5py.File(path, "r")


def _episode_names(path: Path, root: Any, layout: ImportLayout) -> list[str]:
    """Groups that are one episode each, in natural order; "" is the whole file."""
    if not layout.episodes:
        return [""]
    folder, _, last = layout.episodes.rpartition("/")
    group = _group(path, root, folder)
    pattern = re.compile(re.escape(last).replace(r"\*", ".+"))
    found = sorted((name for name in group if pattern.fullmatch(name)), key=natural)
    if not found:
        raise DatasetError(
            path,
            f"'{layout.episodes}'",
            f"matches no group, only {short(sorted(group))} are there; give another layout.",
        )
    names = [f"{folder}/{name}" if folder else name for name in found]
    return _selected(path, root, names, layout.only) if layout.only else names


def _selected(path: Path, root: Any, names: list[str], only: str) -> list[str]:
    """The episodes that a list in the file names, or whose attribute is true."""
    if only.startswith("@"):
        told = {name: _entry(path, root, name).attrs.get(only[1:]) for name in names}
        if lacking := [name for name, value in told.items() if value is None]:
            raise DatasetError(
                path, f"'{lacking[0]}'", f"has no attribute '{only[1:]}'; correct --only."
            )
        found = [name for name in names if np.asarray(told[name]).all()]
    else:
        array = _entry(path, root, only)
        if not hasattr(array, "shape") or array.dtype.kind not in "OS" or len(array.shape) != 1:
            raise DatasetError(path, f"'{only}'", "is not a list of names; correct --only.")
        require_budget(path, f"'{only}'", array.nbytes, path.stat().st_size)
        listed = [one.decode() if isinstance(one, bytes) else str(one) for one in array[:]]
        known = {name.rpartition("/")[2]: name for name in names}
        if strange := [one for one in listed if one not in known]:
            raise DatasetError(
                path, f"'{only}'", f"lists {short(strange[0])}, which is not in the file."
            )
        found = [name for name in names if name.rpartition("/")[2] in listed]
    if not found:
        raise DatasetError(path, f"'{only}'", "selects no episode; correct --only.")
    return found


def _group(path: Path, root: Any, name: str) -> Any:
    found = _entry(path, root, name) if name else root
    if not hasattr(found, "keys"):
        raise DatasetError(path, f"'{name}'", "is not a group; give another layout.")
    return found


def _entry(path: Path, group: Any, name: str) -> Any:
    """Entry at a path; links must not lead out of the file."""
    h5py, here = library("h5py", "An HDF5 file"), group
    for part in name.strip("/").split("/"):
        link = here.get(part, getlink=True) if hasattr(here, "keys") else None
        if isinstance(link, h5py.ExternalLink):
            raise DatasetError(
                path, f"'{name}'", f"is a link to {short(link.filename)}; copy its content here."
            )
        if link is None or part not in here:
            raise DatasetError(path, f"'{name}'", "is missing; give another layout.")
        here = here[part]
    if here.file.filename != group.file.filename:  # a soft link may lead through an external one
        raise DatasetError(
            path, f"'{name}'", f"is a link to {short(here.file.filename)}; copy its content here."
        )
    if isinstance(here, h5py.Dataset) and (here.external or here.is_virtual):
        raise DatasetError(
            path, f"'{name}'", "is stored in other files; copy its content into this one."
        )
    return here


def _names(group: Any) -> list[str]:
    """Paths of all datasets and links below a group."""
    h5py, found = library("h5py", "An HDF5 file"), list[str]()

    def visit(name: str, link: Any) -> None:
        if name.count("/") >= DEEPEST:
            raise DatasetError(
                group.file.filename,
                short(name),
                f"is nested beyond {DEEPEST} groups; copy it to a group nearer to the top.",
            )
        if not isinstance(link, h5py.HardLink) or hasattr(group[name], "shape"):
            found.append(name)

    group.visititems_links(visit)
    return found


def _arrays(path: Path, place: str, group: Any, layout: ImportLayout) -> dict[str, Any]:
    paths = [*layout.column_paths, *layout.camera_paths]
    arrays = {name: _entry(path, group, name) for name in paths}
    for name, array in arrays.items():
        if not hasattr(array, "shape") or array.shape is None:
            raise DatasetError(path, f"{place}'{name}'", "is not an array; give another layout.")
    return arrays


def _told(path: Path, root: Any, name: str, layout: ImportLayout) -> str:
    """The instruction of an episode."""
    group = _group(path, root, name)
    return instruction(path, layout.task, lambda where: _text(path, root, group, where))


def _text(path: Path, root: Any, group: Any, where: str) -> str:
    """Text of a dataset, or of an attribute: `GROUP@NAME`, and in its JSON `GROUP@NAME.KEY`."""
    name, at, attribute = where.partition("@")
    top = root if name.startswith("/") or where.startswith("@/") else group
    entry = _entry(path, top, name) if name.strip("/") else top
    first, *keys = attribute.split(".")
    if not at and hasattr(entry, "nbytes"):
        require_text(path, f"'{where}'", entry.nbytes)
    elif first in entry.attrs:
        require_text(path, f"'{where}'", entry.attrs.get_id(first).get_storage_size())
    try:
        value = entry.attrs[first] if at else entry[()]
        value = value.decode() if isinstance(value, bytes) else value
        for key in keys:
            value = (json.loads(value) if isinstance(value, str) else value)[key]
    except (KeyError, TypeError, ValueError, RecursionError, OSError):
        value = None
    if not isinstance(value, str):
        raise DatasetError(
            path, f"'{where}'", "holds no text for the instruction; give it as --task 'lift it'."
        )
    return value
