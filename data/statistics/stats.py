"""Exact statistics of a dataset's columns.

They are computed from the parquet over every frame of the chosen episodes, a block at a time, so a
dataset of any size needs the same memory. By contrast, the stats.json of datasets recorded by
LeRobot up to 0.5 holds means of per-episode quantiles, which are no longer quantiles.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float64, Shaped

from data.dataset import Dataset, Report
from data.files.job import Done, adding_up, alone, run_job
from data.frames import Stats
from data.lake.ranges import episode_ranges, require_no_strays, streamed
from data.statistics.quantiles import Counted, OrderStatistics, interpolate, ranks
from models.files.terminal import logger

P = TypeVar("P")

Block = Shaped[np.ndarray, "_n *shape"]
Blocks = Callable[[Sequence[str], P], Iterable[Mapping[str, Block]]]
"""Gives the named columns of a part of all rows, in blocks of any number of rows; can be
pickled."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

STATISTICS = ("min", "max", "mean", "std", *QUANTILES)
"""Names of the statistics of a dimension."""

_ROWS = 1 << 16

_log = logger(__name__)


def compute(
    dataset: Dataset,
    episodes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    progress: Report | None = None,
) -> dict[str, Stats]:
    """Statistics of the named columns over all frames (of `episodes`, if given). Runs as a job
    (data/files/job.py) whose units are ranges of a million frames.

    Args:
      names: None for every numeric column that is finite; a warning names the others.

    Raises:
      ValueError: a column is missing, of another type than declared or not finite; or there are no
        frames.
    """
    frames = int(dataset.lengths.sum())
    if frames == 0 or (episodes is not None and len(episodes) == 0):
        raise ValueError(
            f"{dataset.root}: no frames to compute statistics from; record episodes first."
        )
    wanted = numeric_columns(dataset) if names is None else names
    found = _described([dataset], wanted, progress, episodes)
    if names is None:
        return _finite(found, [dataset])
    for column in found.values():
        if column.bad:
            raise ValueError(
                f"{dataset.root}: {column.complaint()}; repair or leave out those episodes "
                "(`python -m tools.data validate` names one)."
            )
    return {name: column.stats() for name, column in found.items()}


def compute_together(
    datasets: Sequence[Dataset], progress: Report | None = None
) -> dict[str, Stats]:
    """Statistics of all datasets' frames together, for the numeric columns that are finite and that
    all datasets have in the same shape."""
    shapes = [
        {name: tuple(dataset.features[name]["shape"]) for name in numeric_columns(dataset)}
        for dataset in datasets
    ]
    names = [n for n, shape in shapes[0].items() if all(s.get(n) == shape for s in shapes)]
    return _finite(_described(datasets, names, progress), datasets)


def numeric_columns(dataset: Dataset) -> list[str]:
    """Columns that have statistics."""
    kinds = {name: dataset.features[name]["dtype"] for name in dataset.column_names}
    return [n for n, kind in kinds.items() if kind != "string" and np.dtype(kind).kind in "biuf"]


def describe_blocks(blocks: Callable[[], Iterable[Block]], name: str = "values") -> Stats:
    """Statistics of blocks end to end, each of the result's shape [*shape], or [1] for scalars.

    Memory does not depend on the number of blocks. Median and other quantiles equal np.quantile's
    of the values as float64, to the last bit.

    Args:
      blocks: gives the blocks again for each of several passes (three for float32).
      name: the values' name in messages.

    Raises:
      ValueError: there are none, their shapes differ, or values are not finite.
    """

    def named(names: Sequence[str], part: None) -> Iterator[Mapping[str, Block]]:
        return ({name: block} for block in blocks())

    return _describe(named, [name], [None], lambda number: adding_up(None, 0), alone)[name].stats()


def describe_columns(
    blocks: Blocks[P],
    names: Sequence[str],
    parts: Sequence[P],
    passing: Callable[[int], Done],
) -> dict[str, Stats]:
    """`describe_blocks` of several columns at once, as a job.

    Args:
      blocks: called for the columns that still need a pass, part by part.
      passing: given a pass's number, returns the function to call with the rows done.

    Raises:
      ValueError: as `describe_blocks`; names the column.
    """
    found = _describe(blocks, names, parts, passing, run_job)
    return {name: column.stats() for name, column in found.items()}


def describe(values: Block) -> Stats:
    """Statistics along the first axis of an array that fits in memory several times."""
    x = values.reshape(len(values), -1).astype(np.float64)
    moments = x.min(axis=0), x.max(axis=0), x.mean(axis=0), x.std(axis=0)
    quantiles = np.quantile(x, list(QUANTILES.values()), axis=0)
    return named_stats([*moments, *quantiles], values.shape[1:], len(values))


