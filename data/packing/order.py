"""Order in which a source's samples are drawn: random, but with nearly the same number of samples
of each cost in any stretch of it.

The samples form a line, sorted by cost and cut into cells. Every cell gives its exact share of the
draws, in its own random order: stratified sampling without replacement. A window's costs are
therefore known before it is drawn, and since only the line is stored, any draw can be computed
directly. A sample's weight is its length on the line, and so decides how often it is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from data.frames import Runs
from data.packing.curriculum import Weight
from data.packing.permutation import below, fold, permute, scramble
from data.packing.systematic import points, whole_weights

_SPLIT_EXACTLY = 1 << 40
"""Number of parts of samples up to which weights are split among wordings without rounding. The
remaining bits of `whole_weights` then resolve a weight to a millionth of the largest."""


@dataclass(frozen=True)
class PlanSource:
    """One dataset of a mixture: its runs that may be drawn, and what a sample of each costs.

    `weight` is its share of the draws, relative to the other sources, and may change with the
    steps. Every frame of `runs` is a sample. `images` is the number of image slots that a sample
    takes, `text` the number of text tokens of each wording of each task, 0 where a task has fewer
    wordings, or everywhere if the model reads none. `weights` says how often each of a run's
    samples is drawn, relative to the source's other samples; equally often if None.
    """

    name: str
    weight: Weight
    runs: Runs
    images: Int64[np.ndarray, " r"]
    text: Int64[np.ndarray, "t w"]
    weights: Float64[np.ndarray, " r"] | None = None

    @property
    def weighted(self) -> bool:
        """True if samples differ in their weights."""
        return self.weights is not None and bool(np.ptp(self.weights))

    @cached_property
    def masses(self) -> Int64[np.ndarray, " r"]:
        """Weights of a run's samples as whole numbers, for each wording separately; 1 if all
        samples have the same weight."""
        if self.weights is None or not self.weighted:
            return np.broadcast_to(np.int64(1), len(self.runs.length))
        wordings, length = self.wordings[self.runs.task], self.runs.length
        parts = lcm(*np.unique(wordings).tolist())
        if int(length.sum()) * parts > _SPLIT_EXACTLY:
            return whole_weights(self.weights / wordings, length * wordings)
        return whole_weights(self.weights, length * parts) * (parts // wordings)

    @property
    def wordings(self) -> Int64[np.ndarray, " t"]:
        """Number of wordings of each task; 1 for a model that reads none."""
        return np.maximum(np.count_nonzero(self.text, axis=1), 1)


class DrawnSamples(NamedTuple):
    """Samples of a source, and the cell that each was drawn from."""

    cell: Int64[np.ndarray, " n"]
    episode: Int64[np.ndarray, " n"]
    frame: Int64[np.ndarray, " n"]
    task: Int64[np.ndarray, " n"]
    wording: Int64[np.ndarray, " n"]


class Order:
    """A source's samples in the endless order in which they are drawn, each once per epoch.

    If a run's task has w wordings, every w-th frame of the run has the same wording, and the
    assignment changes with the epoch. Each wording is therefore drawn equally often, except in runs
    with fewer frames than wordings, which show only some of them.

    If samples have weights, each wording of a sample is a sample of its own, with an equal part of
    its weight. A cell's epoch then has as many draws as bring the heaviest of its samples at most
    once; the others come in some epochs, by `systematic`.

    Args:
      draws: the least and the most draws of this source in a window.

    Attributes:
      images, text: image slots and text tokens of the largest sample of each cell.
      room: for each cell, the number of samples as large as its largest that a window needs room
        for. Among samples with the same number of images, no window needs more room for this size
        and larger ones.
    """

    images: Int64[np.ndarray, " c"]
    text: Int64[np.ndarray, " c"]
    room: Int64[np.ndarray, " c"]

    def __init__(self, source: PlanSource, draws: tuple[int, int], seed: int) -> None:
        self._source, self._wordings = source, source.wordings
        self._weighted, self._masses = source.weighted, source.masses
        self._shift_key, wording_key, order_key, line_key = (fold(seed, what) for what in range(4))
        images, text = self._line_up(wording_key, line_key)
        bounds = np.append(np.flatnonzero(np.diff(images, prepend=-1)), len(images))
        places = np.diff(self._starts[bounds])
        self._classes: list[int] = places.tolist()
        self._cuts, room = [], []
        for low, high, size, (least, most) in zip(
            bounds, bounds[1:], self._classes, share_ranges(*draws, self._classes), strict=False
        ):
            last = np.append(np.flatnonzero(np.diff(text[low:high])), high - low - 1)
            cuts = _cuts(self._starts[low + 1 + last] - self._starts[low], least)
            cuts = self._between_samples(cuts, int(self._starts[low]), -(-size // max(1, least)))
            self._cuts.append(cuts)
            larger = [-(-most * (size - cut) // size) for cut in cuts]
            room.append(-np.diff(larger))
        self._first = np.concatenate(
            [self._starts[low] + cuts[:-1] for low, cuts in zip(bounds, self._cuts, strict=False)]
        )
        self._size = np.concatenate([np.diff(cuts) for cuts in self._cuts])
        largest = np.searchsorted(self._starts, self._first + self._size) - 1
        self.images, self.text, self.room = images[largest], text[largest], np.concatenate(room)
        own = self._masses[self._run]
        first = np.searchsorted(self._starts, self._first, "right") - 1
        self._epoch = self._size // np.maximum(np.maximum.reduceat(own, first), own[largest])
        cells = np.arange(len(self._size), dtype=np.uint64)
        self._keys = scramble(cells, order_key)

    def draws(self, low: int, high: int) -> DrawnSamples:
        """Draws low..high of the order, cell by cell."""
        before = self._given(low)
        counts = self._given(high) - before
        cell = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(high - low) + (before + counts - np.cumsum(counts))[cell]
        epoch, index = np.divmod(number, self._epoch[cell])
        key = scramble(epoch.astype(np.uint64), self._keys[cell])
        stratum = permute(index, self._epoch[cell], key)
        place = points(stratum, epoch, self._epoch[cell], self._size[cell], self._keys[cell])
        return DrawnSamples(cell, *self._samples(self._first[cell] + place, epoch))

    def _samples(
        self, place: Int64[np.ndarray, " n"], epoch: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], ...]:
        """Episode, frame, task and wording of the samples at these places of the line."""
        runs = self._source.runs
        item = np.searchsorted(self._starts, place, "right") - 1
        run = self._run[item]
        task, length, mass = runs.task[run], runs.length[run], self._masses[run]
        step = 1 if self._weighted else self._wordings[task]
        at = self._part[item] + (place - self._starts[item]) // mass * step
        turn = np.zeros_like(epoch) if self._weighted else epoch
        chance = scramble(run.astype(np.uint64), self._shift_key)
        shift = below(scramble(turn.astype(np.uint64), chance), length.astype(np.uint64))
        frame = runs.first[run] + (at + shift.astype(np.int64)) % length
        return runs.episode[run], frame, task, self._wording[item].astype(np.int64)

    def _between_samples(self, cuts: list[int], start: int, least: int) -> list[int]:
        """Cuts of the line from `start` on, each moved to the end of the sample that it would
        split. Cuts that this brings closer than `least` to another are dropped."""
        places = np.array(cuts) + start
        item = np.searchsorted(self._starts[:-1], places, "right") - 1
        mass = self._masses[self._run[item]]
        moved = (places + (self._starts[item] - places) % mass - start).tolist()
        kept = [0]
        for cut in moved[1:-1]:
            if kept[-1] + least <= cut <= cuts[-1] - least:
                kept.append(cut)
        return [*kept, cuts[-1]]

    def _line_up(
        self, wording_key: int, line_key: int
    ) -> tuple[Int64[np.ndarray, " i"], Int64[np.ndarray, " i"]]:
        """Makes the line; returns images and text of its items. An item is the part of a run that
        has one wording: of w wordings, `part` p is at places p, p + w, … of the run. With weights
        it is the whole run, and items of one cost are in random order, so that strata show no
        recurring pattern."""
        source, runs = self._source, self._source.runs
        per_run = self._wordings[runs.task]
        run = np.repeat(np.arange(len(per_run), dtype=np.int32), per_run)
        part = np.arange(len(run)) - np.repeat(np.cumsum(per_run) - per_run, per_run)
        if self._weighted:
            number, wording, part = runs.length[run], part, np.zeros_like(part)
            chance = scramble(run.astype(np.uint64), line_key)
        else:
            number = -((part - runs.length[run]) // per_run[run])
            run, part, number = run[number > 0], part[number > 0], number[number > 0]
            first = below(
                scramble(run.astype(np.uint64), wording_key), per_run[run].astype(np.uint64)
            )
            wording = (part + first.astype(np.int64)) % per_run[run]
            chance = np.zeros(len(run), np.uint64)
        images, text = source.images[run], source.text[runs.task[run], wording]
        order = np.lexsort((chance, text, images))
        self._run = run[order]
        self._part, self._wording = (x[order].astype(np.int16) for x in (part, wording))
        self._starts = np.concatenate([[0], np.cumsum((number * self._masses[run])[order])])
        return images[order], text[order]

    def _given(self, draws: int) -> Int64[np.ndarray, " c"]:
        """Number of each cell's draws among the first `draws`: the share of the line up to the
        cell's end, rounded down, minus the share up to its start, rounded down."""
        given = []
        for share, size, cuts in zip(
            split(draws, self._classes), self._classes, self._cuts, strict=True
        ):
            epochs, rest = divmod(share, size)
            given.append(np.diff([epochs * cut + rest * cut // size for cut in cuts]))
        return np.concatenate(given)


def split(draws: int, weights: Sequence[int]) -> list[int]:
    """Shares of the first `draws` draws by weight, split off one at a time, so that the shares sum
    to `draws` and none ever shrinks."""
    shares, weight = [], sum(weights)
    for own in weights:
        shares.append(draws * own // weight)
        draws, weight = draws - shares[-1], weight - own
    return shares


def share_ranges(least: int, most: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest and the most draws that `split` gives to each of `weights` for `least` to `most`
    further draws."""
    ranges, weight = [], sum(weights)
    for own in weights:
        ranges.append((least * own // weight, -(-most * own // weight)))
        rest = weight - own
        least, most, weight = least * rest // weight, -(-most * rest // weight), rest
    return ranges


def _cuts(ends: Int64[np.ndarray, " k"], least: int) -> list[int]:
    """Places at which to cut a line on which samples of one cost end at each of `ends`. The cuts
    make cells of one cost and, between them, cells of two or more costs that give about one draw
    per window.

    Every cell must give at least one of `least` draws, or its share could shrink.
    """
    size = int(ends[-1])
    cells = max(1, size // -(-size // max(1, least)))
    least_size, more = divmod(size, cells)
    grid = np.arange(cells + 1) * least_size + np.arange(cells + 1) * more // cells
    before = grid[np.searchsorted(grid, ends, "right") - 1]
    after = grid[np.searchsorted(grid, ends)]
    return np.unique(np.concatenate([[0], before, after])).tolist()
