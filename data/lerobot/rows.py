"""Rows of episodes in parquet files, read on demand and no more than a few row groups at once.

The location of an episode in the metadata is too often wrong (for the first of every file in
datasets that LeRobot 0.4 converted), so it is only where the search begins: rows belong to an
episode by their own `episode_index`. For this the column is read, not parquet's statistics of it:
accessing those ends the process if a footer is damaged.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64

from data.columns import BOOKKEEPING, ParquetFile, open_parquet, read_columns, reading, to_numpy
from data.errors import DatasetError
from data.files.folder import Folder
from data.lerobot.metadata import Metadata
from data.video.still_images import given

_BLOCK_ROWS = 1 << 16
_EPISODE, _FRAME, _TIME = "episode_index", "frame_index", "timestamp"


class Groups(NamedTuple):
    """Row groups `start` to `stop` of a data file."""

    file: int
    start: int
    stop: int


class _Ranges(NamedTuple):
    """Lowest and highest episode_index, and rows, of each row group of a file. `ordered` if neither
    the lowest nor the highest ever decreases."""

    first: Int64[np.ndarray, " g"]
    last: Int64[np.ndarray, " g"]
    rows: Int64[np.ndarray, " g"]
    ordered: bool

    def holding(self, number: int) -> tuple[int, int]:
        """The range of row groups that may hold rows of an episode; (0, 0) if none may."""
        if self.ordered:
            start = int(np.searchsorted(self.last, number, "left"))
            stop = int(np.searchsorted(self.first, number, "right"))
            return (start, stop) if start < stop else (0, 0)
        found = np.flatnonzero((self.first <= number) & (number <= self.last))
        return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)


class ParquetRows:
    """The data files of a dataset; episodes are given by their position in `metadata`. For one
    thread at a time."""

    def __init__(
        self, folder: Folder, metadata: Metadata, features: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._folder, self._metadata = folder, metadata
        self._features = {**features, **BOOKKEEPING}
        self._ranges: dict[int, _Ranges] = {}
        self._open: tuple[int, ParquetFile] | None = None
        self._last: tuple[tuple[Groups, tuple[str, ...]], pa.Table] | None = None

    def blocks(
        self, names: Sequence[str], episodes: Sequence[int] | np.ndarray
    ) -> Iterator[dict[str, np.ndarray]]:
        """Columns [n, *shape] of these episodes end to end, some whole episodes at a time.

        Raises:
          MissingFileError, DatasetError: a file is missing or damaged, or not all rows of an
            episode are there.
        """
        for groups, members in self._batches(episodes):
            table = self._episodes(groups, members, names)
            file = self.path(groups.file)
            yield {name: to_numpy(file, name, table[name], self._features[name]) for name in names}

    def cells(self, episode: int, name: str) -> tuple[Any, pa.Array]:
        """The file that holds an episode, and its rows of one column as stored there."""
        ((groups, members),) = self._batches([episode])
        column = self._episodes(groups, members, [name])[name].combine_chunks()
        return self.path(groups.file), column

    def filled(self, name: str, episodes: Int64[np.ndarray, " k"]) -> Bool[np.ndarray, " e"]:
        """Mask of all episodes: False for those of `episodes` that have no image in a column of
        images."""
        present = np.ones(len(self._metadata.numbers), bool)
        for groups, members in self._batches(episodes):
            if self._without_path(groups, name):
                for episode in members:
                    cells = self.cells(episode, name)[1]
                    present[episode] = given(cells).any()
        return present

    def place(self, episode: int) -> Groups:
        """The row groups that hold an episode, as far as their ranges tell."""
        number = int(self._metadata.numbers[episode])
        for file in self._candidates(episode):
            ranges = self._read_ranges(file)
            if not self._metadata.wanders:
                self._require_only(number, file, ranges)
            start, stop = ranges.holding(number)
            if start < stop:
                return Groups(file, start, stop)
        raise self._incomplete(episode, 0)

    def require_no_strays(self) -> None:
        """Raises DatasetError if the data files have rows of episodes that are not listed."""
        if not self._metadata.wanders:
            return  # each file was checked against its episode when it was read
        files = range(self._metadata.num_data_files)
        rows = sum(int(self._read_ranges(file).rows.sum()) for file in files)
        if rows == self._metadata.lengths.sum():
            return
        strays = []
        for file in files:
            table = self._read(Groups(file, 0, len(self._read_ranges(file).rows)), ())
            numbers = table[_EPISODE].to_numpy()
            strays.append(numbers[~np.isin(numbers, self._metadata.numbers)])
        stray = np.concatenate(strays)
        if len(stray):
            raise DatasetError(
                self._folder.path("data"),
                "column 'episode_index'",
                f"{len(stray)} rows have {stray[0]} or another value that {self._metadata.listing} "
                "does not list; copy or record the dataset again.",
            )
        raise DatasetError(
            self._folder.path("data"),
            "files",
            f"hold {rows} rows, but {self._metadata.listing} lists {self._metadata.lengths.sum()}; "
            "an episode is stored twice, so remove one of the two files.",
        )

    def counts_frames(self, file: int) -> bool:
        """True if a data file lacks frame_index, which is then made from the order of its rows:
        v2.x has one episode per file, and GR00T's datasets leave the column out."""
        return not self._metadata.wanders and _FRAME not in self._file(file).schema_arrow.names

    def path(self, file: int) -> Any:
        """Name of a data file in error messages."""
        return self._folder.path(self._metadata.data_file(file))

    def _batches(self, episodes: Sequence[int] | np.ndarray) -> Iterator[tuple[Groups, list[int]]]:
        """Consecutive episodes of one file whose row groups are read together: up to `_BLOCK_ROWS`
        rows, or more if they share row groups."""
        groups, members, rows = Groups(-1, 0, 0), list[int](), 0
        for episode in map(int, episodes):
            place, length = self.place(episode), int(self._metadata.lengths[episode])
            shares = place.start < groups.stop and groups.start < place.stop
            follows = place.start == groups.stop and rows + length <= _BLOCK_ROWS
            if place.file == groups.file and (shares or follows):
                start, stop = min(groups.start, place.start), max(groups.stop, place.stop)
                groups = Groups(place.file, start, stop)
            else:
                if members:
                    yield groups, members
                groups, members, rows = place, [], 0
            members.append(episode)
            rows += length
        if members:
            yield groups, members

    def _candidates(self, episode: int) -> Iterator[int]:
        """Data files that may hold an episode, the likeliest first."""
        hint = int(self._metadata.hints[episode])
        yield hint
        if self._metadata.wanders:
            others = (k for k in range(self._metadata.num_data_files) if k != hint)
            yield from sorted(others, key=lambda k: abs(k - hint))

    def _episodes(self, groups: Groups, members: Sequence[int], names: Sequence[str]) -> pa.Table:
        """The rows of episodes that should lie in `groups`, in their order."""
        table = self._read(groups, tuple(names))
        numbers = table[_EPISODE].to_numpy()
        wanted, lengths = (a[list(members)] for a in self._numbers)
        first, end = (np.searchsorted(numbers, wanted, side) for side in ("left", "right"))
        if np.array_equal(end - first, lengths):
            if np.array_equal(first[1:], end[:-1]):
                return table.slice(first[0], lengths.sum())
            pieces = [table.slice(a, n) for a, n in zip(first, lengths, strict=True)]
        else:
            pieces = [
                table.slice(first[k], lengths[k])
                if end[k] - first[k] == lengths[k]
                else self._gathered(episode, names)
                for k, episode in enumerate(members)
            ]
        return pa.concat_tables(pieces, promote_options="permissive")

    def _gathered(self, episode: int, names: Sequence[str]) -> pa.Table:
        """The rows of one episode, from whichever files have them."""
        number, length = (int(a[episode]) for a in self._numbers)
        pieces = []
        for file in self._candidates(episode):
            start, stop = self._read_ranges(file).holding(number)
            if start < stop:
                table = self._read(Groups(file, start, stop), tuple(names))
                rows = np.flatnonzero(table[_EPISODE].to_numpy() == number)
                pieces.append(table.slice(rows[0], len(rows)) if len(rows) else table.slice(0, 0))
        if sum(map(len, pieces)) != length:
            raise self._incomplete(episode, sum(map(len, pieces)))
        return _sorted(pa.concat_tables(pieces, promote_options="permissive"))

    @property
    def _numbers(self) -> tuple[Int64[np.ndarray, " e"], Int64[np.ndarray, " e"]]:
        return self._metadata.numbers, self._metadata.lengths

    def _read(self, groups: Groups, names: tuple[str, ...]) -> pa.Table:
        """Row groups, sorted by episode and frame."""
        key = (groups, names)
        if self._last is None or self._last[0] != key:
            file = self._file(groups.file)
            columns, path = dict.fromkeys((*names, _EPISODE, _FRAME)), self.path(groups.file)
            if counts := self.counts_frames(groups.file):
                del columns[_FRAME]
            table = read_columns(file, list(columns), path, range(groups.start, groups.stop))
            if counts:
                table = table.append_column(_FRAME, pa.array(np.arange(len(table))))
            if _TIME in columns and table[_TIME].type == pa.float64():
                at = table.column_names.index(_TIME)
                table = table.set_column(at, _TIME, table[_TIME].cast(pa.float32()))
            for name in (_EPISODE, _FRAME):
                to_numpy(path, name, table[name], BOOKKEEPING[name])
            self._last = key, _sorted(table)
        return self._last[1]

    def _file(self, number: int) -> ParquetFile:
        if self._open is None or self._open[0] != number:
            if self._open is not None:
                self._open[1].close()
                self._open = None
            name = self._metadata.data_file(number)
            self._open = number, open_parquet(self._folder.local(name), self._folder.path(name))
        return self._open[1]

    def _read_ranges(self, number: int) -> _Ranges:
        if number not in self._ranges:
            file, path = self._file(number), self.path(number)
            column = read_columns(file, [_EPISODE], path)[_EPISODE]
            with reading(path):
                groups = range(file.metadata.num_row_groups)
                rows = np.array([file.metadata.row_group(g).num_rows for g in groups], np.int64)
            values = to_numpy(path, _EPISODE, column, BOOKKEEPING[_EPISODE])
            if not self._metadata.wanders:
                self._ranges.clear()  # one for each episode, and none is needed again
            self._ranges[number] = _ranges(path, values, rows)
        return self._ranges[number]

    def _without_path(self, groups: Groups, name: str) -> bool:
        """True if a cell of these row groups lacks a path, so that only its bytes can be there."""
        file, path = self._file(groups.file), self.path(groups.file)
        kind = file.schema_arrow.field(name).type if name in file.schema_arrow.names else None
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
            return True
        with reading(path):
            rows = file.iter_batches(
                row_groups=range(groups.start, groups.stop), columns=[f"{name}.path"]
            )
            return any(pc.struct_field(batch[name], "path").null_count for batch in rows)

    def _require_only(self, number: int, file: int, ranges: _Ranges) -> None:
        """Raises DatasetError if an episode's own file has rows of another."""
        held = ranges.rows > 0
        if held.any() and {ranges.first[held].min(), ranges.last[held].max()} != {number}:
            first, last = ranges.first[held].min(), ranges.last[held].max()
            raise DatasetError(
                self.path(file),
                f"column '{_EPISODE}'",
                f"holds {first} to {last}, expected {number} in every row as the file's name says; "
                "renumber the rows or the file.",
            )

    def _incomplete(self, episode: int, there: int) -> DatasetError:
        number, length = (int(a[episode]) for a in self._numbers)
        return DatasetError(
            self._folder.path(self._metadata.listing),
            "column 'length'" if self._metadata.wanders else "key 'length'",
            f"episode {number} has length {length}, but the data files hold {there} rows of it (by "
            f"its {_EPISODE}), so the dataset is incomplete; copy or record it again.",
        )


