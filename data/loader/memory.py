"""Memory of batches that is reused once nothing refers to it.

Fresh pages cost several times as much as copying the images into them. A batch may be kept, sliced
or put on a device (on the CPU, JAX then shares the memory), so Python's own reference count says
when memory is free.
"""

import math
from collections import deque

import numpy as np
from jaxtyping import Shaped, UInt8

_ALIGNMENT = 64  # what JAX requires of memory that it shares
_KEPT = 16


class BufferPool:
    """Lends arrays of one shape and dtype; may be called by any number of threads."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)

    def lend(self) -> Shaped[np.ndarray, "..."]:
        """An uninitialised array. Its memory is lent again when the array and everything made from
        it without copying are gone."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _aligned(math.prod(self._shape) * self._dtype.itemsize)
        return np.asarray(_Loan(memory, self._free)).view(self._dtype).reshape(self._shape)

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...], type[np.generic]]]:
        return BufferPool, (self._shape, self._dtype.type)


class _Loan:
    """Base of a lent array and of its views."""

    def __init__(self, memory: np.ndarray, free: deque[np.ndarray]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


def _aligned(size: int) -> UInt8[np.ndarray, " n"]:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]
