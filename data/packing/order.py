"""The order in which a source's samples are drawn: at random, yet in any stretch of it samples of
every cost come in nearly the same numbers.

The samples stand in a line, sorted by cost and cut into cells. Every cell gives its exact share of
the draws, in a random order of its own: stratified sampling without replacement. So a window's
costs are known before it is drawn, and since nothing is kept but the line, any draw is reached at
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from data.frames import Runs
from data.packing.permutation import below, fold, permute, scramble


@dataclass(frozen=True)
class PlanSource:
    """One dataset of a mixture: its runs that may be drawn, and what a sample of each costs.

    `weight` is its share of the draws, relative to the other sources. Every frame of `runs` is a
    sample; `images` are the image slots it takes, `text` the text tokens of each wording of each
    task, 0 where a task has fewer wordings.
    """

    name: str
    weight: float
    runs: Runs
    images: Int64[np.ndarray, " r"]
    text: Int64[np.ndarray, "t w"]

    @property
    def wordings(self) -> Int64[np.ndarray, " t"]:
        """Number of wordings of each task."""
        return np.count_nonzero(self.text, axis=1)


class DrawnSamples(NamedTuple):
    """Samples of a source, and the cell that each was drawn from."""

    cell: Int64[np.ndarray, " n"]
    episode: Int64[np.ndarray, " n"]
    frame: Int64[np.ndarray, " n"]
    task: Int64[np.ndarray, " n"]
    wording: Int64[np.ndarray, " n"]


class Order:
    """A source's samples in the endless order in which they are drawn, each once per epoch.

    Every w-th frame of a run whose task has w wordings is told in the same, and which frames are
    told in which changes with the epoch; so each wording is drawn equally often, but for runs of
    fewer frames than wordings, which show some of them.

    Args:
      draws: of this source in a window: at least, at most.

    Attributes:
      images, text: what the largest sample of each cell takes.
      room: samples as large as each cell's that a window needs room for: the samples of no window
        need more room for this or larger ones, of the same number of images.
    """

    images: Int64[np.ndarray, " c"]
    text: Int64[np.ndarray, " c"]
    room: Int64[np.ndarray, " c"]

    def __init__(self, source: PlanSource, draws: tuple[int, int], seed: int) -> None:
        self._source, self._wordings = source, source.wordings
        self._shift_key, wording_key, order_key = (fold(seed, what) for what in range(3))
        images, text = self._line_up(wording_key)
        bounds = np.append(np.flatnonzero(np.diff(images, prepend=-1)), len(images))
        places = np.diff(self._starts[bounds])
        self._classes: list[int] = places.tolist()
        self._cuts, room = [], []
        for low, high, size, (least, most) in zip(
            bounds, bounds[1:], self._classes, share_ranges(*draws, self._classes), strict=False
        ):
            last = np.append(np.flatnonzero(np.diff(text[low:high])), high - low - 1)
            cuts = _cuts(self._starts[low + 1 + last] - self._starts[low], least)
            self._cuts.append(cuts)
            larger = [-(-most * (size - cut) // size) for cut in cuts]
            room.append(-np.diff(larger))
        self._first = np.concatenate(
            [self._starts[low] + cuts[:-1] for low, cuts in zip(bounds, self._cuts, strict=False)]
        )
        self._size = np.concatenate([np.diff(cuts) for cuts in self._cuts])
        largest = np.searchsorted(self._starts, self._first + self._size) - 1
        self.images, self.text, self.room = images[largest], text[largest], np.concatenate(room)
        cells = np.arange(len(self._size), dtype=np.uint64)
        self._keys = scramble(cells, order_key)

    def draws(self, low: int, high: int) -> DrawnSamples:
        """Draws low..high of the order, cell by cell."""
        before = self._given(low)
        counts = self._given(high) - before
        cell = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(high - low) + (before + counts - np.cumsum(counts))[cell]
        epoch, index = np.divmod(number, self._size[cell])
        key = scramble(epoch.astype(np.uint64), self._keys[cell])
        place = self._first[cell] + permute(index, self._size[cell], key)
        return DrawnSamples(cell, *self._samples(place, epoch))

    def _samples(
        self, place: Int64[np.ndarray, " n"], epoch: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], ...]:
        """Episode, frame, task and wording of what stands at these places of the line."""
        runs = self._source.runs
        item = np.searchsorted(self._starts, place, "right") - 1
        run = self._run[item]
        task, length = runs.task[run], runs.length[run]
        at = self._part[item] + (place - self._starts[item]) * self._wordings[task]
        chance = scramble(run.astype(np.uint64), self._shift_key)
        shift = below(scramble(epoch.astype(np.uint64), chance), length.astype(np.uint64))
        frame = runs.first[run] + (at + shift.astype(np.int64)) % length
        return runs.episode[run], frame, task, self._wording[item].astype(np.int64)

    def _line_up(self, key: int) -> tuple[Int64[np.ndarray, " i"], Int64[np.ndarray, " i"]]:
        """Makes the line; images and text of its items. An item is what of a run is told in one
        wording: of w wordings, `part` p is at places p, p + w, … of the run."""
        source, runs = self._source, self._source.runs
        per_run = self._wordings[runs.task]
        run = np.repeat(np.arange(len(per_run), dtype=np.int32), per_run)
        part = np.arange(len(run)) - np.repeat(np.cumsum(per_run) - per_run, per_run)
        number = -((part - runs.length[run]) // per_run[run])
        run, part, number = run[number > 0], part[number > 0], number[number > 0]
        first = below(scramble(run.astype(np.uint64), key), per_run[run].astype(np.uint64))
        wording = (part + first.astype(np.int64)) % per_run[run]
        images, text = source.images[run], source.text[runs.task[run], wording]
        order = np.lexsort((text, images))
        self._run = run[order]
        self._part, self._wording = (x[order].astype(np.int16) for x in (part, wording))
        self._starts = np.concatenate([[0], np.cumsum(number[order])])
        return images[order], text[order]

    def _given(self, draws: int) -> Int64[np.ndarray, " c"]:
        """Number of each cell's among the first so many draws: the share of those that stand before
        its end, rounded down, less that of those before its start."""
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
    """The fewest and the most that each gets by `split` of `least` to `most` further draws."""
    ranges, weight = [], sum(weights)
    for own in weights:
        ranges.append((least * own // weight, -(-most * own // weight)))
        rest = weight - own
        least, most, weight = least * rest // weight, -(-most * rest // weight), rest
    return ranges


def _cuts(ends: Int64[np.ndarray, " k"], least: int) -> list[int]:
    """Places at which to cut a line in which samples of one cost end at each of `ends`: into cells
    of one cost and, between them, cells of two or more that give about one draw a window.

    Every cell is to give one of `least` draws at least, or else its share could shrink.
    """
    size = int(ends[-1])
    cells = max(1, size // -(-size // max(1, least)))
    grid = np.arange(cells + 1) * size // cells
    before = grid[np.searchsorted(grid, ends, "right") - 1]
    after = grid[np.searchsorted(grid, ends)]
    return np.unique(np.concatenate([[0], before, after])).tolist()
