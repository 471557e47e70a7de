"""Scaling of a robot's numbers to the model's units, from exact statistics.

π0.5 maps the 1st to 99th percentile to -1 to 1, π0 subtracts the mean and divides by the standard
deviation (openpi), GR00T maps the smallest and largest value to -1 and 1.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float64

from models import Normalizer, Scaling
from models.files.terminal import logger

_NARROW = 0.01
_SMALLEST_SCALE = 1e-4

_log = logger(__name__)


def normalizer(
    stats: Mapping[str, np.ndarray], name: str, scaling: Scaling = "quantile"
) -> Normalizer:
    """The scaling of a feature by its statistics, per dimension.

    If a dimension hardly moves within the range it would be divided by (a gripper that closes once
    in a hundred frames), its min maps to -1 and its max to 1 instead. A dimension that never moves
    gets a scale of 1e-4. Both are logged by `name` and dimension, since dividing by their range
    would make noise or rare values enormous.
    """
    for d, why in narrow(stats, scaling).items():
        _log.warning("%s[%d]: %s.", name, d, why)
    offset, scale, _ = _by(scaling, stats)
    scale = np.maximum(scale, _SMALLEST_SCALE)
    return Normalizer(tuple(map(float, offset)), tuple(map(float, scale)))


def narrow(stats: Mapping[str, np.ndarray], scaling: Scaling = "quantile") -> dict[int, str]:
    """Dimensions with percentiles too close together to divide by their distance, or with a
    standard deviation too small to divide by, and how they are scaled instead."""
    _, scale, whole = _by(scaling, stats)
    kinds = ("q01", "q99", "min", "max", "std")
    q01, q99, least, most, std = (np.ravel(stats[kind]) for kind in kinds)
    found: dict[int, str] = {}
    for d in range(len(scale)):
        if scale[d] < _SMALLEST_SCALE:
            low, high = (q01, q99) if scaling == "quantile" and not whole[d] else (least, most)
            found[d] = (
                f"hardly changes ({low[d]:g}..{high[d]:g}); scaled by {_SMALLEST_SCALE:g}, so "
                "nothing can be learnt from it"
            )
        elif whole[d]:
            spread = (
                f"its values' standard deviation is {std[d]:g}"
                if scaling == "z-score"
                else f"98 % of its values lie in {q01[d]:g}..{q99[d]:g}"
            )
            found[d] = (
                f"{spread} but all of them lie in {least[d]:g}..{most[d]:g}; scaled by the latter"
            )
    return found


def _by(
    scaling: Scaling, stats: Mapping[str, np.ndarray]
) -> tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, " d"], Bool[np.ndarray, " d"]]:
    """Offsets, scales, and a mask of those that follow from the extremes instead."""
    least, most = np.ravel(stats["min"]), np.ravel(stats["max"])
    if scaling == "z-score":
        offset, scale = np.ravel(stats["mean"]), np.ravel(stats["std"])
    else:
        kinds = ("q01", "q99") if scaling == "quantile" else ("min", "max")
        low, high = (np.ravel(stats[kind]) for kind in kinds)
        offset, scale = (low + high) / 2, (high - low) / 2
    whole = 2 * scale < _NARROW * (most - least)
    middle, half = (least + most) / 2, (most - least) / 2
    return np.where(whole, middle, offset), np.where(whole, half, scale), whole
