"""Systematic sampling of a line on which each sample's length is its weight. The line is cut into
equal strata, and an epoch takes one point of each stratum, at the same place in all of them.

Over 2^k consecutive epochs, from a multiple of 2^k on, these points form a grid, so that each
sample is drawn as often as its weight says, rounded down or up. In between, draws are hardly less
even, because the places follow the sequence of van der Corput (1935). Integer arithmetic only, as
in `permutation`.
"""

import numpy as np
from jaxtyping import Float64, Int64, UInt64

_BITS = 60
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_SWAPS = (
    (1, 0x55555555),
    (2, 0x33333333),
    (4, 0x0F0F0F0F),
    (8, 0x00FF00FF),
    (16, 0x0000FFFF),
)


def whole_weights(
    weights: Float64[np.ndarray, " r"], samples: Int64[np.ndarray, " r"]
) -> Int64[np.ndarray, " r"]:
    """Weights, each of `samples` samples, as whole numbers in the same proportions, as exact as the
    bits of a sum below 2⁶⁰ allow."""
    room = _BITS - int(samples.sum()).bit_length()
    exponent = int(np.frexp(weights.max())[1])
    scaled = np.rint(np.ldexp(weights, room - exponent)).astype(np.int64)
    scaled = np.maximum(scaled, 1)
    return scaled // np.gcd.reduce(scaled)


def points(
    stratum: Int64[np.ndarray, " n"],
    epoch: Int64[np.ndarray, " n"],
    strata: Int64[np.ndarray, " n"],
    mass: Int64[np.ndarray, " n"],
    key: UInt64[np.ndarray, " n"],
) -> Int64[np.ndarray, " n"]:
    """Points that an epoch takes in these strata; `strata` of them make up a line of `mass`. If
    each stratum has a mass of 1, the point is the stratum's own number."""
    place = _reversed(epoch.astype(np.uint64) & _LOW) ^ key >> _HALF
    masses = mass.astype(np.uint64)
    within = place * (masses >> _HALF) + (place * (masses & _LOW) >> _HALF)
    least, more = np.divmod(mass, strata)
    return stratum * least + (stratum * more + within.astype(np.int64)) // strata


def _reversed(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Numbers below 2³² with their bits in the opposite order."""
    for width, mask in _SWAPS:
        by, kept = np.uint64(width), np.uint64(mask)
        x = (x >> by & kept) | (x & kept) << by
    return x
