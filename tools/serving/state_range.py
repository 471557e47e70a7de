"""Distance of a robot's state from the data that its policy was trained on: a state in other units
or another order still gets a plausible chunk, which is worse than an error.
"""

import numpy as np
from jaxtyping import Float

from models.inputs.embodiment import Normalizer

UNUSUAL = 10.0
"""Distance from which a state is logged. The farthest states in training data themselves were at
3.7 (Meta-World, q01 to q99), 3.6 (its z-scores) and 1.1 to 1.6 (our fixtures)."""
_LEAST = 0.01
_OF_WIDEST = 0.1


def distances(scale: Normalizer, state: Float[np.ndarray, " s"]) -> Float[np.ndarray, " s"]:
    """Distance by dim of the state from the middle of the training data, in half ranges (or
    standard deviations).

    Dims that hardly moved have tiny scales, in which any real deviation is enormous; they count
    as at least 0.01 wide, and a tenth of the widest dim.
    """
    wide = np.abs(np.asarray(scale.scale, np.float64))
    least = max(_LEAST, _OF_WIDEST * float(wide.max(initial=0.0)))
    return np.abs(np.asarray(state, np.float64) - np.asarray(scale.offset)) / np.maximum(
        wide, least
    )


def training_range(scale: Normalizer, dim: int) -> tuple[float, float]:
    """Range that approximately covers the training data of a dim."""
    middle, half = scale.offset[dim], abs(scale.scale[dim])
    return middle - half, middle + half
