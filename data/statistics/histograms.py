"""Histograms of a dataset's columns, one for each dimension, over edges that two datasets can
share; computed a block at a time."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int64

from data.dataset import Dataset
from data.frames import Stats

BINS = 40
_MARGIN = 0.1

Edges = Float64[np.ndarray, "2 d"]
"""Low and high end of each dimension."""


def shared_edges(stats: Sequence[Stats]) -> Edges:
    """Ends that include the 1st to 99th percentile of a column in all datasets, and a tenth of that
    range on either side, as far as there are values."""
    low, high, least, most = (
        pick([np.ravel(one[kind]) for one in stats], axis=0)
        for kind, pick in (("q01", np.min), ("q99", np.max), ("min", np.min), ("max", np.max))
    )
    low, high = np.where(high > low, (low, high), (least, most))
    margin = _MARGIN * (high - low)
    return np.stack([np.maximum(low - margin, least), np.minimum(high + margin, most)])


def histograms(
    dataset: Dataset, edges: Mapping[str, Edges]
) -> dict[str, Int64[np.ndarray, "d bins"]]:
    """Frames in each of 40 bins between the edges of every dimension of the columns; the first and
    the last bin include values beyond the edges, and values that are not finite are in none."""
    counts = {name: np.zeros((ends.shape[1], BINS), np.int64) for name, ends in edges.items()}
    for block in dataset.stream(list(edges)) if edges else ():
        for name, (low, high) in edges.items():
            values = block[name].reshape(len(block[name]), -1).astype(np.float64)
            finite = np.isfinite(values)
            part = (np.where(finite, values, low) - low) / np.where(high > low, high - low, 1)
            bins = np.clip(part * BINS, 0, BINS - 1).astype(np.int64)
            flat = (bins + BINS * np.arange(values.shape[1]))[finite]
            counts[name] += np.bincount(flat, minlength=counts[name].size).reshape(-1, BINS)
    return counts
