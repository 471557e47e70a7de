"""Random orders of any number of items without storing them: a keyed bijection on 0..n-1, computed
on demand.

A Feistel network over a grid just larger than n, walked until it lands below n, after Black and
Rogaway (CT-RSA 2002). Integer arithmetic only, so every machine and numpy version gives the same
order.
"""

import numpy as np
from jaxtyping import Int64, UInt64

_ROUNDS = 6
_HALF = np.uint64(32)
_MASK = (1 << 64) - 1


def fold(*parts: int) -> int:
    """A 64-bit key from integers, different for every tuple of them (up to chance)."""
    key = np.array([0x9E3779B97F4A7C15], np.uint64)
    for part in parts:
        key = scramble(key ^ np.uint64(part & _MASK), 0x632BE59BD9B4E019)
    return int(key[0])


def scramble(
    x: UInt64[np.ndarray, "*n"], key: int | UInt64[np.ndarray, "*n"]
) -> UInt64[np.ndarray, "*n"]:
    """A random-looking 64-bit number for every x and key: the splitmix64 finaliser."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.asarray(key, np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def below(
    bits: UInt64[np.ndarray, "*n"], bound: UInt64[np.ndarray, "*n"]
) -> UInt64[np.ndarray, "*n"]:
    """Random 64-bit numbers as numbers in 0..bound-1, for bounds below 2³²."""
    return ((bits >> _HALF) * bound) >> _HALF


def permute(
    index: Int64[np.ndarray, " n"],
    size: int | Int64[np.ndarray, " n"],
    key: int | UInt64[np.ndarray, " n"],
) -> Int64[np.ndarray, " n"]:
    """Image of `index` (each in 0..size-1) under the key's permutation of 0..size-1; each index may
    have its own size and key. Sizes up to 2⁶²."""
    sizes = np.broadcast_to(np.asarray(size, np.uint64), index.shape)
    keys = np.broadcast_to(np.asarray(key, np.uint64), index.shape)
    columns = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    rows = (sizes + columns - np.uint64(1)) // columns
    out = _feistel(index.astype(np.uint64), columns, rows, keys)
    walking = np.flatnonzero(out >= sizes)
    while len(walking):
        out[walking] = _feistel(out[walking], columns[walking], rows[walking], keys[walking])
        walking = walking[out[walking] >= sizes[walking]]
    return out.astype(np.int64)


def shuffled(size: int, key: int) -> Int64[np.ndarray, " n"]:
    """0..size-1 in the key's order, for sizes that fit in memory."""
    return np.argsort(scramble(np.arange(size, dtype=np.uint64), key), kind="stable")


def grouped(group: Int64[np.ndarray, " n"], key: int) -> Int64[np.ndarray, " n"]:
    """The order of 0..n-1 in which `group` (not negative) ascends; within a group, the key's
    order."""
    bits, high = len(group).bit_length(), 64 - int(group.max()).bit_length()
    place = np.arange(len(group), dtype=np.uint64)
    chance = scramble(place, key) << np.uint64(64 - high + bits) >> np.uint64(64 - high)
    code = np.sort(group.astype(np.uint64) << np.uint64(high) | chance | place)
    return (code & np.uint64((1 << bits) - 1)).astype(np.int64)


def _feistel(
    x: UInt64[np.ndarray, " n"],
    columns: UInt64[np.ndarray, " n"],
    rows: UInt64[np.ndarray, " n"],
    keys: UInt64[np.ndarray, " n"],
) -> UInt64[np.ndarray, " n"]:
    left = x // columns
    right = x - left * columns
    for number in range(_ROUNDS):
        keys = keys + np.uint64(0xD1B54A32D192ED03)
        if number % 2 == 0:
            left += below(scramble(right, keys), rows)
            left -= rows * (left >= rows)
        else:
            right += below(scramble(left, keys), columns)
            right -= columns * (right >= columns)
    return left * columns + right
