"""The numbers of a frame store: columns as zarr arrays, and tables of every episode's facts.

Columns are float32 zarr3 arrays, sharded and uncompressed, so a shard is a flat array on disk
(zarr.dev, sharding codec) that training maps into memory. A random action chunk costs 5 µs that
way, and 20 to 60 µs through tensorstore, which writes the arrays.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Float32, Int64

from data.columns import BOOKKEEPING
from data.dataset import Dataset, Runs, subtasks_of
from data.errors import DatasetError
from data.files.folder import Folder, LocalFolder
from data.files.names import path_within
from data.frames import usual_columns
from data.statistics import stats
from models.files.address import whole
from models.files.terminal import logger

EPISODES, PROMPTS, STATS = "episodes.npz", "prompts.json", "stats.json"
FILES = (EPISODES, PROMPTS, STATS)
SUBTASKS, SUBTASK_TEXTS = "subtasks.npz", "subtasks.json"
OPTIONAL = (SUBTASKS, SUBTASK_TEXTS)
"""Tables of datasets that have subtasks."""

Block = dict[str, np.ndarray]

_SHARD_ROWS, _CHUNK_ROWS = 1 << 20, 1 << 10
_OPEN_SHARDS = 256

_log = logger(__name__)


def numeric_columns(dataset: Dataset) -> dict[str, int]:
    """The columns that a store keeps, with the number of values in a row of each: all numeric
    columns except LeRobot's bookkeeping."""
    kept = (name for name in stats.numeric_columns(dataset) if name not in BOOKKEEPING)
    return {name: int(np.prod(dataset.features[name]["shape"])) for name in kept}


def write(dataset: Dataset, folder: Path) -> None:
    """Writes columns, tables of episodes, prompts and statistics, a block of rows at a time. A
    warning names columns that are not finite and so have no statistics.

    Raises:
      DatasetError: a column is missing or of another type than declared.
    """
    dims, rows = numeric_columns(dataset), int(dataset.lengths.sum())
    duplicates = _Duplicates(dataset.lengths, _telling(dims))
    finite = dict.fromkeys(dims, True)

    def passing() -> Iterator[Block]:
        for block in _numbers(dataset, dims):
            duplicates.see(block)
            for name, values in block.items():
                finite[name] &= bool(np.isfinite(values).all())
            yield block

    _write_columns(passing(), dims, rows, folder)
    np.savez(
        folder / EPISODES,
        lengths=dataset.lengths,
        present=dataset.present,
        alike=duplicates.first,
        **prefixed(dataset.runs),
    )
    if (subtasks := subtasks_of(dataset)) is not None:
        np.savez(folder / SUBTASKS, **prefixed(subtasks.runs))
        (folder / SUBTASK_TEXTS).write_text(json.dumps(subtasks.texts, ensure_ascii=False))
    (folder / PROMPTS).write_text(json.dumps(dataset.prompts, indent=0, ensure_ascii=False))
    written, found = LocalFolder(folder), {}
    for name, width in dims.items():
        if finite[name]:
            found[name] = stats.describe_blocks(
                partial(_shards, written, name, (rows, width)), name
            )
        else:
            _log.warning("%s: '%s' is not finite, so it gets no statistics.", dataset.root, name)
    plain = {name: {k: v.tolist() for k, v in of.items()} for name, of in found.items()}
    (folder / STATS).write_text(json.dumps(plain, indent=1))


def prefixed(runs: Runs) -> dict[str, Any]:
    """Arrays of runs by the names under which they are stored."""
    return {f"run_{field}": values for field, values in runs._asdict().items()}


def find_duplicates(dataset: Dataset) -> Int64[np.ndarray, " e"]:
    """For each episode the first one with the same states and actions, as `Frames.duplicate_of`;
    reads all rows.

    Raises:
      DatasetError: a column is missing or of another type than declared.
    """
    dims = numeric_columns(dataset)
    told = {name: dims[name] for name in _telling(dims)}
    duplicates = _Duplicates(dataset.lengths, [*told])
    for block in _numbers(dataset, told):
        duplicates.see(block)
    return duplicates.first


def read_rows(
    folder: Folder, key: str, name: str, shape: tuple[int, int], rows: Int64[np.ndarray, "*n"]
) -> Float32[np.ndarray, "*n d"]:
    """Rows of a column that has this shape; `key` identifies the content of the store.

    Raises:
      IndexError: there is no such row.
      DatasetError: a shard of the column is damaged; names the file.
    """
    flat = np.ravel(rows)
    if flat.size and not 0 <= flat.min() <= flat.max() < shape[0]:
        raise IndexError(f"{folder.url}: frames {flat} are not all in 0..{shape[0] - 1}.")
    out = np.empty((len(flat), shape[1]), np.float32)
    shard = flat // _SHARD_ROWS
    for number in np.unique(shard).tolist():
        here = shard == number
        values = _kept_open(folder, key, name, shape, number)
        out[here] = values[flat[here] - number * _SHARD_ROWS]
    return out.reshape(*np.shape(rows), shape[1])


