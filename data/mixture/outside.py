"""Share of a robot's data outside the range of statistics that were not computed from it, when a
checkpoint's statistics are kept for fine-tuning.

A dim that hardly moved in those statistics has a tiny scale, so a value that does move becomes
enormous. Such a dim is refused, because no loss would survive it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from data.mixture.embodiments import shown_values
from data.mixture.mixed import Mixed
from models import Normalizer, Scaling

REACH: dict[Scaling, float] = {"quantile": 1.0, "min-max": 1.0, "z-score": 3.0}
"""Half the range that statistics cover, in scale units: three standard deviations for z-scores."""
LARGEST = 100.0
"""Scale units from the middle; data in the wrong unit, or of a dim that never moved before, lie
farther out."""


class Outside(NamedTuple):
    """A dim's `share` of values out of range, and by how many scale units the farthest exceeds it
    (`excess`); `low` and `high` are the data's extremes, in the robot's units."""

    robot: str
    feature: str
    dim: int
    low: float
    high: float
    offset: float
    scale: float
    share: float
    excess: float
    reach: float

    @property
    def farthest(self) -> float:
        """Distance of the farthest value from the middle of the statistics, in scale units."""
        return max(abs(self.low - self.offset), abs(self.high - self.offset)) / self.scale


def outside(
    mixed: Mixed, robot: int, state_scaling: Scaling, action_scaling: Scaling
) -> list[Outside]:
    """Distances of the training data of the mixture's n-th robot from its scales, one entry per dim
    of state and actions."""
    own = [n for n, feed in enumerate(mixed.feeds) if feed.embodiment == robot]
    embodiment, stats = mixed.embodiments[robot], mixed.stats[robot]
    features = (
        ("state", embodiment.state, stats.state, REACH[state_scaling]),
        ("action", embodiment.actions, stats.actions, REACH[action_scaling]),
    )
    blocks = shown_values(
        [mixed.feeds[n] for n in own], [mixed.training[n] for n in own], embodiment.relative
    )
    counts = [np.zeros(len(scale.offset)) for _, scale, _, _ in features]
    totals = [0, 0]
    for values in blocks:
        for n, (_, scale, _, reach) in enumerate(features):
            counts[n] += (np.abs(_units(values[n], scale)) > reach).sum(axis=0)
            totals[n] += len(values[n])
    found = []
    for n, (feature, scale, kept, reach) in enumerate(features):
        low, high = np.ravel(kept["min"]), np.ravel(kept["max"])
        farthest = np.maximum(*(np.abs(_units(x, scale)) for x in (low, high)))
        found += [
            Outside(
                robot=embodiment.name,
                feature=feature,
                dim=d,
                low=float(low[d]),
                high=float(high[d]),
                offset=scale.offset[d],
                scale=scale.scale[d],
                share=float(counts[n][d] / max(1, totals[n])),
                excess=float(max(0.0, farthest[d] - reach)),
                reach=reach,
            )
            for d in range(len(low))
        ]
    return found


def require_near(found: Sequence[Outside], where: str) -> None:
    """Refuses data with a dim more than `LARGEST` scale units from the middle of the statistics.

    Args:
      where: the statistics' file, for the message.

    Raises:
      ValueError: names each such dim, and the remedy.
    """
    if far := [x for x in found if x.farthest > LARGEST]:
        dims = "; ".join(
            f"{x.feature}[{x.dim}] of '{x.robot}' is {x.low:g}..{x.high:g} here, but "
            + (
                f"hardly changed there (around {x.offset:g})"
                if x.scale <= _CONSTANT * max(1.0, abs(x.offset))
                else f"{x.offset - x.reach * x.scale:g}..{x.offset + x.reach * x.scale:g} there"
            )
            + f", so it would reach {x.farthest:.3g} scale units"
            for x in far
        )
        raise ValueError(
            f"The statistics in {where} do not fit this data: {dims}. Leave these dims out (a "
            "mixture's columns or a transform), convert the data to the units of the statistics, "
            "or train without --statistics, on the data's own."
        )


_CONSTANT = 1e-5


def _units(x: np.ndarray, scale: Normalizer) -> Float64[np.ndarray, "*b d"]:
    return (np.asarray(x, np.float64) - np.asarray(scale.offset)) / np.asarray(scale.scale)
