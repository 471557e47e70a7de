"""The packing plan: which samples make up every row of every step, computed from lengths alone.

A pure function of (datasets' metadata, weights, seed, step): no frame is decoded, no state is kept,
so any host or worker computes the rows it needs and a run resumes at any step at once. Draws come
in windows of the same number, in which each source has its exact share. What a window costs is
known beforehand, so its rows are packed once; every window fills them with other samples, and all
windows have equally many rows. A step's rows stand in an order in which the ranks that share them
have equally much to do.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import lcm
from threading import Lock
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from data.packing.balance import balanced_order, excess
from data.packing.order import Order, PlanSource, share_ranges, split
from data.packing.packing import assign_rows, pack_kinds
from data.packing.permutation import fold, grouped, shuffled
from models import Layout
from models.files import html

_SOURCE, _PLACES, _ROWS, _WITHIN = 0, 1, 2, 3
_WINDOWS = 4096, 32768
_WINDOWS_KEPT = 4


class Draw(NamedTuple):
    """A sample that the plan chose: frame `frame` of an episode, in that wording of its task; the
    `id`-th draw."""

    source: int
    episode: int
    frame: int
    task: int
    wording: int
    id: int


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


class Fill(NamedTuple):
    """Used part of the places of some rows; `samples` is their mean number in a row."""

    prefix: float
    images: float
    text: float
    samples: float


class Plan:
    """Rows of samples for every step of a run.

    Args:
      sources: the mixture.
      layout: the budgets of a row.
      rows: rows of the global batch.
      seed: of the order.
      window: draws packed together; more fill rows better, fewer keep epochs apart. If None, as
        many as there are samples, but 4,096 to 32,768.
      ranks: parts, of equally many rows, that share a batch and whose attention is to cost alike;
        they decide the order of a step's rows, not which these are.

    Attributes:
      kinds: images and text tokens of every kind of sample.
      rows_per_window: rows that each window of draws fills.

    Raises:
      ValueError: a source has no samples or no positive weight, a task has no wording, a sample
        does not fit into an empty row, or the rows do not divide among the ranks.
    """

    def __init__(
        self,
        sources: Sequence[PlanSource],
        layout: Layout,
        rows: int,
        *,
        seed: int = 0,
        window: int | None = None,
        ranks: int = 1,
    ) -> None:
        self.sources, self.layout, self.rows_per_step = tuple(sources), layout, rows
        if ranks < 1 or rows % ranks:
            raise ValueError(
                f"{rows} rows a step do not divide among {ranks} ranks; choose a multiple of them."
            )
        self.ranks = ranks
        for source in self.sources:
            _check(source, layout)
        samples = sum(int(source.runs.length.sum()) for source in self.sources)
        self.window = window or min(max(samples, _WINDOWS[0]), _WINDOWS[1])
        self.seed = seed
        self._span = 1 + max(int(source.text.max()) for source in self.sources)
        self._codes = np.unique(np.concatenate([_codes(s, self._span)[0] for s in self.sources]))
        self.kinds = np.stack(np.divmod(self._codes, self._span))
        self._attention = layout.prefix_length(*self.kinds) ** 2
        fractions = [Fraction(source.weight) for source in self.sources]
        scale = lcm(*(f.denominator for f in fractions))
        self._weights = [int(f * scale) for f in fractions]
        self._orders = [
            Order(source, draws, fold(seed, _SOURCE, number))
            for number, (source, draws) in enumerate(
                zip(
                    self.sources, share_ranges(self.window, self.window, self._weights), strict=True
                )
            )
        ]
        self._pack_places()
        self._kept: OrderedDict[int, PlannedRows] = OrderedDict()
        self._lock = Lock()

    def _repr_html_(self) -> str:
        lay, first = self.layout, self.fill(range(1))
        facts = {
            "rows of a batch": f"{self.rows_per_step} of {lay.prefix} prefix places",
            "filled": f"{first.prefix:.1%} in the first batch, {first.samples:.1f} samples a row",
            "a row's most": f"{lay.samples} samples, {lay.images} images, {lay.text} text tokens",
            "seed": self.seed,
        }
        heads = ("source", "weight", "samples", "wordings")
        rows = [
            (s.name, f"{float(s.weight):g}", f"{s.runs.length.sum():,}", (s.text > 0).sum())
            for s in self.sources
        ]
        return html.card("Packing plan", facts, html.table(heads, rows))

    @property
    def digest(self) -> str:
        """Names everything the rows depend on but the step; a resumed run must find it
        unchanged."""
        text = repr((self.layout, self.rows_per_step, self.seed, self.window, self._weights))
        digest = hashlib.sha256(text.encode())
        for source in self.sources:
            for array in (*source.runs, source.images, source.text):
                digest.update(repr(array.shape).encode())
                digest.update(np.ascontiguousarray(array, np.int64).tobytes())
            if source.weighted:
                digest.update(source.masses.tobytes())
        digest.update(self._row_of_place.tobytes())
        return digest.hexdigest()[:16]

    def rows(self, step: int) -> list[list[Draw]]:
        """The samples of each row of the global batch at `step`."""
        rows = self.draws(step)
        draws = [Draw(*map(int, draw)) for draw in zip(*rows[:6], strict=True)]
        return [draws[low:high] for low, high in zip(rows.offsets, rows.offsets[1:], strict=False)]

    def draws(self, step: int, start: int = 0, stop: int | None = None) -> PlannedRows:
        """Rows start..stop of the global batch at `step` as arrays; those of later steps follow."""
        stop = self.rows_per_step if stop is None else stop
        parts = []
        while start < stop:
            later, begin = divmod(start, self.rows_per_step)
            end = min(begin + stop - start, self.rows_per_step)
            rows = self._as_packed(step + later)
            if self.ranks > 1:
                rows = rows.take(balanced_order(self._costs(rows), self.ranks))
            parts.append(rows.cut(begin, end))
            start += end - begin
        return _joined(parts)

    def excess(self, step: int) -> float:
        """The share by which attention costs the slowest of the ranks more than their mean."""
        return excess(self.costs(step), self.ranks)

    def costs(self, step: int) -> Int64[np.ndarray, " r"]:
        """Cost of attention in each row: the sum of its samples' squared lengths."""
        return self._costs(self.draws(step))

    def fill(self, steps: Iterable[int]) -> Fill:
        """Fill of the rows of these steps."""
        used, rows, samples = np.zeros(2), 0, 0
        for step in steps:
            drawn = self.draws(step)
            used += self.kinds[:, drawn.kind].sum(axis=1)
            samples, rows = samples + len(drawn.kind), rows + drawn.number
        (images, text), lay = used, self.layout
        prefix = images * lay.tokens_per_image + text + samples * lay.state_tokens
        return Fill(
            prefix=prefix / (rows * lay.prefix),
            images=images / (rows * lay.images),
            text=text / (rows * lay.text),
            samples=samples / rows,
        )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_lock": None, "_kept": OrderedDict()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state | {"_lock": Lock()}

    def _pack_places(self) -> None:
        """Packs places for a window's samples into rows, the same for every window. Places are
        sorted by images and, the longest first, by text, and so are samples when they take them:
        the n-th longest sample fits into the n-th place."""
        costs = np.concatenate([np.stack([o.images, -o.text]) for o in self._orders], axis=1)
        (images, text), need = np.unique(costs, axis=1, return_inverse=True)
        room = np.concatenate([order.room for order in self._orders])
        places = np.bincount(need.reshape(-1), room).astype(np.int64)
        packing = pack_kinds(images, -text, places, self.layout)
        self.rows_per_window = packing.rows
        self._row_of_place = assign_rows(packing, np.repeat(np.arange(len(places)), places))
        ends = np.cumsum([len(order.room) for order in self._orders])[:-1]
        self._need = np.split(need.reshape(-1), ends)
        of_class = np.searchsorted(images, images)
        self._class, self._first_place = of_class, (np.cumsum(places) - places)[of_class]

    def _as_packed(self, step: int) -> PlannedRows:
        """The rows of a step as they follow each other in their windows."""
        low, high, parts = step * self.rows_per_step, (step + 1) * self.rows_per_step, []
        while low < high:
            number, begin = divmod(low, self.rows_per_window)
            end = min(begin + high - low, self.rows_per_window)
            parts.append(self._rows_of(number).cut(begin, end))
            low += end - begin
        return _joined(parts)

    def _costs(self, rows: PlannedRows) -> Int64[np.ndarray, " r"]:
        sums = np.append(0, np.cumsum(self._attention[rows.kind]))
        return np.diff(sums[rows.offsets])

    def _rows_of(self, number: int) -> PlannedRows:
        """The rows of a window, made or kept."""
        with self._lock:
            rows = self._kept.pop(number, None)
            self._kept[number] = rows = self._made(number) if rows is None else rows
            if len(self._kept) > _WINDOWS_KEPT:
                self._kept.popitem(last=False)
        return rows

    def _made(self, number: int) -> PlannedRows:
        before = split(number * self.window, self._weights)
        after = split((number + 1) * self.window, self._weights)
        drawn = [
            order.draws(low, high)
            for order, low, high in zip(self._orders, before, after, strict=True)
        ]
        source = np.repeat(np.arange(len(drawn)), [len(d.cell) for d in drawn])
        need = np.concatenate([n[d.cell] for n, d in zip(self._need, drawn, strict=True)])
        codes = [
            order.images[d.cell] * self._span + own.text[d.task, d.wording]
            for order, own, d in zip(self._orders, self.sources, drawn, strict=True)
        ]
        kind = np.searchsorted(self._codes, np.concatenate(codes))
        samples = [np.concatenate(column) for column in list(zip(*drawn, strict=True))[1:]]
        ids = number * self.window + np.arange(self.window)
        row = self._placed(need, number)
        order = grouped(row, fold(self.seed, _WITHIN, number))
        offsets = np.cumsum(np.bincount(row + 1, minlength=self.rows_per_window + 1))
        return PlannedRows._make([*(x[order] for x in (source, *samples, ids, kind)), offsets])

    def _placed(self, need: Int64[np.ndarray, " n"], number: int) -> Int64[np.ndarray, " n"]:
        """The row of each of a window's samples, by what their cells need."""
        longest_first = grouped(need, fold(self.seed, _PLACES, number))
        needs = need[longest_first]
        rank = np.arange(len(need)) - np.searchsorted(self._class[needs], self._class[needs])
        mixed = shuffled(self.rows_per_window, fold(self.seed, _ROWS, number))
        row = np.empty_like(need)
        row[longest_first] = mixed[self._row_of_place[self._first_place[needs] + rank]]
        return row


