"""Windows of draws from a constant mixture. Each source has its exact share of every window, and a
window's costs are known in advance, so its rows are packed once. Every window fills these rows with
other samples, and all windows have equally many rows.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from threading import Lock
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from data.packing.order import Order, PlanSource, share_ranges, split
from data.packing.packing import assign_rows, pack_kinds
from data.packing.permutation import fold, grouped, shuffled
from models import Layout

_SOURCE, _PLACES, _ROWS, _WITHIN = 0, 1, 2, 3
_WINDOWS_KEPT = 4


class PlannedRows(NamedTuple):
    """Consecutive rows, as arrays over their draws; row r holds draws offsets[r]..offsets[r+1]."""

    source: Int64[np.ndarray, " n"]
    episode: Int64[np.ndarray, " n"]
    frame: Int64[np.ndarray, " n"]
    task: Int64[np.ndarray, " n"]
    wording: Int64[np.ndarray, " n"]
    id: Int64[np.ndarray, " n"]
    kind: Int64[np.ndarray, " n"]
    offsets: Int64[np.ndarray, " r_plus_1"]

    @property
    def number(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def cut(self, start: int, stop: int) -> "PlannedRows":
        """Rows start..stop."""
        low, high = self.offsets[start], self.offsets[stop]
        draws = [array[low:high] for array in self[:-1]]
        return PlannedRows._make([*draws, self.offsets[start : stop + 1] - low])

    def take(self, rows: Int64[np.ndarray, " k"]) -> "PlannedRows":
        """These rows, in this order."""
        sizes = np.diff(self.offsets)[rows]
        ends = np.cumsum(sizes)
        at = np.repeat(self.offsets[rows] - (ends - sizes), sizes) + np.arange(sizes.sum())
        return PlannedRows._make([*(array[at] for array in self[:-1]), np.append(0, ends)])


class Windows:
    """Rows of a mixture's windows, one window after the other.

    Args:
      sources: the mixture's sources, by their number among all sources.
      weights: the weight of each source.
      layout: the budgets of a row.
      draws: number of draws in a window.
      seed: decides the order.
      codes: codes of all kinds of sample, sorted: images · span + text.

    Attributes:
      weights: the weights as whole numbers.
      rows_per_window: rows that each window fills.
      row_of_place: the row of each place for a sample, in the order of places.
    """

    def __init__(
        self,
        sources: Mapping[int, PlanSource],
        weights: Sequence[Fraction],
        layout: Layout,
        draws: int,
        seed: int,
        codes: Int64[np.ndarray, " k"],
        span: int,
    ) -> None:
        self._numbers, self._sources = list(sources), list(sources.values())
        self._draws, self._seed, self._codes, self._span = draws, seed, codes, span
        scale = lcm(*(weight.denominator for weight in weights))
        self.weights = [int(weight * scale) for weight in weights]
        self._orders = [
            Order(source, part, fold(seed, _SOURCE, number))
            for (number, source), part in zip(
                sources.items(), share_ranges(draws, draws, self.weights), strict=True
            )
        ]
        self._pack_places(layout)
        self._kept: OrderedDict[int, PlannedRows] = OrderedDict()
        self._lock = Lock()

    @property
    def density(self) -> Fraction:
        """Samples in a row, on average."""
        return Fraction(self._draws, self.rows_per_window)

    def rows(self, low: int, high: int) -> list[PlannedRows]:
        """Rows low..high, split by window."""
        parts = []
        while low < high:
            number, begin = divmod(low, self.rows_per_window)
            end = min(begin + high - low, self.rows_per_window)
            parts.append(self._window(number).cut(begin, end))
            low += end - begin
        return parts

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_lock": None, "_kept": OrderedDict()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state | {"_lock": Lock()}

    def _pack_places(self, layout: Layout) -> None:
        """Packs places for a window's samples into rows, in the same way for every window. Places
        are sorted by images and then by text, longest first. Samples take them in the same order,
        so the n-th longest sample fits into the n-th place."""
        costs = np.concatenate([np.stack([o.images, -o.text]) for o in self._orders], axis=1)
        (images, text), need = np.unique(costs, axis=1, return_inverse=True)
        room = np.concatenate([order.room for order in self._orders])
        places = np.bincount(need.reshape(-1), room).astype(np.int64)
        packing = pack_kinds(images, -text, places, layout)
        self.rows_per_window = packing.rows
        self.row_of_place = assign_rows(packing, np.repeat(np.arange(len(places)), places))
        ends = np.cumsum([len(order.room) for order in self._orders])[:-1]
        self._need = np.split(need.reshape(-1), ends)
        of_class = np.searchsorted(images, images)
        self._class, self._first_place = of_class, (np.cumsum(places) - places)[of_class]

    def _window(self, number: int) -> PlannedRows:
        """The rows of a window, newly made or cached."""
        with self._lock:
            rows = self._kept.pop(number, None)
            self._kept[number] = rows = self._made(number) if rows is None else rows
            if len(self._kept) > _WINDOWS_KEPT:
                self._kept.popitem(last=False)
        return rows

    def _made(self, number: int) -> PlannedRows:
        before = split(number * self._draws, self.weights)
        after = split((number + 1) * self._draws, self.weights)
        drawn = [
            order.draws(low, high)
            for order, low, high in zip(self._orders, before, after, strict=True)
        ]
        source = np.repeat(self._numbers, [len(d.cell) for d in drawn])
        need = np.concatenate([n[d.cell] for n, d in zip(self._need, drawn, strict=True)])
        codes = [
            order.images[d.cell] * self._span + own.text[d.task, d.wording]
            for order, own, d in zip(self._orders, self._sources, drawn, strict=True)
        ]
        kind = np.searchsorted(self._codes, np.concatenate(codes))
        samples = [np.concatenate(column) for column in list(zip(*drawn, strict=True))[1:]]
        ids = number * self._draws + np.arange(self._draws)
        row = self._placed(need, number)
        order = grouped(row, fold(self._seed, _WITHIN, number))
        offsets = np.cumsum(np.bincount(row + 1, minlength=self.rows_per_window + 1))
        return PlannedRows._make([*(x[order] for x in (source, *samples, ids, kind)), offsets])

    def _placed(self, need: Int64[np.ndarray, " n"], number: int) -> Int64[np.ndarray, " n"]:
        """The row of each of a window's samples, by what their cells need."""
        longest_first = grouped(need, fold(self._seed, _PLACES, number))
        needs = need[longest_first]
        rank = np.arange(len(need)) - np.searchsorted(self._class[needs], self._class[needs])
        mixed = shuffled(self.rows_per_window, fold(self._seed, _ROWS, number))
        row = np.empty_like(need)
        row[longest_first] = mixed[self.row_of_place[self._first_place[needs] + rank]]
        return row


def joined(parts: Sequence[PlannedRows]) -> PlannedRows:
    """Rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    arrays = [np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:-1]]
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return PlannedRows._make([*arrays, np.concatenate([[0], np.cumsum(sizes)])])
