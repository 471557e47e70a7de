"""The packing plan: which samples make up every row of every step, computed from lengths alone.

A pure function of (datasets' metadata, weights, seed, step): no frame is decoded and no state is
kept, so any host or worker computes the rows it needs, and a run resumes at any step immediately.
Rows come from windows, one after the other, or from several mixtures' windows while weights change.
A step's rows are ordered so that the ranks that share them have equally much work.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from data.packing.balance import balanced_order, excess
from data.packing.curriculum import (
    Schedule,
    mean_shares,
    stages,
    told_weight,
    weight_at,
    wrong_weight,
)
from data.packing.order import PlanSource
from data.packing.permutation import fold
from data.packing.windows import PlannedRows, Windows, joined
from models import Layout
from models.files import html
from models.inputs.packed_batch import counts_of

_MIXTURE = 4
_WINDOWS = 4096, 32768


class Draw(NamedTuple):
    """A sample that the plan chose: frame `frame` of an episode, with one wording of its task; the
    `id`-th draw."""

    source: int
    episode: int
    frame: int
    task: int
    wording: int
    id: int


class Fill(NamedTuple):
    """Used part of the budgets of some rows; `samples` is the mean number of samples in a row, and
    `prefix` is the part of the slots that is used where samples fill no places."""

    prefix: float
    images: float
    text: float
    samples: float


class Plan:
    """Rows of samples for every step of a run.

    Args:
      sources: the datasets of the mixture.
      layout: the budgets of a row.
      rows: rows of the global batch.
      seed: decides the order.
      window: draws packed together. More draws fill rows better; fewer keep epochs apart. If None,
        the number of samples, limited to 4,096 to 32,768.
      ranks: number of parts, of equally many rows, that share a batch and should have the same
        attention cost. It decides the order of a step's rows, but not which rows they are.

    Attributes:
      kinds: images and text tokens of every kind of sample.
      rows_per_window: rows that each window of draws fills, for the first mixture.

    Raises:
      ValueError: a source has no samples or an invalid weight, all weights are 0 at a step, a task
        has no wording, a sample does not fit into an empty row, or the rows do not divide among the
        ranks.
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
        self._stages = stages([source.weight for source in self.sources])
        mixtures = list({stage.shares: stage for stage in self._stages}.values())
        self._mixtures = [
            Windows(
                {n: source for n, source in enumerate(self.sources) if stage.weights[n]},
                [weight for weight in stage.weights if weight],
                layout,
                self.window,
                fold(seed, _MIXTURE, number) if number else seed,
                self._codes,
                self._span,
            )
            for number, stage in enumerate(mixtures)
        ]
        shares = [stage.shares for stage in mixtures]
        self._schedule = Schedule(
            tuple(self._stages),
            tuple(shares.index(stage.shares) for stage in self._stages),
            tuple(mixture.density for mixture in self._mixtures),
            rows,
        )
        self.rows_per_window = self._mixtures[0].rows_per_window

    def _repr_html_(self) -> str:
        lay, first = self.layout, self.fill(range(1))
        slots = int(lay.slots.sum())
        facts = {
            "rows of a batch": f"{self.rows_per_step} of {lay.prefix} prefix places",
            "filled": f"{first.prefix:.1%} in the first batch, {first.samples:.1f} samples a row",
            "a row's most": f"{lay.samples} samples, {slots} images, {lay.text} text tokens",
            "seed": self.seed,
        }
        heads = ("source", "weight", "samples", "wordings")
        rows = [
            (s.name, told_weight(s.weight), f"{s.runs.length.sum():,}", (s.text > 0).sum())
            for s in self.sources
        ]
        return html.card("Packing plan", facts, html.table(heads, rows))

    @property
    def digest(self) -> str:
        """Digest of everything that the rows depend on except the step; a resumed run must find it
        unchanged."""
        weights = self._mixtures[0].weights
        text = repr((self.layout, self.rows_per_step, self.seed, self.window, weights))
        digest = hashlib.sha256(text.encode())
        if self.layout.more:
            digest.update(repr(self.layout.more).encode())
        if len(self._stages) > 1:
            digest.update(repr(self._stages).encode())
        for source in self.sources:
            for array in (*source.runs, source.images, source.text):
                digest.update(repr(array.shape).encode())
                digest.update(np.ascontiguousarray(array, np.int64).tobytes())
            if source.weighted:
                digest.update(source.masses.tobytes())
        for mixture in self._mixtures:
            digest.update(mixture.row_of_place.tobytes())
        return digest.hexdigest()[:16]

    def rows(self, step: int) -> list[list[Draw]]:
        """The samples of each row of the global batch at `step`."""
        rows = self.draws(step)
        draws = [Draw(*map(int, draw)) for draw in zip(*rows[:6], strict=True)]
        return [draws[low:high] for low, high in zip(rows.offsets, rows.offsets[1:], strict=False)]

    def draws(self, step: int, start: int = 0, stop: int | None = None) -> PlannedRows:
        """Rows start..stop of the global batch at `step` as arrays; past its end, later steps' rows
        follow."""
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
        return joined(parts)

    def intended(self, step: int) -> Float[np.ndarray, " s"]:
        """Shares of the sources according to their weights at a step."""
        weights = np.array([float(weight_at(s.weight, step)) for s in self.sources])
        return weights / weights.sum()

    def excess(self, step: int) -> float:
        """Relative excess of the slowest rank's attention cost over the mean of all ranks."""
        return excess(self.costs(step), self.ranks)

    def costs(self, step: int) -> Int64[np.ndarray, " r"]:
        """Cost of attention in each row: the sum of its samples' squared lengths."""
        return self._costs(self.draws(step))

    def fill(self, steps: Iterable[int]) -> Fill:
        """Fill of the rows of these steps."""
        lay, groups = self.layout, self.layout.groups
        shown, places = counts_of(self.kinds[0], len(groups)), lay.prefix_length(*self.kinds)
        images = text = prefix = rows = samples = 0
        for step in steps:
            drawn = self.draws(step)
            images += int(shown[drawn.kind].sum())
            text += int(self.kinds[1, drawn.kind].sum())
            prefix += int(places[drawn.kind].sum())
            samples, rows = samples + len(drawn.kind), rows + drawn.number
        room = rows * (lay.prefix or lay.samples)
        return Fill(
            prefix=(prefix if lay.prefix else samples) / room,
            images=images / max(rows * int(lay.slots.sum()), 1),
            text=text / (rows * max(lay.text, 1)),
            samples=samples / rows,
        )

    def _as_packed(self, step: int) -> PlannedRows:
        """The rows of a step in the order of their windows."""
        spans = zip(self._schedule.before(step), self._schedule.before(step + 1), strict=True)
        return joined(
            [
                part
                for number, (low, high) in enumerate(spans)
                for part in self._rows_of(number, low, high)
            ]
        )

    def _rows_of(self, number: int, low: int, high: int) -> list[PlannedRows]:
        """Rows of a mixture, with draw numbers that differ from those of the other mixtures."""
        parts, mixtures = self._mixtures[number].rows(low, high), len(self._mixtures)
        return [part._replace(id=part.id * mixtures + number) for part in parts]

    def _costs(self, rows: PlannedRows) -> Int64[np.ndarray, " r"]:
        sums = np.append(0, np.cumsum(self._attention[rows.kind]))
        return np.diff(sums[rows.offsets])


