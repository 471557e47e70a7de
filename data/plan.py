"""The packing plan: which samples make up every row of every step, computed from lengths alone.

A pure function of (datasets' metadata, weights, seed, step): no frame is decoded, no state is kept,
so any host or worker computes the rows it needs and a run resumes at any step. Draws come in
windows; each source gives its exact share of every window, in an order that meets each of its
samples once per epoch, and the window is packed into rows that wait in one endless line.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from threading import Lock
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from data.frames import Runs
from data.packing import assign_rows, pack_kinds
from data.permutation import fold, permute, scramble, shuffled
from models import Layout

_ORDER, _DRAWS, _ROWS, _WORDINGS = 0, 1, 2, 3
_WINDOWS_KEPT = 8


@dataclass(frozen=True)
class Source:
    """One dataset of a mixture: its runs that may be drawn, and what a sample of each costs.

    `weight` is its share of the draws, relative to the other sources. Every frame of `runs` is a
    sample; `images` are the image slots it takes, `text` the text tokens of each wording of each
    task, 0 where a task has fewer wordings.
    """

    name: str
    weight: float
    runs: Runs
    images: Int64[np.ndarray, "r"]
    text: Int64[np.ndarray, "t w"]


class Draw(NamedTuple):
    """A sample that the plan chose: frame `frame` of an episode, told in that wording of its task;
    the `id`-th draw."""

    source: int
    episode: int
    frame: int
    task: int
    wording: int
    id: int


class Rows(NamedTuple):
    """Consecutive rows, as arrays over their draws; row r holds draws offsets[r]..offsets[r+1]."""

    source: Int64[np.ndarray, "n"]
    episode: Int64[np.ndarray, "n"]
    frame: Int64[np.ndarray, "n"]
    task: Int64[np.ndarray, "n"]
    wording: Int64[np.ndarray, "n"]
    id: Int64[np.ndarray, "n"]
    kind: Int64[np.ndarray, "n"]
    offsets: Int64[np.ndarray, "r+1"]

    @property
    def number(self) -> int:
        """How many rows."""
        return len(self.offsets) - 1

    def cut(self, start: int, stop: int) -> "Rows":
        """Rows start..stop."""
        low, high = self.offsets[start], self.offsets[stop]
        draws = [array[low:high] for array in self[:-1]]
        return Rows._make([*draws, self.offsets[start : stop + 1] - low])


class Fill(NamedTuple):
    """Which part of the places of some rows is used; `samples` is their mean number in a row."""

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
      window: draws packed at a time; more fill rows better, fewer keep epochs apart.
      anchor: what `position` returned, so that a resumed run starts without planning what is past.
        Rows are the same with and without it.

    Raises:
      ValueError: a source has no samples or no positive weight, or a sample does not fit into an
        empty row.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        layout: Layout,
        rows: int,
        *,
        seed: int = 0,
        window: int = 8192,
        anchor: Sequence[int] = (0, 0),
    ) -> None:
        self.sources, self.layout, self.rows_per_step = tuple(sources), layout, rows
        self.seed, self.window = seed, window
        for source in self.sources:
            _check(source, layout)
        self._kinds = np.unique(np.concatenate([_costs(s) for s in self.sources], axis=1), axis=1)
        self._ends = [np.cumsum(source.runs.length) for source in self.sources]
        fractions = [Fraction(source.weight) for source in self.sources]
        scale = lcm(*(f.denominator for f in fractions))
        self._weights = [int(f * scale) for f in fractions]
        self._first_window = int(anchor[0])
        self._first_rows = [int(anchor[1])]
        self._kept: OrderedDict[int, Rows] = OrderedDict()
        self._lock = Lock()

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
        return digest.hexdigest()[:16]

    def rows(self, step: int) -> list[list[Draw]]:
        """The samples of each row of the global batch at `step`."""
        rows = self.draws(step)
        draws = [Draw(*map(int, draw)) for draw in zip(*rows[:6], strict=True)]
        return [draws[low:high] for low, high in zip(rows.offsets, rows.offsets[1:], strict=False)]

    def draws(self, step: int, start: int = 0, stop: int | None = None) -> Rows:
        """Rows start..stop of the global batch at `step` as arrays.

        Raises:
          ValueError: the step lies before the plan's anchor.
        """
        first = step * self.rows_per_step
        low = first + start
        high = first + (self.rows_per_step if stop is None else stop)
        parts = []
        number = self._window_of(low)
        while low < high:
            with self._lock:
                rows, offset = self._packed(number), self._first_row(number)
            end = min(high, offset + rows.number)
            parts.append(rows.cut(low - offset, end - offset))
            low, number = end, number + 1
        return _joined(parts)

    def position(self, step: int) -> tuple[int, int]:
        """The anchor for a plan that begins at `step`: a window and its first row; for JSON."""
        number = self._window_of(step * self.rows_per_step)
        return number, self._first_row(number)

    def fill(self, steps: Iterable[int]) -> Fill:
        """How full the rows of these steps are."""
        used, rows, samples = np.zeros(2), 0, 0
        for step in steps:
            drawn = self.draws(step)
            used += self._kinds[:, drawn.kind].sum(axis=1)
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

    def _window_of(self, row: int) -> int:
        if row < self._first_rows[0]:
            raise ValueError(
                f"Row {row} lies before the plan's anchor (row {self._first_rows[0]}); "
                "make the plan with the anchor of an earlier step, or without."
            )
        with self._lock:
            while self._first_rows[-1] <= row:
                self._packed(self._first_window + len(self._first_rows) - 1)
        return self._first_window + int(np.searchsorted(self._first_rows, row, "right")) - 1

    def _first_row(self, number: int) -> int:
        return self._first_rows[number - self._first_window]

    def _packed(self, number: int) -> Rows:
        """Window `number`, made or kept; windows are first made one after the other."""
        rows = self._kept.pop(number, None)
        if rows is None:
            rows = self._pack(number)
            if number == self._first_window + len(self._first_rows) - 1:
                self._first_rows.append(self._first_rows[-1] + rows.number)
        self._kept[number] = rows
        if len(self._kept) > _WINDOWS_KEPT:
            self._kept.popitem(last=False)
        return rows

    def _pack(self, number: int) -> Rows:
        source, run, place = self._drawn(number)
        ids = number * self.window + np.arange(self.window)
        chance = scramble(ids.astype(np.uint64), fold(self.seed, _WORDINGS))
        episode, frame, task, wording, images, text = np.empty((6, self.window), np.int64)
        for s, data in enumerate(self.sources):
            own = source == s
            at, runs, tasks = run[own], data.runs, data.runs.task[run[own]]
            wordings = np.count_nonzero(data.text, axis=1)[tasks]
            chosen = (chance[own] % wordings.astype(np.uint64)).astype(np.int64)
            episode[own], task[own], wording[own] = runs.episode[at], tasks, chosen
            frame[own] = runs.first[at] + place[own] - (self._ends[s] - runs.length)[at]
            images[own], text[own] = data.images[at], data.text[tasks, chosen]
        kind = self._kind(images, text)
        counts = np.bincount(kind, minlength=self._kinds.shape[1])
        packing = pack_kinds(self._kinds[0], self._kinds[1], counts, self.layout)
        mixed = shuffled(self.window, fold(self.seed, _DRAWS, number))
        row = np.empty(self.window, np.int64)
        row[mixed] = assign_rows(packing, kind[mixed])
        row = shuffled(packing.rows, fold(self.seed, _ROWS, number))[row]
        order = np.argsort(row, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=packing.rows))])
        draws = (source, episode, frame, task, wording, ids, kind)
        return Rows._make([*(array[order] for array in draws), offsets])

    def _drawn(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A window's draws, source after source: source, its run, place in all its runs."""
        before = self._shares(number * self.window)
        after = self._shares((number + 1) * self.window)
        sources, runs, drawn = [], [], []
        for s, (low, high) in enumerate(zip(before, after, strict=True)):
            total = int(self._ends[s][-1])
            places = []
            for epoch in range(low // total, -(-high // total)):
                ranks = np.arange(max(low, epoch * total), min(high, (epoch + 1) * total))
                key = fold(self.seed, _ORDER, s, epoch)
                places.append(permute(ranks - epoch * total, total, key))
            place = np.concatenate(places) if places else np.zeros(0, np.int64)
            sources.append(np.full(len(place), s))
            runs.append(np.searchsorted(self._ends[s], place, "right"))
            drawn.append(place)
        return np.concatenate(sources), np.concatenate(runs), np.concatenate(drawn)

    def _kind(
        self, images: Int64[np.ndarray, "n"], text: Int64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n"]:
        """Which of the kinds, which are sorted, has that cost."""
        span = int(self._kinds[1].max()) + 1
        return np.searchsorted(self._kinds[0] * span + self._kinds[1], images * span + text)

    def _shares(self, draws: int) -> list[int]:
        """How many of the first so many draws are each source's. Split off one source at a time,
        so that the shares sum to `draws` and none ever shrinks."""
        shares, weight = [], sum(self._weights)
        for own in self._weights:
            shares.append(draws * own // weight if weight else 0)
            draws, weight = draws - shares[-1], weight - own
        return shares


def typical_costs(
    sources: Sequence[Source], number: int = 8192
) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Images and text tokens of about `number` draws from a mixture, in no order, each kind of
    sample as often as it is drawn (rounded up)."""
    costs, shares = [], []
    weight = sum(source.weight for source in sources)
    for source in sources:
        share = source.runs.length / source.runs.length.sum() * source.weight / weight
        shown = source.text[source.runs.task] > 0
        costs.append(_costs(source))
        shares.append(np.broadcast_to((share / shown.sum(axis=1))[:, None], shown.shape)[shown])
    kinds, kind = np.unique(np.concatenate(costs, axis=1), axis=1, return_inverse=True)
    counts = np.ceil(np.bincount(kind.reshape(-1), np.concatenate(shares)) * number).astype(int)
    images, text = np.repeat(kinds, counts, axis=1)
    return images, text


def _costs(source: Source) -> Int64[np.ndarray, "2 n"]:
    """Images and text tokens of every run's samples, in each wording of its task."""
    text = source.text[source.runs.task]
    images = np.broadcast_to(source.images[:, None], text.shape)
    return np.stack([images[text > 0], text[text > 0]])


def _check(source: Source, layout: Layout) -> None:
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


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    arrays = [np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:-1]]
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Rows._make([*arrays, np.concatenate([[0], np.cumsum(sizes)])])
