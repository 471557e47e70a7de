"""Weights of a mixture's sources that change with the steps of training.

Between two steps with given weights, each source's weight is linear. The shares of a step in
between are therefore a blend of the shares at the two: the step takes some of its rows from windows
of the first mixture and the rest from windows of the second. The numbers of rows are known for all
steps at once, and each mixture's windows are packed once, as if it were the only one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import isfinite
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

Weight = float | tuple[tuple[int, float], ...]
"""A source's weight relative to the others': a number, or points (step, weight), linear between
them and constant outside."""

_FRACTION = 24


class Stage(NamedTuple):
    """Weights of all sources at a step."""

    step: int
    weights: tuple[Fraction, ...]

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Weights that sum to 1."""
        return tuple(weight / sum(self.weights) for weight in self.weights)


def wrong_weight(weight: Weight) -> str:
    """Remedy for an invalid weight; empty if the weight is valid."""
    if not isinstance(weight, tuple):
        return "" if weight > 0 and isfinite(weight) else "give a positive number"
    steps, weights = [step for step, _ in weight], [own for _, own in weight]
    if not steps or steps[0] < 0 or steps != sorted(set(steps)):
        return "give points [step, weight] with increasing steps, from 0 on"
    if not all(own >= 0 and isfinite(own) for own in weights) or not any(weights):
        return "give weights of 0 or more, at least one above 0"
    return ""


def weight_at(weight: Weight, step: int) -> Fraction:
    """A source's weight at a step."""
    if not isinstance(weight, tuple):
        return Fraction(weight)
    later = next((n for n, (told, _) in enumerate(weight) if told > step), len(weight))
    if later in (0, len(weight)):
        return Fraction(weight[max(0, later - 1)][1])
    (low, before), (high, after) = weight[later - 1 : later + 1]
    return Fraction(before) + Fraction(step - low, high - low) * (
        Fraction(after) - Fraction(before)
    )


def stages(weights: Sequence[Weight]) -> list[Stage]:
    """Weights of all sources at each step for which one of them is given; at step 0 if none
    changes.

    Raises:
      ValueError: all are 0 at a step.
    """
    steps = sorted({step for w in weights if isinstance(w, tuple) for step, _ in w}) or [0]
    found = [Stage(step, tuple(weight_at(w, step) for w in weights)) for step in steps]
    for stage in found:
        if not any(stage.weights):
            raise ValueError(
                f"All datasets have weight 0 at step {stage.step}; give one of them more there."
            )
    return found


def mean_shares(weights: Sequence[Weight]) -> list[float]:
    """Typical weights of the sources: their own if none of them changes, else the mean of their
    shares at the steps with given weights."""
    constant = [weight for weight in weights if not isinstance(weight, tuple)]
    if len(constant) == len(weights):
        return constant
    shares = [list(map(float, stage.shares)) for stage in stages(weights)]
    return np.mean(shares, axis=0).tolist()


def largest_weight(weight: Weight) -> float:
    """The largest weight that a source ever has."""
    return max(own for _, own in weight) if isinstance(weight, tuple) else weight


def told_weight(weight: Weight) -> str:
    """Human-readable text of a weight."""
    if not isinstance(weight, tuple):
        return f"{weight:g}"
    return ", ".join(f"{own:g} at {step:,}" for step, own in weight)


@dataclass(frozen=True)
class Schedule:
    """Rows that each step takes from each of several mixtures.

    `mixture` is the number of each stage's mixture, `density` the mean number of samples in a row
    of each mixture, `rows` the number of rows in a step.
    """

    stages: tuple[Stage, ...]
    mixture: tuple[int, ...]
    density: tuple[Fraction, ...]
    rows: int

    def before(self, step: int) -> list[int]:
        """Number of rows that all steps before this one take from each mixture."""
        number = bisect_right(self._steps, step) - 1
        if number < 0:
            return self._and_more([0] * len(self.density), self.mixture[0], self.rows * step)
        since, moved = step - self._steps[number], 0
        if number + 1 < len(self.stages):
            moved = int(self._moved[number][since])
            taken = self._and_more(self._taken[number], self.mixture[number + 1], moved)
        else:
            taken = self._taken[number]
        return self._and_more(taken, self.mixture[number], self.rows * since - moved)

    @cached_property
    def _steps(self) -> list[int]:
        return [stage.step for stage in self.stages]

    @cached_property
    def _taken(self) -> list[list[int]]:
        """Rows from each mixture before each stage."""
        none = [0] * len(self.density)
        found = [self._and_more(none, self.mixture[0], self.rows * self._steps[0])]
        for number, moved in enumerate(self._moved):
            steps = self._steps[number + 1] - self._steps[number]
            later = int(moved[steps])
            taken = self._and_more(found[-1], self.mixture[number + 1], later)
            found.append(self._and_more(taken, self.mixture[number], self.rows * steps - later))
        return found

    @cached_property
    def _moved(self) -> list[Int64[np.ndarray, " _n"]]:
        """Cumulative rows that the steps from each stage on take from the next stage's mixture:
        before the first step, before the second, and so on until the next stage."""
        return [self._taken_from_next(number) for number in range(len(self.stages) - 1)]

    def _taken_from_next(self, number: int) -> Int64[np.ndarray, " n"]:
        (low, before), (high, after) = self.stages[number : number + 2]
        own, following = self.mixture[number : number + 2]
        steps = high - low
        if own == following:
            return np.broadcast_to(np.int64(0), steps + 1)
        at = np.arange(steps) / steps
        rest = (1 - at) * float(sum(before) / self.density[own])
        moved = at * float(sum(after) / self.density[following])
        part = np.floor(moved / (rest + moved) * (self.rows << _FRACTION)).astype(np.int64)
        return np.append(0, np.cumsum(part)) >> _FRACTION

    @staticmethod
    def _and_more(taken: Sequence[int], mixture: int, rows: int) -> list[int]:
        return [n + rows * (m == mixture) for m, n in enumerate(taken)]