@lru_cache(_OPEN_SHARDS)
def _kept_open(
    folder: Folder, key: str, name: str, shape: tuple[int, int], shard: int
) -> Float32[np.ndarray, "n d"]:
    return _map(folder, name, shape, shard)


def _telling(dims: Mapping[str, int]) -> list[str]:
    """Columns that tell episodes apart."""
    state, actions = usual_columns(dims)
    return [*state, *actions] if state and actions else [*dims]


def _shards(
    folder: Folder, name: str, shape: tuple[int, int]
) -> Iterator[Float32[np.ndarray, "n d"]]:
    return (_map(folder, name, shape, i) for i in range(-(-shape[0] // _SHARD_ROWS)))


def _map(
    folder: Folder, name: str, shape: tuple[int, int], shard: int
) -> Float32[np.ndarray, "n d"]:
    """A shard of a column, mapped into memory. The index at the end of its file says where its
    chunks lie, which must be one after the other."""
    rows, width = shape
    path = folder.local(f"columns/{name}/c/{shard}/0")
    held = min(_SHARD_ROWS, rows - shard * _SHARD_ROWS)
    chunks, chunk = -(-held // _CHUNK_ROWS), _CHUNK_ROWS * width * 4
    entries = _SHARD_ROWS // _CHUNK_ROWS
    start = path.stat().st_size - 16 * entries - 4
    expected = np.stack([np.arange(chunks) * chunk, np.full(chunks, chunk)], axis=1).ravel()
    if start < chunks * chunk or not np.array_equal(
        np.fromfile(path, "<u8", 2 * chunks, "", start), expected
    ):
        raise DatasetError(path, "index", "is damaged; delete the store and convert again.")
    return np.asarray(np.memmap(path, "<f4", "r", shape=(held, width)))


def _numbers(dataset: Dataset, dims: Mapping[str, int]) -> Iterator[Block]:
    rows, frames = 0, int(dataset.lengths.sum())
    for block in dataset.stream(list(dims)):
        yield {n: v.reshape(len(v), dims[n]).astype(np.float32) for n, v in block.items()}
        rows += len(next(iter(block.values())))
    if rows != frames:
        raise DatasetError(
            dataset.root,
            "columns",
            f"have {rows} rows where the episodes have {frames} frames; correct the reader.",
        )


def _write_columns(
    blocks: Iterator[Block], dims: Mapping[str, int], rows: int, folder: Path
) -> None:
    arrays = {
        n: ts.open(_zarr(folder, n, (rows, d)), create=True).result() for n, d in dims.items()
    }
    start = 0
    for shard in _regrouped(blocks, _SHARD_ROWS):
        count = len(next(iter(shard.values())))
        for name, values in shard.items():
            arrays[name][start : start + count].write(values).result()
        start += count


def _regrouped(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """The same rows in blocks of `rows`, but for the last."""
    held: list[Block] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(next(iter(block.values())))
        while count >= rows:
            merged = {name: np.concatenate([b[name] for b in held]) for name in block}
            yield {name: values[:rows] for name, values in merged.items()}
            held, count = [{n: values[rows:] for n, values in merged.items()}], count - rows
    if count:
        yield {name: np.concatenate([b[name] for b in held]) for name in held[0]}


def _zarr(folder: Path, name: str, shape: tuple[int, int]) -> dict[str, Any]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [_CHUNK_ROWS, shape[1]],
        "codecs": [plain],
        "index_codecs": [plain, {"name": "crc32c"}],
    }
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "file",
            "path": f"{whole(path_within(folder, f'columns/{name}'))}/",
        },
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": shape,
            "data_type": "float32",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [_SHARD_ROWS, shape[1]]},
            },
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
    }


class _Duplicates:
    """Finds episodes with the same bytes in some columns, as their blocks pass by."""

    def __init__(self, lengths: Int64[np.ndarray, " e"], names: Sequence[str]) -> None:
        self.first = np.arange(len(lengths))
        self._ends = np.cumsum(lengths)
        self._names = names
        self._seen: dict[bytes, int] = {}
        self._episode = self._row = 0
        self._hashes = self._new()

    def see(self, block: Block) -> None:
        """Takes the next rows."""
        start = self._row
        end = start + len(block[self._names[0]])
        while self._row < end:
            stop = min(end, int(self._ends[self._episode]))
            for name, hash in self._hashes.items():
                hash.update(np.ascontiguousarray(block[name][self._row - start : stop - start]))
            self._row = stop
            while self._episode < len(self._ends) and stop == self._ends[self._episode]:
                content = b"".join(hash.digest() for hash in self._hashes.values())
                self.first[self._episode] = self._seen.setdefault(content, self._episode)
                self._episode, self._hashes = self._episode + 1, self._new()

    def _new(self) -> dict[str, Any]:
        return {name: hashlib.blake2b(digest_size=16) for name in self._names}