def named_stats(
    values: Sequence[Float64[np.ndarray, " d"]], shape: tuple[int, ...], count: int
) -> Stats:
    """Statistics from the values of each, in the order of `STATISTICS`."""
    named = zip(STATISTICS, values, strict=True)
    return {k: v.reshape(shape or (1,)) for k, v in named} | {"count": np.array([count])}


class _Seen(NamedTuple):
    """Findings of the first pass in a piece of a column, and the piece if it may be the only."""

    shape: tuple[int, ...]
    rows: int
    low: Shaped[np.ndarray, " d"]
    high: Shaped[np.ndarray, " d"]
    bad: int
    mean: Float64[np.ndarray, " d"] | None
    block: Block | None


class _Added(NamedTuple):
    """Findings of a later pass in a part of a column: sums in each piece, and counts."""

    sums: list[tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, " d"]]]
    counted: Counted | None


class _Pending(NamedTuple):
    """Information about a column that a later pass needs."""

    dtype: np.dtype
    mean: Float64[np.ndarray, " d"] | None
    order: OrderStatistics | None


class _Column:
    """Statistics of one column: `look` at all its pieces once, then `add` parts until `found`."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.bad = name, 0, 0
        self.found = False

    def look(self, seen: _Seen) -> None:
        """Updates the count, extremes and mean."""
        self._only = None if self.count else seen.block
        if self.count == 0:
            self._shape, self._low, self._high = seen.shape, seen.low, seen.high
            self._mean = np.zeros(len(seen.low))
        _require_one_shape(self.name, self._shape, seen.shape)
        self._low, self._high = np.minimum(self._low, seen.low), np.maximum(self._high, seen.high)
        self.count += seen.rows
        self.bad += seen.bad
        if not self.bad and seen.mean is not None:
            self._mean += (seen.mean - self._mean) * (seen.rows / self.count)

    def begin(self) -> None:
        """Ends the first pass."""
        if self.count == 0:
            raise ValueError(
                f"{self.name}: no values to compute statistics from; record some first."
            )
        if self.bad or self._only is not None:
            self.found = True
            return
        self._deviation = np.zeros(len(self._mean))
        self._squares = np.zeros(len(self._mean))
        self._measured = False
        wanted = ranks(self.count, list(QUANTILES.values()))
        self._order = OrderStatistics(self._low, self._high, wanted)

    @property
    def pending(self) -> _Pending:
        return _Pending(
            self._low.dtype,
            None if self._measured else self._mean,
            None if self._order.found else self._order,
        )

    def add(self, added: _Added) -> None:
        for deviation, squares in added.sums:
            self._deviation += deviation
            self._squares += squares
        if added.counted is not None:
            self._order.take(added.counted)

    def end(self) -> None:
        """Ends a pass of `add`."""
        self._measured = True
        if not self._order.found:
            self._order.narrow()
        self.found = self._order.found

    def complaint(self) -> str:
        return f"{self.name} is not finite (NaN or infinite) in {self.bad} of {self.count} frames"

    def stats(self) -> Stats:
        if self.bad:
            raise ValueError(f"{self.complaint()}; repair or leave out those episodes.")
        if self._only is not None:
            return describe(self._only)
        shift = self._deviation / self.count
        variance = np.maximum(self._squares / self.count - shift**2, 0)
        quantiles = interpolate(self._order.values, self.count, list(QUANTILES.values()))
        extremes = self._low.astype(np.float64), self._high.astype(np.float64)
        values = [*extremes, self._mean + shift, np.sqrt(variance), *quantiles]
        return named_stats(values, self._shape, self.count)


@dataclass(frozen=True)
class _Looking:
    """The first pass over a part of all rows."""

    blocks: Blocks[Any]
    names: tuple[str, ...]
    is_only: bool

    def __call__(self, part: Any, done: Done) -> dict[str, list[_Seen]]:
        found: dict[str, list[_Seen]] = {name: [] for name in self.names}
        for name, block in _pieces(self.blocks(self.names, part), self.names, done):
            x = _dimensions(block)
            low, high = x.min(axis=1), x.max(axis=1)
            bad = 0
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                bad = int((~np.isfinite(x)).any(axis=0).sum())
            mean = None if bad else x.mean(axis=1, dtype=np.float64)
            keep = self.is_only and not found[name]
            if found[name]:
                found[name][-1] = found[name][-1]._replace(block=None)
            seen = _Seen(block.shape[1:], len(block), low, high, bad, mean, block if keep else None)
            found[name].append(seen)
        return found


@dataclass(frozen=True)
class _Adding:
    """A later pass over a part of all rows."""

    blocks: Blocks[Any]
    columns: Mapping[str, _Pending]

    def __call__(self, part: Any, done: Done) -> dict[str, _Added]:
        names = tuple(self.columns)
        orders = {n: None if c.order is None else c.order.fresh() for n, c in self.columns.items()}
        sums: dict[str, list[Any]] = {name: [] for name in names}
        for name, block in _pieces(self.blocks(names, part), names, done):
            column, order = self.columns[name], orders[name]
            x = _dimensions(block).astype(column.dtype)
            if column.mean is not None:
                deviation = x - column.mean[:, None]
                sums[name].append((deviation.sum(axis=1), (deviation**2).sum(axis=1)))
            if order is not None:
                order.add(x)
        counted = {n: None if order is None else order.counted for n, order in orders.items()}
        return {name: _Added(sums[name], counted[name]) for name in names}


def _describe(
    blocks: Blocks[Any],
    names: Sequence[str],
    parts: Sequence[Any],
    passing: Callable[[int], Done],
    run: Callable[..., Iterator[Any]],
) -> dict[str, _Column]:
    """Makes passes over the columns that still need one, until none does. Sums are added in the
    order of parts and pieces, wherever those were processed."""
    columns = {name: _Column(name) for name in names}
    number = 1
    if names:
        looking = _Looking(blocks, tuple(names), len(parts) == 1)
        for found in run(looking, parts, passing(number)):
            for name, pieces in found.items():
                for seen in pieces:
                    columns[name].look(seen)
    for column in columns.values():
        column.begin()
    while left := {name: column for name, column in columns.items() if not column.found}:
        number += 1
        adding = _Adding(blocks, {name: column.pending for name, column in left.items()})
        for added in run(adding, parts, passing(number)):
            for name, of_column in added.items():
                left[name].add(of_column)
        for column in left.values():
            column.end()
    return columns


@dataclass(frozen=True)
class _DatasetBlocks:
    """Columns of datasets; a part is a dataset's number and some of its episodes, None for all."""

    datasets: tuple[Dataset, ...]

    def __call__(
        self, names: Sequence[str], part: tuple[int, range | list[int]]
    ) -> Iterable[Mapping[str, Block]]:
        number, episodes = part
        return iter(streamed(self.datasets[number], names, episodes))


