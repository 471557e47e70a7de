"""Copies between arrays whose axes lie in memory in different orders, by tiles that stay in cache.

numpy copies such arrays entry by entry along rows that are thousands of bytes apart. If a tile of
rows is first gathered into a small buffer, every line of memory is touched only once.
"""

import numpy as np
from jaxtyping import Shaped

_TILE = 64


def copy_into(out: Shaped[np.ndarray, "*s"], x: Shaped[np.ndarray, "*s"]) -> None:
    """`out[...] = x`, cast to the dtype of `out`."""
    last = x.ndim - 1
    fast = min(range(x.ndim), key=lambda i: (x.shape[i] == 1, abs(x.strides[i])), default=last)
    if fast == last or x.size < _TILE**2:
        out[...] = x
        return
    at = [slice(None)] * x.ndim
    for i in range(0, x.shape[fast], _TILE):
        at[fast] = slice(i, i + _TILE)
        for j in range(0, x.shape[last], _TILE):
            at[last] = slice(j, j + _TILE)
            out[tuple(at)] = x[tuple(at)].astype(out.dtype, order="K")
