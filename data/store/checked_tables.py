"""Tables of a frame store, read with every value checked.

Anyone who can write a store can also write its checksums, so checksums say nothing about a
stranger's store: arrays may declare more than memory holds, runs may point outside of their
episodes, and JSON may hold anything.
"""

import io
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from data.dataset import Prompts, Runs, Subtasks
from data.errors import DatasetError, short
from data.files.limits import MOST_FRAMES
from data.statistics.stats import STATISTICS, Stats
from models.files.foreign_json import loads

RUNS = tuple(f"run_{field}" for field in Runs._fields)
"""Names of the arrays that store `Runs`."""

_EPISODES = ("lengths", "present", "alike", *RUNS)
_STATISTICS = (*STATISTICS, "count")


class CheckedTable(NamedTuple):
    """Content of a table's file, its name in messages, the dataset's number of cameras, and the
    values in a row of each of its columns."""

    content: bytes
    file: Path | str
    cameras: int
    columns: Mapping[str, int]


def read_episodes(table: CheckedTable, tasks: int) -> dict[str, np.ndarray]:
    """The arrays of `episodes.npz`, whose runs refer to `tasks` tasks.

    Raises:
      DatasetError: an array is missing, or has another form or other values than it should.
    """
    file, arrays = table.file, _read_arrays(table.content, table.file, _EPISODES)
    for name in _EPISODES:
        kind, axes = (np.bool_, 2) if name == "present" else (np.int64, 1)
        what = f"is {arrays[name].dtype}{list(arrays[name].shape)}"
        good = arrays[name].dtype == kind and arrays[name].ndim == axes
        _require(good, file, name, f"{what}, expected {np.dtype(kind)} of {axes} axes")
    lengths, present, alike = (arrays[name] for name in ("lengths", "present", "alike"))
    _require(len(lengths) > 0, file, "lengths", "has no episode")
    _require_range(lengths, 0, MOST_FRAMES, file, "lengths")
    shape = (len(lengths), table.cameras)
    _require(present.shape == shape, file, "present", f"is {present.shape}, expected {shape}")
    _require(alike.shape == lengths.shape, file, "alike", f"has {alike.size} episodes")
    _require_range(alike, 0, np.arange(len(alike)), file, "alike")
    _require_tiled(Runs(*(arrays[name] for name in RUNS)), lengths, file)
    _require_range(arrays["run_task"], 0, tasks - 1, file, "run_task")
    return arrays


def read_prompts(table: CheckedTable) -> Prompts:
    """The wordings of each task, from `prompts.json`.

    Raises:
      DatasetError: they are not lists of texts.
    """
    found, file = read_json(table.content, table.file), table.file
    _require(isinstance(found, list), file, "prompts", f"are {short(found)}, expected a list")
    for task, wordings in enumerate(found):
        texts = isinstance(wordings, list) and all(isinstance(text, str) for text in wordings)
        if not texts or not wordings:
            raise damaged(file, f"task {task}", f"is {short(wordings)}, expected its wordings")
    return tuple(map(tuple, found))


def read_subtasks(
    table: CheckedTable, texts: CheckedTable, lengths: Int64[np.ndarray, " e"]
) -> Subtasks:
    """Runs of `subtasks.npz`, and the texts of `subtasks.json` that they name.

    Raises:
      DatasetError: the arrays or texts are not what they should be.
    """
    told = read_json(texts.content, texts.file)
    strings = isinstance(told, list) and all(isinstance(text, str) for text in told)
    _require(strings, texts.file, "texts", f"are {short(told)}, expected a list of texts")
    arrays = _read_arrays(table.content, table.file, RUNS)
    for name, values in arrays.items():
        good = values.dtype == np.int64 and values.ndim == 1
        _require(good, table.file, name, f"is {values.dtype}{list(values.shape)}, expected int64")
    runs = Runs(*(arrays[name] for name in RUNS))
    _require_tiled(runs, lengths, table.file)
    _require_range(runs.task, -1, len(told) - 1, table.file, "run_task")
    return Subtasks(runs, tuple(told))


