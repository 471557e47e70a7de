"""Exact statistics of a dataset's columns.

Computed from the parquet over every frame of the chosen episodes, a block at a time, so a dataset
of any size needs the same memory: the stats.json of datasets recorded by LeRobot up to 0.5 holds
means of per-episode quantiles, which no longer are quantiles.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from data.dataset import Dataset, Report
from data.frames import Stats
from data.statistics.quantiles import OrderStatistics, interpolate, ranks
from models.terminal import logger

Block = Shaped[np.ndarray, "_n *shape"]
Blocks = Callable[[Sequence[str]], Iterable[Mapping[str, Block]]]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

_ROWS = 1 << 16

_log = logger(__name__)


def compute(
    dataset: Dataset,
    episodes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    progress: Report | None = None,
) -> dict[str, Stats]:
    """Statistics of the named columns over all frames (of `episodes`, if given).

    Args:
      names: None for every numeric column that is finite; a warning names the others.

    Raises:
      ValueError: a column is missing, of another type than declared or not finite; no frames.
    """
    frames = int(dataset.lengths.sum())
    if frames == 0 or (episodes is not None and len(episodes) == 0):
        raise ValueError(f"{dataset.root}: no frames to take statistics of; record episodes first.")
    total = frames if episodes is None else int(dataset.lengths[list(episodes)].sum())
    blocks = _told(lambda wanted: dataset.stream(wanted, episodes), total, progress)
    if names is not None:
        return describe_columns(blocks, names)
    return _finite(_describe(blocks, numeric_columns(dataset)), str(dataset.root))


def compute_together(
    datasets: Sequence[Dataset], progress: Report | None = None
) -> dict[str, Stats]:
    """Statistics of all datasets' frames as one, of the numeric columns that are finite and that
    all of them have in one shape."""
    shapes = [
        {name: tuple(dataset.features[name]["shape"]) for name in numeric_columns(dataset)}
        for dataset in datasets
    ]
    names = [n for n, shape in shapes[0].items() if all(s.get(n) == shape for s in shapes)]
    total = sum(int(dataset.lengths.sum()) for dataset in datasets)
    blocks = _told(
        lambda wanted: (block for d in datasets for block in d.stream(wanted)),
        total,
        progress,
    )
    return _finite(_describe(blocks, names), ", ".join(str(d.root) for d in datasets))


def numeric_columns(dataset: Dataset) -> list[str]:
    """Columns that have statistics."""
    kinds = {name: dataset.features[name]["dtype"] for name in dataset.column_names}
    return [n for n, kind in kinds.items() if kind != "string" and np.dtype(kind).kind in "biuf"]


def describe_blocks(blocks: Callable[[], Iterable[Block]], name: str = "values") -> Stats:
    """Statistics of blocks end to end, each of the result's shape [*shape], or [1] for scalars.

    Memory does not depend on how many there are. Median and other quantiles are np.quantile's of
    the values as float64, to the last bit.

    Args:
      blocks: gives the blocks again for each of several passes (three for float32).
      name: what they are, for messages.

    Raises:
      ValueError: there are none, their shapes differ, or values are not finite.
    """
    return describe_columns(lambda _: ({name: block} for block in blocks()), [name])[name]


def describe_columns(blocks: Blocks, names: Sequence[str]) -> dict[str, Stats]:
    """`describe_blocks` of several columns at once: `blocks` is asked for those that still need a
    pass and may give any number of rows of each.

    Raises:
      ValueError: as `describe_blocks`; names the column.
    """
    return {name: column.stats() for name, column in _describe(blocks, names).items()}


def describe(values: Block) -> Stats:
    """Statistics along the first axis of an array that fits in memory several times."""
    x = values.reshape(len(values), -1).astype(np.float64)
    quantiles = np.quantile(x, list(QUANTILES.values()), axis=0)
    shape = values.shape[1:] or (1,)
    stats = {
        "min": x.min(axis=0),
        "max": x.max(axis=0),
        "mean": x.mean(axis=0),
        "std": x.std(axis=0),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }
    return {k: v.reshape(shape) for k, v in stats.items()} | {"count": np.array([len(values)])}


class _Column:
    """Running statistics of one column: `look` at all of it once, then `add` until `found`."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.bad = name, 0, 0
        self.found = False

    def look(self, block: Block) -> None:
        """Counts, extremes and the mean."""
        x = _dimensions(block)
        low, high = x.min(axis=1), x.max(axis=1)
        self._only = None if self.count else block
        if self.count == 0:
            self._shape, self._low, self._high = block.shape[1:], low, high
            self._mean = np.zeros(len(x))
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        self.count += len(block)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            self.bad += int((~np.isfinite(x)).any(axis=0).sum())
        if not self.bad:
            self._mean += (x.mean(axis=1, dtype=np.float64) - self._mean) * (
                len(block) / self.count
            )

    def begin(self) -> None:
        """Ends the first pass."""
        if self.count == 0:
            raise ValueError(f"{self.name}: no values to take statistics of; record some first.")
        if self.bad or self._only is not None:
            self.found = True
            return
        self._deviation = np.zeros(len(self._mean))
        self._squares = np.zeros(len(self._mean))
        self._measured = False
        wanted = ranks(self.count, list(QUANTILES.values()))
        self._order = OrderStatistics(self._low, self._high, wanted)

    def add(self, block: Block) -> None:
        x = _dimensions(block).astype(self._low.dtype)
        if not self._measured:
            deviation = x - self._mean[:, None]
            self._deviation += deviation.sum(axis=1)
            self._squares += (deviation**2).sum(axis=1)
        if not self._order.found:
            self._order.add(x)

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
        stats = {
            "min": self._low.astype(np.float64),
            "max": self._high.astype(np.float64),
            "mean": self._mean + shift,
            "std": np.sqrt(variance),
            **dict(zip(QUANTILES, quantiles, strict=True)),
        }
        shape = self._shape or (1,)
        return {k: v.reshape(shape) for k, v in stats.items()} | {"count": np.array([self.count])}


