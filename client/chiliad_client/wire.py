"""Messages of openpi's websocket protocol: msgpack maps whose arrays are maps of their own, with
the byte keys `__ndarray__`, `data`, `dtype` and `shape`, and `__npgeneric__` for numpy's scalars.
Chiliad's server also reads `__jpeg__` with `data`: an image as the bytes of a JPEG file.
"""

from __future__ import annotations

import io
from typing import Any, Callable, Mapping

import msgpack
import numpy as np

_KINDS = "biuf"


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
      ValueError: the bytes are not such a message.
    """
    try:
        message = msgpack.unpackb(data, object_hook=_unpacked)
    except ValueError as error:
        raise ValueError(f"it is not msgpack with arrays of numbers ({error})") from None
    if not isinstance(message, dict):
        raise ValueError(f"it is a {type(message).__name__}, not a map")
    return message


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
    if b"__ndarray__" not in content:
        return content
    try:
        dtype = np.dtype(content[b"dtype"])
        if dtype.kind not in _KINDS:
            raise TypeError(f"an array of {dtype}")
        return np.frombuffer(content[b"data"], dtype).reshape(content[b"shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"an array is malformed: {error}") from None