def _ranges(path: Any, values: Int64[np.ndarray, " n"], rows: Int64[np.ndarray, " g"]) -> _Ranges:
    """Ranges of a file's `values` of episode_index, with so many `rows` in each row group."""
    if (rows < 0).any() or rows.sum() != len(values):
        raise DatasetError(
            path,
            "row groups",
            f"should hold {rows.sum()} rows but hold {len(values)}; copy the file again.",
        )
    full = rows[rows > 0]
    starts = np.cumsum(full) - full
    first, last = np.zeros_like(rows), np.full_like(rows, -1)
    if len(full):
        first[rows > 0] = np.minimum.reduceat(values, starts)
        last[rows > 0] = np.maximum.reduceat(values, starts)
    ordered = bool((first[1:] >= first[:-1]).all() and (last[1:] >= last[:-1]).all())
    return _Ranges(first, last, rows, ordered)


def _sorted(table: pa.Table) -> pa.Table:
    """Rows sorted by episode and frame; unchanged if they already are."""
    episode, frame = table[_EPISODE].to_numpy(), table[_FRAME].to_numpy()
    later, same = episode[1:] > episode[:-1], episode[1:] == episode[:-1]  # a difference may wrap
    if (later | same & (frame[1:] >= frame[:-1])).all():
        return table
    return table.take(np.lexsort((frame, episode)))
