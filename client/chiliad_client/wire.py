"""Messages of openpi's websocket protocol: msgpack maps whose arrays are maps of their own, with
the byte keys `__ndarray__`, `data`, `dtype` and `shape`, and `__npgeneric__` for numpy's scalars.
Chiliad's server also reads `__jpeg__` with `data`: an image as the bytes of a JPEG file.

The other side may be anyone's: a message is counted while it is read, within the limits that
Chiliad's server has too, and its text is `harmless` before it is shown.
"""

from __future__ import annotations

import io
import re
from typing import Any, Callable, Mapping

import msgpack
import numpy as np

_KINDS = "biuf"
_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
LARGEST = 16 * 2**20
"""Largest message that is read, in bytes."""
_CONTAINERS, _ENTRIES, _KEYS, _DEPTH = 256, 10_000, 256, 4
"""Limits: maps and lists in a message, entries of a list and of a map, and maps within maps."""
_NEITHER = (b"nd", b"complex", "__ndarray__", "__npgeneric__")
"""Keys of arrays as the package msgpack-numpy writes them, and of openpi's as text."""


def pack(message: Mapping[str, Any], jpeg: int | None = None) -> bytes:
    """Encodes a message that may contain numpy arrays and scalars. With `jpeg`, 1 to 100, uint8
    images [h, w, 3] are sent as JPEG of that quality.

    Raises:
      ValueError: an array holds anything but bools, integers or floating-point numbers.
      ImportError: neither simplejpeg nor pillow is installed.
    """
    encode = None if jpeg is None else encoder()

    def packed(value: Any) -> Any:
        if encode is not None and is_picture(value):
            return {b"__jpeg__": True, b"data": encode(value, jpeg)}
        return _packed(value)

    return msgpack.packb(message, default=packed)


def unpack(data: bytes) -> dict[str, Any]:
    """Inverse of `pack` without `jpeg`; arrays are read-only. Nothing is ever unpickled.

    Raises:
      ValueError: the bytes are not such a message, or exceed a limit.
    """
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data)} bytes, more than {LARGEST}")
    count = 0

    def counted(content: Any) -> Any:
        nonlocal count
        count += 1
        if count > _CONTAINERS:
            raise ValueError(f"more than {_CONTAINERS} maps and lists")
        return _unpacked(content) if isinstance(content, dict) else content

    try:
        message = msgpack.unpackb(
            data,
            object_hook=counted,
            list_hook=counted,
            max_array_len=_ENTRIES,
            max_map_len=_KEYS,
            max_ext_len=0,
        )
    except ValueError as error:
        why = str(error) or type(error).__name__
        raise ValueError(f"it is not msgpack with arrays of numbers ({harmless(why)})") from None
    if not isinstance(message, dict):
        raise ValueError(f"it is a {type(message).__name__}, not a map")
    _check_keys(message, 1)
    return message


def harmless(text: str) -> str:
    r"""The text with control characters, except tabs and newlines, spelled out (`\x1b`), so that it
    can do nothing at a terminal."""
    return "".join(
        c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text
    )


def encoder() -> Callable[[np.ndarray, int | None], bytes]:
    """Encoder of images uint8 [h, w, 3] as JPEG of a given quality, by simplejpeg or else pillow.

    Raises:
      ImportError: neither is installed.
    """
    try:
        import simplejpeg

        return lambda picture, quality: simplejpeg.encode_jpeg(
            np.ascontiguousarray(picture), quality or 90, "RGB", "420"
        )
    except ImportError:
        pass
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            "JPEG needs simplejpeg or pillow: pip install 'chiliad-client[jpeg]', or use jpeg=None."
        ) from None

    def by_pillow(picture: np.ndarray, quality: int | None) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(picture)).save(file, "JPEG", quality=quality or 90)
        return file.getvalue()

    return by_pillow


def _check_keys(content: Mapping[Any, Any], depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"it nests maps more than {_DEPTH} deep")
    for key, value in content.items():
        if not isinstance(key, str) or not key.isprintable():
            raise ValueError(f"it has the key {key!r:.40}, which is not printable text")
        if isinstance(value, dict):
            _check_keys(value, depth + 1)


def is_picture(value: Any) -> bool:
    """True for an image that can be JPEG: uint8 [h, w, 3]."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[2] == 3
    )


def _packed(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in _KINDS:
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


def _unpacked(content: dict[Any, Any]) -> Any:
    if b"__npgeneric__" in content:
        return content.get(b"data")
    if any(key in content for key in _NEITHER):
        raise ValueError(
            "its arrays are msgpack-numpy's, or their keys are text; openpi's are maps with the "
            "byte keys __ndarray__, data, dtype and shape"
        )
    if b"__ndarray__" not in content:
        return content
    dtype = content.get(b"dtype")
    try:
        if not isinstance(dtype, str) or not _NUMBERS.fullmatch(dtype):
            raise TypeError(f"its dtype is {dtype!r:.40}")
        return np.frombuffer(content[b"data"], dtype).reshape(content[b"shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an array is malformed: {error}") from None
