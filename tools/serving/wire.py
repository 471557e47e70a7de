"""Messages of openpi's websocket protocol: msgpack maps whose arrays are maps of their own, with
the byte keys `__ndarray__`, `data`, `dtype` and `shape`; `__npgeneric__` marks numpy's scalars.
`__jpeg__`, which openpi's protocol lacks, marks a picture as the bytes of a JPEG file.

Follows openpi-client 0.1.2's `msgpack_numpy`. A message may come from anyone, so reading one never
unpickles, makes no array that is larger than its bytes, and ends when a limit is exceeded.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import msgpack
import numpy as np
import simplejpeg

_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
_CONTAINERS, _LENGTH, _KEY, _DIMS, _DEPTH = 256, 256, 256, 4, 4
"""Limits: maps and lists in a message, entries of each, characters of a key, dims of an array, and
maps within maps."""
_DECODED, _SIDE = 64 * 2**20, 8192
"""Limits: decoded bytes of a message's JPEG pictures, and pixels along one of their edges."""
_NEITHER = (b"nd", b"complex", "__ndarray__", "__npgeneric__")
"""Keys of arrays as the package msgpack-numpy writes them, and of openpi's as text."""
PICTURES = ("raw", "jpeg")
"""Kinds of pictures that are read, as reported to clients."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message with numpy arrays and scalars among its values.

    Raises:
      ValueError: an array is not of bools, whole or floating-point numbers.
    """
    return msgpack.packb(message, default=_packed)


def unpack(data: bytes) -> dict[str, Any]:
    """Inverse of `pack`; arrays are read-only. Numpy's scalars become Python's.

    Raises:
      ValueError: these bytes are no such message; says what is wrong in one sentence.
    """
    reading = _Reading()
    try:
        message = msgpack.unpackb(
            data,
            object_hook=reading.map,
            list_hook=reading.list,
            max_array_len=_LENGTH,
            max_map_len=_LENGTH,
            max_ext_len=0,
        )
    except msgpack.StackError:
        raise ValueError("The message nests its maps or lists too deeply.") from None
    except msgpack.FormatError:
        raise ValueError("The message is not msgpack.") from None
    except msgpack.ExtraData:
        raise ValueError("The message has data after its end; send one map.") from None
    except ValueError as error:
        raise ValueError(f"The message cannot be read: {error}") from None
    if not isinstance(message, dict):
        raise ValueError(f"The message is a {type(message).__name__}; send a map with text keys.")
    _check_keys(message, 1)
    return message


class _Reading:
    """Counts what is read of one message: few bytes must not become many or large objects."""

    def __init__(self) -> None:
        self.containers = self.decoded = 0

    def map(self, content: dict[Any, Any]) -> Any:
        self._count()
        if any(key in content for key in _NEITHER):
            raise ValueError(
                "its arrays are msgpack-numpy's, or their keys are text; pack them with "
                "chiliad_client or openpi_client.msgpack_numpy, as maps with the byte keys "
                "__ndarray__ (true), data, dtype and shape."
            )
        if b"__ndarray__" in content:
            return _array(content)
        if b"__npgeneric__" in content:
            return _scalar(content)
        if b"__jpeg__" in content:
            return self._picture(content.get(b"data"))
        return content

    def list(self, content: list[Any]) -> list[Any]:
        self._count()
        return content

    def _picture(self, data: Any) -> np.ndarray:
        """A JPEG's pixels, uint8 [h, w, 3]."""
        if not isinstance(data, bytes):
            raise ValueError("a JPEG's data is not binary.")
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            self.decoded += height * width * 3
            if max(height, width) > _SIDE or self.decoded > _DECODED:
                raise ValueError(
                    f"its JPEG images have over {_SIDE} pixels a side or {_DECODED} bytes when "
                    "decoded."
                )
            return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError as error:
            raise ValueError(f"a JPEG image was refused: {error}") from None

    def _count(self) -> None:
        self.containers += 1
        if self.containers > _CONTAINERS:
            raise ValueError(f"it has more than {_CONTAINERS} maps and lists.")


def _check_keys(content: dict[Any, Any], depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"The message nests maps more than {_DEPTH} deep.")
    for key, value in content.items():
        if not isinstance(key, str) or len(key) > _KEY or not key.isprintable():
            raise ValueError(
                f"The message has the key {key!r:.40}; keys are printable text of at most {_KEY} "
                "characters."
            )
        if isinstance(value, dict):
            _check_keys(value, depth + 1)


def _array(content: dict[Any, Any]) -> np.ndarray:
    data, shape = content.get(b"data"), content.get(b"shape")
    dtype = _dtype(content.get(b"dtype"))
    if not isinstance(data, bytes):
        raise ValueError("an array's data is not binary.")
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError("an array's shape is not a list of positive whole numbers.")
    if len(shape) > _DIMS:
        raise ValueError(f"an array has {len(shape)} dims; at most {_DIMS} are allowed.")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(
            f"an array of {dtype} {shape!s:.80} does not have the {len(data)} bytes that came."
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _scalar(content: dict[Any, Any]) -> bool | int | float:
    value = content.get(b"data")
    _dtype(content.get(b"dtype"))
    if not isinstance(value, bool | int | float):
        raise ValueError("a numpy scalar is not a number.")
    return value


def _dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or not _NUMBERS.fullmatch(name):
        raise ValueError(
            f"an array has the dtype {name!r:.40}; expected booleans, integers or "
            "floating-point numbers, such as '|u1' and '<f4'."
        )
    return np.dtype(name)


def _packed(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf":
        kind = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"A message cannot hold {kind}, only numbers, text and maps of them.")
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": value.shape,
    }
