"""Facts about each episode, to find the unusual ones among thousands: how long it stands still, how
roughly it moves, how far its values are from those of the others.

Two numbers need an explanation. Jerk, the third derivative, is the usual measure of unsmooth
movement (Flash and Hogan 1985, doi.org/10.1523/JNEUROSCI.05-07-01688.1985); here it is in ranges of
a dimension per second cubed. An episode's number is unlike the others' if it is beyond Tukey's
outer fences, three interquartile ranges from the quartiles (Exploratory Data Analysis, 1977).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from data.dataset import Dataset, Report
from data.frames import Stats, usual_columns
from data.statistics.idle import (
    IdleLimits,
    by_episode,
    idle_frames,
    movement_columns,
    usual_extent,
)
from data.statistics.stats import compute

_FENCE = 3.0


class EpisodeFacts(NamedTuple):
    """Numbers of each episode, and statistics of the columns that they come from.

    `still`, `doubled`, `outside` and `broken` count frames: for `still` and `doubled` see
    data/statistics/idle.py; in `outside` frames a dimension lies more than half of its usual range
    beyond that range; `broken` frames are not finite. `jerk` is the root mean square of the median
    dimension; NaN where there are fewer than four frames.
    """

    still: Int64[np.ndarray, " e"]
    doubled: Int64[np.ndarray, " e"]
    outside: Int64[np.ndarray, " e"]
    broken: Int64[np.ndarray, " e"]
    jerk: Float64[np.ndarray, " e"]
    stats: Mapping[str, Stats]


def episode_facts(
    dataset: Dataset, limits: IdleLimits, columns: Sequence[str], progress: Report
) -> EpisodeFacts:
    """Facts from state and action, or from the named columns. Episodes with values that are not
    finite are left out of the statistics.

    Raises:
      ValueError: there is no such column of numbers, or no episode is finite.
      DatasetError: a column cannot be read.
    """
    names = movement_columns(dataset, columns)
    lengths, total = dataset.lengths, int(dataset.lengths.sum())
    still, doubled, outside, broken = np.zeros((4, len(lengths)), np.int64)
    done = 0
    for i, values in enumerate(by_episode(dataset, names)):
        broken[i], done = (~np.isfinite(values).all(axis=1)).sum(), done + len(values)
        progress("Reading", done, total)
    finite = np.flatnonzero((broken == 0) & (lengths > 0))
    if not len(finite):
        raise ValueError(
            f"{dataset.root}: no episode has only finite values in {names}; repair them, or name "
            "other columns."
        )
    chosen = None if len(finite) == len(lengths) else finite.tolist()
    stats = compute(dataset, chosen, names, progress)
    extent = usual_extent(stats, names)
    middle = np.concatenate([np.ravel(stats[n]["q01"] + stats[n]["q99"]) / 2 for n in names])
    sizes = [stats[n]["q01"].size for n in names]
    actions = usual_columns(names)[1]
    felt = [n not in actions or len(actions) == len(names) for n in names]
    smooth = np.repeat(felt, sizes) & (extent > 0)
    jerk, done = np.full(len(lengths), np.nan), 0
    for i, values in enumerate(by_episode(dataset, names)):
        if broken[i] == 0:
            idle = idle_frames(values, extent, limits, dataset.fps)
            still[i], doubled[i] = idle.still.sum(), idle.doubled.sum()
            outside[i] = ((np.abs(values - middle) > extent) & (extent > 0)).any(axis=1).sum()
            if smooth.any() and len(values) > 3:
                third = np.diff(values[:, smooth] / extent[smooth], n=3, axis=0)
                jerk[i] = np.median(np.sqrt((third**2).mean(axis=0))) * dataset.fps**3
        done += len(values)
        progress("Episodes", done, total)
    return EpisodeFacts(still, doubled, outside, broken, jerk, stats)


def unlike(
    values: Float64[np.ndarray, " e"],
) -> tuple[Bool[np.ndarray, " e"], Bool[np.ndarray, " e"]]:
    """Masks of the numbers far below and far above the others; NaN is neither."""
    low, high = np.nanquantile(values, [0.25, 0.75]) if np.isfinite(values).any() else (0.0, 0.0)
    apart = _FENCE * (high - low)
    return values < low - apart, values > high + apart
