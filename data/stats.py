"""Exact statistics of a dataset's columns, and the scaling that follows from them.

Computed from the parquet over every frame of the chosen episodes: the stats.json of datasets
recorded by LeRobot up to 0.5 holds means of per-episode quantiles, which no longer are quantiles.
The scaling is π0.5's: the 1st to 99th percentile becomes -1 to 1.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from data.lerobot import Dataset
from models import Normalizer

Stats = dict[str, np.ndarray]
"""min, max, mean, std, q01, q10, q50, q90, q99 per dimension, and count [1]."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

_NARROW = 0.01
_SMALLEST_SCALE = 1e-4

_log = logging.getLogger(__name__)


def compute(dataset: Dataset, episodes: Sequence[int] | None = None) -> dict[str, Stats]:
    """Statistics of every numeric column over all frames (of `episodes`, if given).

    Raises:
      ValueError: a column is missing or of another type than declared; no frames.
    """
    numeric = [n for n in dataset.column_names if dataset.features[n]["dtype"] != "string"]
    if dataset.num_frames == 0 or (episodes is not None and len(episodes) == 0):
        raise ValueError(f"{dataset.root}: no frames to take statistics of; record episodes first.")
    return {name: describe(dataset.column(name, episodes)) for name in numeric}


def describe(values: Float[np.ndarray, "n *shape"]) -> Stats:
    """Statistics along the first axis, each of shape [*shape] or [1] for scalars."""
    x = values.reshape(len(values), -1).astype(np.float64)
    quantiles = np.quantile(x, list(QUANTILES.values()), axis=0)
    shape = values.shape[1:] or (1,)
    stats = {
        "min": x.min(axis=0),
        "max": x.max(axis=0),
        "mean": x.mean(axis=0),
        "std": x.std(axis=0),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }
    return {k: v.reshape(shape) for k, v in stats.items()} | {"count": np.array([len(values)])}


def describe_blocks(blocks: Callable[[], Iterable[Float[np.ndarray, "_n *shape"]]]) -> Stats:
    """`describe` of blocks end to end; `blocks()` gives them anew for every pass over them."""
    return describe(np.concatenate(list(blocks())))


def normalizer(stats: Mapping[str, np.ndarray], name: str) -> Normalizer:
    """The scaling that takes q01 to -1 and q99 to 1, per dimension.

    A dimension that hardly moves between them (a gripper that closes once in a hundred frames)
    takes min and max instead, and one that never moves a scale of 1e-4; both are logged by `name`
    and dimension, since dividing by their range would make noise or rare values enormous.
    """
    low, high = np.ravel(stats["q01"]).copy(), np.ravel(stats["q99"]).copy()
    least, most = np.ravel(stats["min"]), np.ravel(stats["max"])
    for d in range(len(low)):
        if high[d] - low[d] < _NARROW * (most[d] - least[d]):
            _log.warning(
                "%s[%d]: 98 %% of its values lie in %g..%g but all of them in %g..%g; "
                "scaled by the latter.", name, d, low[d], high[d], least[d], most[d],
            )  # fmt: skip
            low[d], high[d] = least[d], most[d]
        if high[d] - low[d] < 2 * _SMALLEST_SCALE:
            _log.warning(
                "%s[%d]: hardly changes (%g..%g); scaled by %g, and so of no use to learn from.",
                name, d, low[d], high[d], _SMALLEST_SCALE,
            )  # fmt: skip
    scale = np.maximum((high - low) / 2, _SMALLEST_SCALE)
    return Normalizer(tuple(map(float, (low + high) / 2)), tuple(map(float, scale)))