def _describe(blocks: Blocks, names: Sequence[str]) -> dict[str, _Column]:
    """Passes over the blocks of the columns that still need one, until none does."""
    columns = {name: _Column(name) for name in names}
    if names:
        _feed(blocks(names), {name: column.look for name, column in columns.items()})
    for column in columns.values():
        column.begin()
    while left := {name: column for name, column in columns.items() if not column.found}:
        _feed(blocks(list(left)), {name: column.add for name, column in left.items()})
        for column in left.values():
            column.end()
    return columns


def _finite(columns: Mapping[str, _Column], where: str) -> dict[str, Stats]:
    """Statistics of the columns that have them."""
    for column in columns.values():
        if column.bad:
            _log.warning("%s: %s and left out of the statistics.", where, column.complaint())
    return {name: column.stats() for name, column in columns.items() if not column.bad}


def _told(blocks: Blocks, total: int, progress: Report | None) -> Blocks:
    """The same blocks; `progress` is called with the frames in each pass over them."""
    passes = 0

    def telling(names: Sequence[str]) -> Iterator[Mapping[str, Block]]:
        nonlocal passes
        passes, done = passes + 1, 0
        for block in blocks(names):
            yield block
            done += len(block[names[0]])
            if progress is not None:
                progress(f"Pass {passes}", done, total)

    return telling


def _feed(
    blocks: Iterable[Mapping[str, Block]], takers: Mapping[str, Callable[[Block], None]]
) -> None:
    """Gives every column's taker the same rows in blocks that are neither so small that counters
    cost more than values, nor large."""
    held: dict[str, list[Block]] = {name: [] for name in takers}
    rows = dict.fromkeys(takers, 0)

    def give(name: str) -> None:
        takers[name](np.concatenate(held[name]))
        held[name], rows[name] = [], 0

    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        for name, values in block.items():
            if shapes.setdefault(name, values.shape[1:]) != values.shape[1:]:
                raise ValueError(
                    f"{name}: some values are of shape {shapes[name]} and some of "
                    f"{values.shape[1:]}; statistics need one shape."
                )
            for start in range(0, len(values), _ROWS):
                held[name].append(values[start : start + _ROWS])
                rows[name] += len(held[name][-1])
                if rows[name] >= _ROWS:
                    give(name)
    for name in takers:
        if held[name]:
            give(name)


def _dimensions(block: Block) -> Shaped[np.ndarray, "d n"]:
    """One row per dimension, in which sums are pairwise."""
    x = block.reshape(len(block), -1).T
    return np.ascontiguousarray(x.astype(np.uint8) if x.dtype == bool else x)
