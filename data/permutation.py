"""Random orders of any number of things in no memory: a keyed bijection on 0..n-1, computed where
asked.

A Feistel network over a grid just larger than n, walked until it lands below n, after Black and
Rogaway (CT-RSA 2002). Integer arithmetic only, so every machine and numpy version gives the same
order.
"""

from math import isqrt

import numpy as np
from jaxtyping import Int64, UInt64

_ROUNDS = 6
_MASK = (1 << 64) - 1


def fold(*parts: int) -> int:
    """A 64-bit key from integers, different for every tuple of them (up to chance)."""
    key = np.array([0x9E3779B97F4A7C15], np.uint64)
    for part in parts:
        key = scramble(key ^ np.uint64(part & _MASK), 0x632BE59BD9B4E019)
    return int(key[0])


def permute(index: Int64[np.ndarray, "n"], size: int, key: int) -> Int64[np.ndarray, "n"]:
    """Where `index` (each in 0..size-1) goes in the key's permutation of 0..size-1."""
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    keys = [fold(key, number) for number in range(_ROUNDS)]
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        out[walking] = _feistel(out[walking], columns, rows, keys)
        walking = walking[out[walking] >= size]
    return out.astype(np.int64)


def shuffled(size: int, key: int) -> Int64[np.ndarray, "n"]:
    """0..size-1 in the key's order, for sizes that fit in memory."""
    return np.argsort(scramble(np.arange(size, dtype=np.uint64), key), kind="stable")


def _feistel(
    x: UInt64[np.ndarray, "n"], columns: int, rows: int, keys: list[int]
) -> UInt64[np.ndarray, "n"]:
    left, right = np.divmod(x, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + scramble(right, key) % np.uint64(rows)) % np.uint64(rows)
        else:
            right = (right + scramble(left, key) % np.uint64(columns)) % np.uint64(columns)
    return left * np.uint64(columns) + right


def scramble(x: UInt64[np.ndarray, "n"], key: int) -> UInt64[np.ndarray, "n"]:
    """The splitmix64 finaliser of x and key."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
