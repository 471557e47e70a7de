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

from data.packing import assign_rows, pack_kinds
from data.permutation import fold, permute, shuffled
from models import Layout

_ORDER, _DRAWS, _ROWS = 0, 1, 2
_WINDOWS_KEPT = 8


@dataclass(frozen=True)
class Source:
    """One dataset of a mixture: its episodes that may be drawn, and what a sample of each costs.

    `weight` is its share of the draws, relative to the other sources. `episodes` are numbers as its
    frame store counts them, `lengths` their samples (frames), `images` and `text` the image slots
    and text tokens that one sample takes.
    """

    name: str
    weight: float
    episodes: Int64[np.ndarray, "e"]
    lengths: Int64[np.ndarray, "e"]
    images: Int64[np.ndarray, "e"]
    text: Int64[np.ndarray, "e"]


class Draw(NamedTuple):
    """A sample that the plan chose: frame `frame` of an episode, the `id`-th draw of the run."""

    source: int
    episode: int
    frame: int
    id: int


class Rows(NamedTuple):
    """Consecutive rows, as arrays over their draws; row r holds draws offsets[r]..offsets[r+1]."""

    source: Int64[np.ndarray, "n"]
    episode: Int64[np.ndarray, "n"]
    frame: Int64[np.ndarray, "n"]
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
        costs = np.concatenate([np.stack([s.images, s.text]) for s in self.sources], axis=1)
        self._kinds, kind = np.unique(costs, axis=1, return_inverse=True)
        self._kind = np.split(kind, np.cumsum([len(s.lengths) for s in self.sources])[:-1])
        self._ends = [np.cumsum(source.lengths) for source in self.sources]
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
            for array in (source.episodes, source.lengths, source.images, source.text):
                digest.update(np.ascontiguousarray(array, np.int64).tobytes())
        return digest.hexdigest()[:16]

    def rows(self, step: int) -> list[list[Draw]]:
        """The samples of each row of the global batch at `step`."""
        rows = self.draws(step)
        draws = [Draw(*map(int, draw)) for draw in zip(*rows[:4], strict=True)]
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
        source, local, frame = self._drawn(number)
        kind = np.concatenate([k[local[source == s]] for s, k in enumerate(self._kind)])
        counts = np.bincount(kind, minlength=self._kinds.shape[1])
        packing = pack_kinds(self._kinds[0], self._kinds[1], counts, self.layout)
        mixed = shuffled(self.window, fold(self.seed, _DRAWS, number))
        row = np.empty(self.window, np.int64)
        row[mixed] = assign_rows(packing, kind[mixed])
        row = shuffled(packing.rows, fold(self.seed, _ROWS, number))[row]
        order = np.argsort(row, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=packing.rows))])
        episode = np.concatenate(
            [s.episodes[local[source == n]] for n, s in enumerate(self.sources)]
        )
        ids = number * self.window + np.arange(self.window)
        draws = [array[order] for array in (source, episode, frame, ids, kind)]
        return Rows._make([*draws, offsets])

    def _drawn(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A window's draws, source after source: source, its how-manieth episode, frame."""
        before = self._shares(number * self.window)
        after = self._shares((number + 1) * self.window)
        sources, locals_, frames = [], [], []
        for s, (low, high) in enumerate(zip(before, after, strict=True)):
            total = int(self._ends[s][-1])
            places = []
            for epoch in range(low // total, -(-high // total)):
                ranks = np.arange(max(low, epoch * total), min(high, (epoch + 1) * total))
                key = fold(self.seed, _ORDER, s, epoch)
                places.append(permute(ranks - epoch * total, total, key))
            place = np.concatenate(places) if places else np.zeros(0, np.int64)
            local = np.searchsorted(self._ends[s], place, "right")
            sources.append(np.full(len(place), s))
            locals_.append(local)
            frames.append(place - (self._ends[s] - self.sources[s].lengths)[local])
        return np.concatenate(sources), np.concatenate(locals_), np.concatenate(frames)

    def _shares(self, draws: int) -> list[int]:
        """How many of the first so many draws are each source's. Split off one source at a time,
        so that the shares sum to `draws` and none ever shrinks."""
        shares, weight = [], sum(self._weights)
        for own in self._weights:
            shares.append(draws * own // weight if weight else 0)
            draws, weight = draws - shares[-1], weight - own
        return shares


def _check(source: Source, layout: Layout) -> None:
    if not source.weight > 0 or not np.isfinite(source.weight):
        raise ValueError(
            f"Source '{source.name}' has weight {source.weight}; give a positive number, "
            "or leave the source out."
        )
    if len(source.lengths) == 0 or source.lengths.min() < 1:
        raise ValueError(
            f"Source '{source.name}' has no samples (an episode without frames, or no episode); "
            "leave it out or choose other episodes."
        )
    for what, needed, available in (
        ("images", source.images, layout.images),
        ("text", source.text, layout.text),
        (
            "prefix",
            source.images * layout.tokens_per_image + source.text + layout.state_tokens,
            layout.prefix,
        ),
    ):
        if needed.max() > available:
            worst = int(np.argmax(needed))
            raise ValueError(
                f"Source '{source.name}', episode {source.episodes[worst]}: a sample needs "
                f"{needed[worst]} {what} places, but a row has {available}; "
                f"raise layout.{what} or shorten the prompt."
            )


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    arrays = [np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:-1]]
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Rows._make([*arrays, np.concatenate([[0], np.cumsum(sizes)])])
