"""Order of a step's rows in which attention costs about the same for every rank's share of them.

Rows are equally long, but attention skips the tokens of other samples. A row therefore costs the
sum of its samples' squared lengths, and all ranks wait for the one with the highest cost. Squared
length as the cost, and balancing each rank's sum, are from FlexSP (arXiv 2412.01523), ByteScale
(arXiv 2502.21231) and Zeppelin (arXiv 2509.21841), which move sequences between ranks in training;
here the plan knows all lengths, so rows are arranged in advance. The costliest are joined with the
cheapest, and the results again, until there is a block for each rank (the longest job goes to the
least busy, Graham 1969, doi.org/10.1137/0117039, with equally many to each); then blocks exchange
rows.
"""

import numpy as np
from jaxtyping import Int, Int64

_ROUNDS = 16
_LARGE = 64


def balanced_order(costs: Int[np.ndarray, " r"], ranks: int) -> Int64[np.ndarray, " r"]:
    """An order of rows in which `ranks` blocks of equally many rows cost nearly the same."""
    order, sums = np.arange(len(costs))[:, None], costs
    for factor in _factors(len(costs) // ranks):
        ranked = np.argsort(-sums, kind="stable").reshape(factor, -1)
        joined, sums_joined = order[ranked[0]], sums[ranked[0]]
        for others in ranked[1:]:
            least = np.argsort(sums_joined, kind="stable")
            joined = np.concatenate([joined[least], order[others]], axis=1)
            sums_joined = sums_joined[least] + sums[others]
        order, sums = joined, sums_joined
    if ranks > 1 and order.shape[1] <= _LARGE:
        _exchange(costs, order)
    return order.ravel()


def excess(costs: Int[np.ndarray, " r"], ranks: int) -> float:
    """Relative excess of the costliest of `ranks` blocks of rows over their mean cost."""
    sums = costs.reshape(ranks, -1).sum(axis=1)
    return float(sums.max() / sums.mean() - 1) if sums.any() else 0.0


def _exchange(costs: Int[np.ndarray, " r"], blocks: Int64[np.ndarray, "n b"]) -> None:
    """Pairs the costliest block with the cheapest, the second costliest with the second cheapest
    and so on. In several rounds, each pair swaps the two rows that bring their costs closest
    together."""
    half, size = len(blocks) // 2, blocks.shape[1]
    for _ in range(_ROUNDS):
        own = costs[blocks]
        sums = own.sum(axis=1)
        ranked = np.argsort(-sums, kind="stable")
        high, low = ranked[:half], ranked[::-1][:half]
        gaps = sums[high] - sums[low]
        moved = 2 * (own[high][:, :, None] - own[low][:, None, :])
        left = np.abs(gaps[:, None, None] - moved).reshape(half, -1)
        best = left.argmin(axis=1)
        better = left[np.arange(half), best] < gaps
        if not better.any():
            return
        high, low, (give, take) = high[better], low[better], np.divmod(best[better], size)
        blocks[high, give], blocks[low, take] = blocks[low, take], blocks[high, give]


def _factors(number: int) -> list[int]:
    """Prime factors, the twos last."""
    found, divisor = list[int](), 3
    odd = number // (number & -number)
    while odd > 1:
        if odd % divisor == 0:
            odd //= divisor
            found.append(divisor)
        else:
            divisor += 2
    return found + [2] * ((number & -number).bit_length() - 1)
