"""Stretches of episodes in which the robot stands still, and frames that were recorded twice.

A robot that waits teaches a policy to wait. A frame is still if it lies in a window of time in
which no dimension of state and action leaves a narrow band, so that a noisy sensor does not count
as movement and slow work at a high rate does not count as rest. A frame is doubled if its values
equal those of the previous frame, bit for bit, during movement.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.lib.stride_tricks import sliding_window_view

from data.dataset import Dataset, Report, cut_into_episodes
from data.frames import ACTION, STATE, Stats, usual_columns
from data.statistics.stats import compute, numeric_columns

_ENDS = ("q01", "q99", "min", "max")
_QUIET, _DRAWN, _BACK = 0.05, 4096, 0.1
"""Share of windows that are the quietest; draws from which the range of noise is taken; and the
least negative correlation of two steps of noise, of 0.5 if it is white."""


@dataclass(frozen=True)
class IdleLimits:
    """Share of each dimension's range (from the 1st to the 99th percentile) that it stays within,
    and the least number of seconds for which it does.

    Raises:
      ValueError: a number is out of range.
    """

    still: float = 0.01
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.still < 1 or not 0 < self.seconds < 3600:
            raise ValueError(
                f"still is {self.still:g} and seconds {self.seconds:g}; give still as a share of "
                "the range, from 0 to below 1, and seconds above 0 and below 3600."
            )


class IdleFrames(NamedTuple):
    """Frames of an episode. `moved` is, for each frame, the movement in the quietest window of time
    that contains it: the largest share of its range that a dimension passes through. `quietest` is,
    for each dimension, the share that it passes through in the quietest twentieth of all windows;
    NaN if it does not go back and forth there, as noise does."""

    moved: Float64[np.ndarray, " t"]
    still: Bool[np.ndarray, " t"]
    doubled: Bool[np.ndarray, " t"]
    quietest: Float64[np.ndarray, " d"]

    @property
    def kept(self) -> list[list[int]]:
        """Ranges [first, stop) of the frames that are neither still nor doubled."""
        return ranges(~(self.still | self.doubled))


def find_idle(
    dataset: Dataset,
    limits: IdleLimits,
    columns: Sequence[str] = (),
    progress: Report | None = None,
) -> Iterator[IdleFrames]:
    """Idle frames of each episode, by state and action or by the named columns.

    Raises:
      ValueError: there is no such column of numbers, or none at all.
    """
    names = movement_columns(dataset, columns)
    stats = compute(dataset, None, names, progress)
    extent = usual_extent(stats, names)
    total, done = int(dataset.lengths.sum()), 0
    for values in by_episode(dataset, names):
        yield idle_frames(values, extent, limits, dataset.fps)
        done += len(values)
        if progress is not None:
            progress("Idle frames", done, total)


def movement_columns(dataset: Dataset, columns: Sequence[str] = ()) -> list[str]:
    """The named columns, or state and action.

    Raises:
      ValueError: there is no such column of numbers, or none at all.
    """
    numeric = numeric_columns(dataset)
    state, actions = usual_columns(numeric)
    names = list(columns) or [*state, *actions]
    if lacking := [name for name in names if name not in numeric]:
        raise ValueError(f"{dataset.root}: no numeric column '{lacking[0]}'; it has {numeric}.")
    if not names:
        raise ValueError(
            f"{dataset.root}: has neither '{STATE}' nor '{ACTION}'; name columns that show "
            f"movement, out of {numeric}."
        )
    return names


def by_episode(
    dataset: Dataset, names: Sequence[str], episodes: Sequence[int] | None = None
) -> Iterator[Float64[np.ndarray, "t d"]]:
    """Columns side by side, one episode after the other, of all or of the given ones."""
    blocks = (
        np.concatenate([block[n].reshape(len(block[n]), -1) for n in names], axis=1)
        for block in dataset.stream(names, episodes)
    )
    lengths = dataset.lengths if episodes is None else dataset.lengths[list(episodes)]
    return (values.astype(np.float64) for values in cut_into_episodes(lengths, blocks))


def usual_extent(stats: Mapping[str, Stats], names: Sequence[str]) -> Float64[np.ndarray, " d"]:
    """Range of each dimension from the 1st to the 99th percentile; for one that rarely changes,
    such as a gripper, from end to end."""
    kinds = (np.concatenate([np.ravel(stats[n][q]) for n in names]) for q in _ENDS)
    q01, q99, low, high = kinds
    return np.where(q99 > q01, q99 - q01, high - low).astype(np.float64)


def idle_frames(
    values: Float64[np.ndarray, "t d"],
    extent: Float64[np.ndarray, " d"],
    limits: IdleLimits,
    fps: float,
) -> IdleFrames:
    """Idle frames of one episode by its values and their usual extent."""
    length, used, window = len(values), extent > 0, max(2, round(limits.seconds * fps))
    same = np.zeros(length, bool)
    same[1:] = (values[1:] == values[:-1]).all(axis=1)
    part, quietest = values[:, used] / extent[used], np.full(len(extent), np.nan)
    if length < window or not used.any():
        moved = np.full(length, np.ptp(part, axis=0).max(initial=0.0))
        still = np.zeros(length, bool)
    else:
        seen = sliding_window_view(part, window, axis=0)
        widths = seen.max(axis=-1) - seen.min(axis=-1)
        for dim, narrow, each in zip(
            np.flatnonzero(used), widths.T, seen.swapaxes(0, 1), strict=True
        ):
            least = np.quantile(narrow, _QUIET)
            steps = np.diff(each[narrow <= least], axis=1)
            if (steps[:, 1:] * steps[:, :-1]).sum() < -_BACK * (steps**2).sum():
                quietest[dim] = least
        around = np.pad(widths.max(axis=1), window - 1, constant_values=np.inf)
        moved = sliding_window_view(around, window).min(axis=1)
        still = moved <= limits.still
    return IdleFrames(moved, still, same & ~still, quietest)


class NoisyDim(NamedTuple):
    """A dimension that is never still, by its column and its number there: the share of its range
    that it passes through in its quietest windows, and the standard deviation, in the same measure,
    of a noise that does so."""

    column: str
    dim: int
    quietest: float
    noise: float


def noisy_dims(
    dataset: Dataset, limits: IdleLimits, found: Sequence[IdleFrames], columns: Sequence[str] = ()
) -> list[NoisyDim]:
    """The dimensions that keep all frames of nearly all episodes from being still, the widest
    first."""
    seen = np.array([idle.quietest for idle in found if not np.isnan(idle.quietest).all()])
    if not len(seen):
        return []
    quietest = np.nanquantile(np.where(np.isnan(seen), 0, seen), 0.1, axis=0)
    window = max(2, round(limits.seconds * dataset.fps))
    drawn = np.random.default_rng(0).normal(size=(_DRAWN, window))
    spread = float(np.quantile(np.ptp(drawn, axis=1), _QUIET))
    names = movement_columns(dataset, columns)
    dims = [(name, d) for name in names for d in range(math.prod(dataset.features[name]["shape"]))]
    noisy = [
        NoisyDim(name, dim, float(width), float(width) / spread)
        for (name, dim), width in zip(dims, quietest, strict=True)
        if width > limits.still
    ]
    return sorted(noisy, key=lambda one: -one.quietest)


def to_json(
    dataset: Dataset, limits: IdleLimits, found: Sequence[IdleFrames], columns: Sequence[str] = ()
) -> dict[str, Any]:
    """Frames that are left without the idle ones, in the form that a mixture's `frames` reads;
    whole episodes are not listed."""
    return {
        "dataset": dataset.name,
        "episodes": len(found),
        "frames": int(dataset.lengths.sum()),
        "lengths": digest_of_lengths(dataset.lengths),
        "still": limits.still,
        "seconds": limits.seconds,
        "columns": list(columns),
        "keep": {
            str(i): idle.kept for i, idle in enumerate(found) if (idle.still | idle.doubled).any()
        },
    }


def digest_of_lengths(lengths: Int64[np.ndarray, " e"]) -> str:
    """Digest of the lengths of all episodes in their order, which an edit changes."""
    return hashlib.sha256(np.asarray(lengths, "<i8").tobytes()).hexdigest()[:16]


def ranges(mask: Bool[np.ndarray, " t"]) -> list[list[int]]:
    """Ranges [first, stop) in which a mask is True."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2).tolist()
