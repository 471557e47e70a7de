"""`tf.train.Example` messages without TensorFlow: features, found without reading all of them.

Every level of the message is length-prefixed, so a feature is found by hopping over the others,
and its numbers are one buffer for numpy. Written after tensorflow/core/example/feature.proto and
the protocol buffers wire format.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float32, Int64

Read = Callable[[int, int], bytes]
"""Gives `n` bytes of a message from an offset: `read(offset, n)`."""


def feature_spans(read: Read, size: int) -> dict[str, tuple[int, int]]:
    """Offset and size of every feature of an Example of `size` bytes, by key.

    Raises:
      ValueError: this is no Example.
    """
    spans = {}
    for _, start, end in _fields(read, 0, size):
        for _, first, last in _fields(read, start, end):
            entry = {number: (at, to - at) for number, at, to in _fields(read, first, last)}
            if not {1, 2} <= set(entry):
                raise ValueError(
                    f"not a tf.train.Example (the feature at byte {first} has no name)"
                )
            spans[read(*entry[1]).decode()] = entry[2]
    return spans


def feature_values(
    feature: bytes,
) -> list[bytes] | Float32[np.ndarray, " n"] | Int64[np.ndarray, " n"]:
    """All values of one feature end to end; an empty list if it has none.

    Raises:
      ValueError: this is no Feature.
    """

    def read(offset: int, size: int) -> bytes:
        return feature[offset : offset + size]

    for kind, start, end in _fields(read, 0, len(feature)):
        if kind == _BYTES:
            return [feature[at:to] for _, at, to in _fields(read, start, end)]
        if kind == _FLOATS:
            return np.frombuffer(_packed(feature[start:end]), "<f4")
        if kind == _INTS:
            return _varints(_packed(feature[start:end]))
    return []


_BYTES, _FLOATS, _INTS = 1, 2, 3  # field numbers of the lists in a Feature
_VARINT, _DELIMITED, _FIXED32 = 0, 2, 5  # wire types
_LONGEST = 10  # bytes of a varint


def _fields(read: Read, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each length-prefixed field of a message at [start, end)."""
    while start < end:
        header = read(start, min(2 * _LONGEST, end - start))
        tag, at = _varint(header, 0)
        size, at = _varint(header, at)
        at += start
        if tag & 7 != _DELIMITED or at + size > end:
            raise ValueError(f"not a tf.train.Example (its field at byte {start} is broken)")
        yield tag >> 3, at, at + size
        start = at + size


def _varint(buffer: bytes, at: int) -> tuple[int, int]:
    """The number that starts at `at`, and where it ends."""
    value = 0
    for place, byte in enumerate(buffer[at : at + _LONGEST]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("not a tf.train.Example (a number in it has no end)")


def _packed(numbers: bytes) -> bytes:
    """The values of a list of numbers, whether it was written packed or each with its tag."""
    parts, at = [], 0
    while at < len(numbers):
        tag, at = _varint(numbers, at)
        size = {_FIXED32: 4}.get(tag & 7)
        if tag & 7 == _DELIMITED:
            size, at = _varint(numbers, at)
        elif tag & 7 == _VARINT:
            size = _varint(numbers, at)[1] - at
        if size is None or at + size > len(numbers):
            raise ValueError("not a tf.train.Example (a list of numbers in it is cut off)")
        parts.append(numbers[at : at + size])
        at += size
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _varints(data: bytes) -> Int64[np.ndarray, " n"]:
    """Numbers of seven bits a byte, the low ones first; the last byte of each is below 128."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if raw[-1] >= 0x80 or sizes.max() > _LONGEST:
        raise ValueError("not a tf.train.Example (a number in it has no end)")
    place = np.arange(len(raw)) - np.repeat(starts, sizes)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)