def read_stats(table: CheckedTable) -> dict[str, Stats]:
    """Statistics of columns, from `stats.json`.

    Raises:
      DatasetError: they are not finite numbers, or belong to other columns.
    """
    found, file = read_json(table.content, table.file), table.file
    _require(isinstance(found, dict), file, "stats", f"are {short(found)}, expected an object")
    for name, stats in found.items():
        about = short(name)
        _require(name in table.columns, file, about, "is not a column of the store")
        _require(isinstance(stats, dict), file, about, f"is {short(stats)}, expected statistics")
        for key in _STATISTICS:
            values, size = stats.get(key), 1 if key == "count" else table.columns[name]
            what = f"is {short(values)}, expected {size} finite numbers"
            _require(_are_numbers(values, size), file, f"{about}, {key}", what)
    return {
        name: {key: np.array(stats[key]) for key in _STATISTICS} for name, stats in found.items()
    }


def read_json(content: bytes, file: Path | str) -> Any:
    """Content of a store's JSON file.

    Raises:
      DatasetError: it is not JSON, or not JSON that Python accepts.
    """
    try:
        return loads(content)
    except ValueError as error:
        raise damaged(file, "file", f"is not valid JSON ({short(str(error))})") from None


def damaged(file: Path | str, field: str, what: str) -> DatasetError:
    """An error about a file with content that no conversion writes."""
    return DatasetError(file, field, f"{what}; delete the folder and convert the dataset again.")


def _read_arrays(content: bytes, file: Path | str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Arrays whose headers declare as many bytes as follow, so that no array is larger than the
    file."""
    arrays = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in names:
                info = archive.getinfo(f"{name}.npy")
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(content):
                    raise ValueError(f"{name} is compressed")
                arrays[name] = _read_array(archive.read(info), name)
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, OSError, RuntimeError) as error:
        what = f"does not hold the arrays of a store ({short(str(error))})"
        raise damaged(file, "arrays", what) from None
    return arrays


def _read_array(content: bytes, name: str) -> np.ndarray:
    """An array as np.save writes it: its header is matched, not evaluated."""
    size = int.from_bytes(content[8:10], "little")
    header = _HEADER.fullmatch(content[10 : 10 + size])
    if content[:8] != _MAGIC or header is None:
        raise ValueError(f"{name} has another header")
    kind, fortran, axes = (part.decode() for part in header.groups())
    shape = tuple(map(int, axes.replace(",", " ").split()))
    values = np.frombuffer(content, np.dtype(kind), offset=10 + size)
    if math.prod(shape) != values.size:
        raise ValueError(f"{name} declares {list(shape)} values but holds {values.size}")
    return values.reshape(shape, order="F" if fortran == "True" else "C")


_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '(<i8|\|b1)', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,18}, ?(?:\d{1,18})?)\), \} *\n"
)


def _require_tiled(runs: Runs, lengths: Int64[np.ndarray, " e"], file: Path | str) -> None:
    """Raises DatasetError unless the runs make up all frames of all episodes, in order."""
    for name, values in zip(RUNS, runs, strict=True):
        _require(values.shape == runs.episode.shape, file, name, f"has {values.size} runs")
    _require_range(runs.episode, 0, len(lengths) - 1, file, "run_episode")
    within = lengths[runs.episode]
    _require_range(runs.first, 0, within, file, "run_first")
    _require_range(runs.length, 0, within - runs.first, file, "run_length")
    starts, ends = np.cumsum(lengths) - lengths, np.cumsum(runs.length)
    follow = np.array_equal(starts[runs.episode] + runs.first, ends - runs.length)
    whole = follow and int(runs.length.sum()) == int(lengths.sum())
    _require(whole, file, "run_first", "does not go through all frames of all episodes in order")


def _require_range(
    values: Int64[np.ndarray, " n"],
    least: int,
    most: int | Int64[np.ndarray, " n"],
    file: Path | str,
    field: str,
) -> None:
    wrong = np.flatnonzero((values < least) | (values > most))
    if len(wrong):
        at, limit = int(wrong[0]), np.broadcast_to(most, values.shape)
        what = f"is {values[at]} at {at}, expected {least} to {limit[at]}"
        raise damaged(file, field, what)


def _require(good: bool, file: Path | str, field: str, what: str) -> None:
    if not good:
        raise damaged(file, field, what)


def _are_numbers(values: object, size: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == size
        and all(type(x) in (int, float) and abs(x) <= _LARGEST for x in values)
    )


_LARGEST = float(np.finfo(np.float64).max)