def _described(
    datasets: Sequence[Dataset],
    names: Sequence[str],
    progress: Report | None,
    episodes: Sequence[int] | None = None,
) -> dict[str, _Column]:
    ranges = [episode_ranges(dataset.lengths) for dataset in datasets]
    parts: list[tuple[int, range | list[int]]] = [
        (number, part) for number, of_dataset in enumerate(ranges) for part in of_dataset
    ]
    total = sum(int(dataset.lengths.sum()) for dataset in datasets)
    if episodes is not None:
        chosen = np.asarray(list(episodes))
        lengths = datasets[0].lengths[chosen]
        parts = [(0, chosen[list(part)].tolist()) for part in episode_ranges(lengths)]
        total = int(lengths.sum())

    def passing(number: int) -> Done:
        return adding_up(progress and partial(progress, f"Pass {number}"), total)

    found = _describe(_DatasetBlocks(tuple(datasets)), names, parts, passing, run_job)
    if episodes is None:
        for dataset, of_dataset in zip(datasets, ranges, strict=True):
            require_no_strays(dataset, of_dataset)
    return found


def _finite(columns: Mapping[str, _Column], datasets: Sequence[Dataset]) -> dict[str, Stats]:
    """Statistics of the columns that have them."""
    where = ", ".join(str(dataset.root) for dataset in datasets)
    for column in columns.values():
        if column.bad:
            _log.warning("%s: %s and is left out of the statistics.", where, column.complaint())
    return {name: column.stats() for name, column in columns.items() if not column.bad}


def _pieces(
    blocks: Iterable[Mapping[str, Block]], names: Sequence[str], done: Done
) -> Iterator[tuple[str, Block]]:
    """Every column's rows in pieces, not so small that counters cost more than values."""
    held: dict[str, list[Block]] = {name: [] for name in names}
    rows = dict.fromkeys(names, 0)

    def taken(name: str) -> tuple[str, Block]:
        piece = np.concatenate(held[name])
        held[name], rows[name] = [], 0
        return name, piece

    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        for name, values in block.items():
            _require_one_shape(name, shapes.setdefault(name, values.shape[1:]), values.shape[1:])
            for start in range(0, len(values), _ROWS):
                held[name].append(values[start : start + _ROWS])
                rows[name] += len(held[name][-1])
                if rows[name] >= _ROWS:
                    yield taken(name)
        done(len(block[names[0]]) if names[0] in block else 0)
    for name in names:
        if held[name]:
            yield taken(name)


def _require_one_shape(name: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    if shape != other:
        raise ValueError(
            f"{name}: some values are of shape {shape} and some of {other}; statistics need one "
            "shape."
        )


def _dimensions(block: Block) -> Shaped[np.ndarray, "d n"]:
    """One row per dimension, in which sums are pairwise."""
    x = block.reshape(len(block), -1).T
    return np.ascontiguousarray(x.astype(np.uint8) if x.dtype == bool else x)