def typical_costs(
    sources: Sequence[PlanSource], number: int = 2048
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Images and text tokens of about `number` draws from a mixture, in no particular order, with
    each kind of sample as often as it is drawn (rounded up)."""
    span = 1 + max(int(source.text.max()) for source in sources)
    costs = [_codes(source, span) for source in sources]
    weights = mean_shares([source.weight for source in sources])
    shares = [
        weight * frames / frames.sum() for weight, (_, frames) in zip(weights, costs, strict=True)
    ]
    kinds, kind = np.unique(np.concatenate([code for code, _ in costs]), return_inverse=True)
    share = np.bincount(kind, np.concatenate(shares))
    counts = np.ceil(share / share.sum() * number).astype(int)
    images, text = np.divmod(np.repeat(kinds, counts), span)
    return images, text


def _codes(
    source: PlanSource, span: int
) -> tuple[Int64[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """images · span + text of every run's samples in each wording of its task, and the number of
    samples, each counted as often as its weight."""
    text = source.text[source.runs.task]
    shown = np.arange(text.shape[1]) < source.wordings[source.runs.task][:, None]
    code = source.images[:, None] * span + text
    frames = source.runs.length * (source.weights if source.weighted else 1) / shown.sum(axis=1)
    return code[shown], np.broadcast_to(frames[:, None], shown.shape)[shown]


def _check(source: PlanSource, layout: Layout) -> None:
    if remedy := wrong_weight(source.weight):
        raise ValueError(
            f"Source '{source.name}' has weight {source.weight}; {remedy}, or leave the source out."
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
    if text.min() < 1 and source.text.any():
        raise ValueError(
            f"Source '{source.name}', episode {runs.episode[int(np.argmin(text))]}: its task "
            f"{runs.task[int(np.argmin(text))]} has no wording; give every task at least one."
        )
    if not np.all(held := layout.holds(source.images)):
        worst, groups = int(np.argmin(held)), layout.groups
        needed = counts_of(source.images[worst], len(groups)).tolist()
        raise ValueError(
            f"Source '{source.name}', episode {runs.episode[worst]}: a sample needs "
            f"{_sum(needed)} images places, but a row has {_sum(layout.slots)}; raise "
            "layout.images."
        )
    for what, needed, available in (
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


def _sum(numbers: Iterable[int]) -> str:
    return " + ".join(map(str, numbers))
