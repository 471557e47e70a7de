"""meta/ of LeRobot v3.0: many episodes per file, listed in parquet with the location of each.

Only the few columns that reading needs are loaded, as arrays: the files also hold statistics of
every episode, which are a hundred times as large.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64

from data.columns import BOOKKEEPING, open_parquet, read_columns, read_table, to_numpy
from data.errors import DatasetError, MissingFileError, naming_damage
from data.files.folder import Folder
from data.files.limits import MOST_FRAMES
from data.lerobot.metadata import JOURNAL, by_number, file_name, file_pattern, one_text_each

_READERS = 2
_EPISODES = "meta/episodes/*/*.parquet"
_HINTS = ("data/chunk_index", "data/file_index")
_PLACE = {"chunk_index": pa.int64(), "file_index": pa.int64(), "from_timestamp": pa.float64()}


class MetadataV30:
    """`Metadata` of a v3.0 dataset (see data/lerobot/metadata.py).

    Raises:
      MissingFileError, DatasetError: a file of it is missing or damaged; names file and column.
    """

    listing = "meta/episodes"
    tasks_file = "meta/tasks.parquet"
    wanders = True

    def __init__(self, folder: Folder, info: Mapping[str, Any], videos: tuple[str, ...]) -> None:
        self._folder, self._info = folder, info
        self._data_files = _listed(folder, file_pattern(folder, info, "data_path"))
        self.num_data_files = len(self._data_files)
        table = _read_episodes(folder, videos)
        path = folder.path(self.listing)
        self.numbers = _plain(path, table, "episode_index")
        self.lengths = _plain(path, table, "length")
        if (np.diff(self.numbers) <= 0).any():
            raise DatasetError(
                path,
                "column 'episode_index'",
                "lists an episode twice; remove one of the two or record the dataset again.",
            )
        self.texts = table["tasks"].combine_chunks() if "tasks" in table.column_names else None
        if folder.exists(JOURNAL):
            named = set(self._distinct(table)[0])
            self._data_files = [name for name in self._data_files if name in named]
            self.num_data_files = len(self._data_files)
        self.hints = self._hinted(table)
        self._places = {
            camera: {field: table[f"videos/{camera}/{field}"].to_numpy() for field in _PLACE}
            for camera in videos
        }

    def data_file(self, file: int) -> str:
        return self._data_files[file]

    def video(self, episode: int, camera: str) -> tuple[str, float]:
        place = {field: column[episode] for field, column in self._places[camera].items()}
        name = file_name(
            self._folder,
            self._info,
            "video_path",
            video_key=camera,
            chunk_index=int(place["chunk_index"]),
            file_index=int(place["file_index"]),
        )
        start = float(place["from_timestamp"])
        if not 0 <= start < 1e8:
            raise DatasetError(
                self._folder.path(name),
                "from_timestamp in meta/episodes",
                f"is {start:g} s for episode {self.numbers[episode]}, expected seconds from the "
                "video's beginning; copy or record the dataset again.",
            )
        return name, start

    def has_video(self, camera: str) -> Bool[np.ndarray, " e"]:
        place = self._places[camera]
        return (place["file_index"] >= 0) & ~np.isnan(place["from_timestamp"])

    def tasks(self) -> dict[int, str]:
        path, file = self._folder.local(self.tasks_file), self._folder.path(self.tasks_file)
        table = read_table(path, file=file)
        text = "task" if "task" in table.column_names else "__index_level_0__"
        if not {"task_index", text} <= set(table.column_names):
            raise DatasetError(
                file,
                "column 'task'",
                f"is missing (there are {table.column_names}, expected task_index and the text as "
                "'task' or as the pandas index); copy the file again.",
            )
        indices = to_numpy(file, "task_index", table["task_index"], BOOKKEEPING["task_index"])
        texts = to_numpy(file, text, table[text], {"dtype": "string", "shape": (1,)})
        return one_text_each(file, indices.reshape(-1).tolist(), texts.reshape(-1).tolist())

    def _hinted(self, table: pa.Table) -> Int64[np.ndarray, " e"]:
        """Number of the data file that each episode names; 0 if that file is not there."""
        if not set(_HINTS) <= set(table.column_names):
            return np.zeros(len(self.numbers), np.int64)
        distinct, which = self._distinct(table)
        known = {name: number for number, name in enumerate(self._data_files)}
        return np.array([known.get(name, 0) for name in distinct], np.int64)[which]

    def _distinct(self, table: pa.Table) -> tuple[list[str], Int64[np.ndarray, " e"]]:
        """Names of the data files, and each episode's index among them."""
        pairs = np.stack([table[field].to_numpy() for field in _HINTS], axis=1)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        names = [
            file_name(self._folder, self._info, "data_path", chunk_index=c, file_index=f)
            for c, f in distinct.tolist()
        ]
        return names, which.reshape(-1)


def _read_episodes(folder: Folder, videos: tuple[str, ...]) -> pa.Table:
    """The needed columns of meta/episodes by ascending episode_index; -1 and NaN for nulls."""
    needed = {"episode_index": pa.int64(), "length": pa.int64()}
    needed |= {f"videos/{camera}/{f}": kind for camera in videos for f, kind in _PLACE.items()}
    optional = dict.fromkeys(_HINTS, pa.int64())
    texts = {"tasks": pa.list_(pa.string())}

    def read(name: str) -> pa.Table:
        path, file = folder.local(name), folder.path(name)
        with open_parquet(path, file) as opened:
            there = opened.schema_arrow.names
            wanted = {k: kind for k, kind in (optional | texts).items() if k in there} | needed
            table = read_columns(opened, list(wanted), file).combine_chunks()
        return pa.table({k: _cast(file, k, table[k], kind) for k, kind in wanted.items()})

    with ThreadPoolExecutor(_READERS) as pool:
        tables = list(pool.map(read, _listed(folder, _EPISODES)))
    table = pa.concat_tables(tables, promote_options="default")
    order = np.argsort(table["episode_index"].to_numpy(), kind="stable")
    if (order != np.arange(len(order))).any():
        table = table.take(order)
    return table


def _cast(file: Any, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column in the type it should have, with nulls as -1 or NaN."""
    sentence = f"cannot be read as {kind} ({{reason}}); copy or record it again."
    with naming_damage(file, f"column '{name}'", sentence, caught=(pa.ArrowException,)):
        if pa.types.is_integer(kind) and pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)  # pandas' way to write a null
        column = column.cast(kind)
        if name in ("episode_index", "length") and column.null_count:
            raise pa.ArrowInvalid(f"{column.null_count} values are empty")
    if pa.types.is_nested(kind):
        return column
    return column.fill_null(-1 if pa.types.is_integer(kind) else float("nan"))


def _plain(path: Any, table: pa.Table, name: str) -> Int64[np.ndarray, " e"]:
    values = table[name].to_numpy()
    least = 1 if name == "length" else 0
    if len(values) == 0 or not least <= values.min() <= values.max() < MOST_FRAMES:
        raise DatasetError(
            path,
            f"column '{name}'",
            f"holds {f'{values.min()} to {values.max()}' if len(values) else 'nothing'}, expected "
            f"numbers from {least}; leave empty episodes out or copy the dataset again.",
        )
    return values


def _listed(folder: Folder, pattern: str) -> list[str]:
    """Names of the files that match the pattern, in order of their numbers."""
    files = sorted(folder.list(pattern), key=by_number)
    if not files:
        top, _, rest = pattern.partition("/*")
        raise MissingFileError(
            folder.path(top),
            f"*{rest}",
            "there is no such file; copy or record the dataset again.",
        )
    return files