def typical_costs(
    sources: Sequence[PlanSource], number: int = 2048
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Images and text tokens of about `number` draws from a mixture, in no order, each kind of
    sample as often as it is drawn (rounded up)."""
    span = 1 + max(int(source.text.max()) for source in sources)
    costs = [_codes(source, span) for source in sources]
    shares = [
        source.weight * frames / frames.sum()
        for source, (_, frames) in zip(sources, costs, strict=True)
    ]
    kinds, kind = np.unique(np.concatenate([code for code, _ in costs]), return_inverse=True)
    share = np.bincount(kind, np.concatenate(shares))
    counts = np.ceil(share / share.sum() * number).astype(int)
    images, text = np.divmod(np.repeat(kinds, counts), span)
    return images, text


def _codes(
    source: PlanSource, span: int
) -> tuple[Int64[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """images · span + text of every run's samples in each wording of its task, and how many
    they are, each as many as its weight."""
    text = source.text[source.runs.task]
    shown = text > 0
    code = source.images[:, None] * span + text
    frames = source.runs.length * (source.weights if source.weighted else 1) / shown.sum(axis=1)
    return code[shown], np.broadcast_to(frames[:, None], shown.shape)[shown]


def _check(source: PlanSource, layout: Layout) -> None:
    if not source.weight > 0 or not np.isfinite(source.weight):
        raise ValueError(
            f"Source '{source.name}' has weight {source.weight}; give a positive number, "
            "or leave the source out."
        )
    runs = source.runs
    if len(runs.length) == 0 or runs.length.min() < 1:
        raise ValueError(
            f"Source '{source.name}' has no samples (an episode without frames, or no episode); "
            "leave it out or choose other episodes."
        )
    weights = source.weights
    if weights is not None and not (np.isfinite(weights) & (weights > 0)).all():
        worst = int(np.argmin(np.isfinite(weights) & (weights > 0)))
        raise ValueError(
            f"Source '{source.name}', episode {runs.episode[worst]}: a sample has weight "
            f"{weights[worst]}; give positive numbers, and leave out runs that are never drawn."
        )
    text = source.text[runs.task].max(axis=1, initial=0)
    if text.min() < 1:
        raise ValueError(
            f"Source '{source.name}', episode {runs.episode[int(np.argmin(text))]}: its task "
            f"{runs.task[int(np.argmin(text))]} has no wording; give every task at least one."
        )
    for what, needed, available in (
        ("images", source.images, layout.images),
        ("text", text, layout.text),
        ("prefix", layout.prefix_length(source.images, text), layout.prefix),
    ):
        if needed.max() > available:
            worst = int(np.argmax(needed))
            raise ValueError(
                f"Source '{source.name}', episode {runs.episode[worst]}: a sample needs "
                f"{needed[worst]} {what} places, but a row has {available}; "
                f"raise layout.{what} or shorten the prompt."
            )


def _joined(parts: Sequence[PlannedRows]) -> PlannedRows:
    if len(parts) == 1:
        return parts[0]
    arrays = [np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:-1]]
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return PlannedRows._make([*arrays, np.concatenate([[0], np.cumsum(sizes)])])
