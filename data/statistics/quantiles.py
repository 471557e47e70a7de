"""Exact quantiles of any number of values in constant memory, by counting digits (radix selection).

Numbers map to unsigned integers of the same order. A pass over the data counts 16 of their bits,
which tells in which of 65,536 intervals each wanted value lies, and the next pass counts 16 more
bits of only the values in those intervals. float32 takes two passes, and there is no error from a
sketch or histogram.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np
from jaxtyping import Float64, Int64, Shaped

Counted = list[dict[int, tuple[Int64[np.ndarray, " _m"], Int64[np.ndarray, " _m"]]]]
"""By dimension and interval, digits that occur and how often."""

_BITS = 16


class OrderStatistics:
    """The k-th smallest values of every dimension. Call `add` for all blocks, then `narrow`, and
    repeat until `found`; the results are then `values`.

    Args:
      low: the smallest value of each dimension.
      high: the largest.
      ranks: the ranks of these values, counted from 0.
    """

    def __init__(
        self, low: Shaped[np.ndarray, " d"], high: Shaped[np.ndarray, " d"], ranks: Sequence[int]
    ) -> None:
        self._dtype, self._base = low.dtype, _keys(low)
        width = int((_keys(high) - self._base).max()).bit_length()
        self._digits = -(-width // _BITS)
        self._left = self._digits
        self._prefixes = [[0] * len(ranks) for _ in low]
        self._ranks = [list(ranks) for _ in low]
        self._counts = self._counters()

    @property
    def found(self) -> bool:
        """True if no further pass is needed."""
        return self._left == 0

    @property
    def values(self) -> Shaped[np.ndarray, "d k"]:
        """Values of the ranks asked for, of the data's type."""
        keys = np.array(self._prefixes, self._base.dtype) + self._base[:, None]
        return _numbers(keys, self._dtype)

    def add(self, block: Shaped[np.ndarray, "d n"]) -> None:
        """Counts a block of the values; each block must come once between two calls of `narrow`."""
        keys = (_keys(block) - self._base[:, None]) >> _BITS * (self._left - 1)
        for key, counters in zip(keys, self._counts, strict=True):
            digit = key.astype(np.uint16)
            above = key >> _BITS if self._left < self._digits else None
            for prefix, count in counters.items():
                inside = digit if above is None else digit[above == prefix]
                count += np.bincount(inside, minlength=len(count))

    def fresh(self) -> "OrderStatistics":
        """A copy with nothing counted yet, to count some of the blocks elsewhere."""
        other = copy(self)
        other._counts = self._counters()
        return other

    @property
    def counted(self) -> Counted:
        """Counts of this pass that are not 0, compact to send."""
        return [{p: _sparse(count) for p, count in counters.items()} for counters in self._counts]

    def take(self, counted: Counted) -> None:
        """Adds the counts of other blocks."""
        for counters, others in zip(self._counts, counted, strict=True):
            for prefix, (at, count) in others.items():
                counters[prefix][at] += count

    def narrow(self) -> None:
        """Ends a pass: one more digit of each value is known."""
        for prefixes, wanted, counters in zip(
            self._prefixes, self._ranks, self._counts, strict=True
        ):
            cumulative = {prefix: count.cumsum() for prefix, count in counters.items()}
            for i, (prefix, rank) in enumerate(zip(prefixes, wanted, strict=True)):
                digit = int(np.searchsorted(cumulative[prefix], rank, "right"))
                prefixes[i] = (prefix << _BITS) + digit
                wanted[i] = rank - int(cumulative[prefix][digit] - counters[prefix][digit])
        self._left -= 1
        self._counts = self._counters()

    def _counters(self) -> list[dict[int, Int64[np.ndarray, " _digits"]]]:
        """Counters per dimension, for every interval that holds a value not yet found."""
        zeros = 0 if self.found else 1 << _BITS
        return [{p: np.zeros(zeros, np.int64) for p in set(ps)} for ps in self._prefixes]


def _sparse(
    count: Int64[np.ndarray, " digits"],
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    at = np.flatnonzero(count)
    return at, count[at]


def ranks(count: int, quantiles: Sequence[float]) -> list[int]:
    """Ranks in `count` sorted values between which the quantiles lie: two for each."""
    at = np.array(quantiles) * (count - 1)
    below = np.floor(at).astype(np.int64)
    return np.stack([below, np.minimum(below + 1, count - 1)], axis=1).ravel().tolist()


def interpolate(
    values: Shaped[np.ndarray, "d k2"], count: int, quantiles: Sequence[float]
) -> Float64[np.ndarray, "k d"]:
    """Quantiles from the values at `ranks`, linear in between as np.quantile's default."""
    below, above = np.moveaxis(values.astype(np.float64).reshape(len(values), -1, 2), 2, 0)
    at = np.array(quantiles) * (count - 1)
    part, step = at - np.floor(at), above - below
    return np.where(part < 0.5, below + step * part, above - step * (1 - part)).T


def _keys(x: Shaped[np.ndarray, "*n"]) -> Shaped[np.ndarray, "*n"]:
    """Unsigned integers in the same order as these numbers, and as many bits; 0 and -0 are one."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    top = unsigned.type(1 << (8 * x.dtype.itemsize - 1))
    if x.dtype.kind == "f":
        bits = (x + x.dtype.type(0)).view(unsigned)
        return np.where(bits >= top, ~bits, bits | top)
    bits = x.view(unsigned)
    return bits ^ top if x.dtype.kind == "i" else bits


def _numbers(keys: Shaped[np.ndarray, "*n"], dtype: np.dtype) -> Shaped[np.ndarray, "*n"]:
    """The numbers of these keys."""
    top = keys.dtype.type(1 << (8 * dtype.itemsize - 1))
    if dtype.kind == "f":
        keys = np.where(keys >= top, keys ^ top, ~keys)
    return (keys ^ top if dtype.kind == "i" else keys).view(dtype)
