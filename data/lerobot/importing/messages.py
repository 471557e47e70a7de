"""Reads numbers, images and times from decoded messages, whatever decoded them: ROS 1 and 2,
protobuf (Foxglove's) or JSON.

A field is named by its path, as in `position`, `pose.orientation` or `data.3`.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from data.errors import short
from data.files.limits import require_pixels
from data.lerobot.importing.clock import SECOND
from data.video.still_images import decode_picture

_PARTS = ("x", "y", "z", "w")
"""Fields of a point, vector or quaternion, which is read as a whole."""
_JOINTS = ("position", "velocity", "effort")
_CHANNELS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "8UC3": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
    "mono8": (1, (0, 0, 0)),
    "8UC1": (1, (0, 0, 0)),
}
"""Number of channels stored in each encoding, and the indices of red, green and blue among them."""


def numbers(message: Any, path: str, names: Sequence[str] | None) -> np.ndarray:
    """The values of a field, [n]. For a JointState's position, velocity or effort: the values of
    the joints `names`, if given.

    Raises:
      ValueError: there is no such field, it holds no numbers, or a joint is not in it.
    """
    value, joints = field(message, path), joint_order(message, path)
    if joints and names is not None:
        values = list(value)
        if missing := [name for name in names if name not in joints]:
            raise ValueError(f"has no joint '{missing[0]}', only {short(joints)}")
        if len(values) < len(joints):
            raise ValueError(f"has {len(values)} values of '{path}' for {len(joints)} joints")
        value = [values[joints.index(name)] for name in names]
    if not isinstance(value, str | bytes) and _has(value, "x") and _has(value, "y"):
        value = [_get(value, part) for part in _PARTS if _has(value, part)]
    found = np.asarray(value)
    if found.dtype.kind not in "fiub" or found.ndim > 1 or not found.size:
        raise ValueError(f"has {short(value)} at '{path}', but numbers are needed")
    return found.reshape(-1)


def joint_order(message: Any, path: str) -> list[str]:
    """Names of the joints in a JointState's position, velocity or effort, in their order there;
    none for any other field."""
    parent = field(message, path.rpartition(".")[0]) if "." in path else message
    joints = path.rpartition(".")[2] in _JOINTS and _has(parent, "name")
    return [str(name) for name in _get(parent, "name")] if joints else []


def field(message: Any, path: str) -> Any:
    """Value at a path.

    Raises:
      ValueError: there is no such field; lists the fields that exist.
    """
    value = message
    for part in path.split("."):
        if part.isdecimal() and isinstance(value, Sequence | np.ndarray):
            if int(part) >= len(value):
                raise ValueError(f"has only {len(value)} values, so none at '{part}' of '{path}'")
            value = value[int(part)]
        elif _has(value, part):
            value = _get(value, part)
        else:
            raise ValueError(f"has no field '{part}' of '{path}', only {_fields(value)}")
    return value


def picture(message: Any) -> UInt8[np.ndarray, "h w 3"]:
    """RGB image of a ROS Image or CompressedImage, or of Foxglove's RawImage or CompressedImage.

    Raises:
      ValueError: it is another message, or its encoding is not supported.
    """
    if _has(message, "encoding") and _has(message, "step"):
        return _raw_picture(message)
    if not (_has(message, "format") and _has(message, "data")):
        raise ValueError(f"is not an image; it has {_fields(message)}")
    form = str(_get(message, "format"))
    _require_colour(form)
    try:
        return decode_picture(_bytes(_get(message, "data")), ("JPEG", "PNG", "WEBP"))
    except ValueError as error:
        raise ValueError(
            f"holds an image of format {short(form)}, which cannot be read as JPEG, PNG or WebP "
            f"({error})"
        ) from None


def header_time(message: Any) -> int:
    """Nanoseconds of the message's header (ROS), or of its timestamp (Foxglove).

    Raises:
      ValueError: it has neither.
    """
    for path in ("header.stamp", "timestamp"):
        try:
            stamp = field(message, path)
        except ValueError:
            continue
        for seconds, rest in (("sec", "nanosec"), ("seconds", "nanos"), ("sec", "nsec"),
                              ("secs", "nsecs")):  # fmt: skip
            if _has(stamp, seconds) and _has(stamp, rest):
                return int(_get(stamp, seconds)) * SECOND + int(_get(stamp, rest))
    raise ValueError('has no header with a time; leave "clock": "header" out of the layout')


def _raw_picture(message: Any) -> UInt8[np.ndarray, "h w 3"]:
    encoding = str(_get(message, "encoding"))
    _require_colour(encoding)
    if encoding not in _CHANNELS:
        raise ValueError(
            f"holds an image of encoding '{encoding}'; only {', '.join(_CHANNELS)} can be read"
        )
    stored, order = _CHANNELS[encoding]
    height, width = int(_get(message, "height")), int(_get(message, "width"))
    require_pixels(width, height)
    step, content = int(_get(message, "step")), _bytes(_get(message, "data"))
    if step < width * stored or len(content) < step * height or not height * width:
        raise ValueError(
            f"claims to hold {width}x{height} pixels in rows of {step} bytes, but has "
            f"{len(content)} bytes"
        )
    rows = np.frombuffer(content, np.uint8, step * height).reshape(height, step)
    return rows[:, : width * stored].reshape(height, width, stored)[..., list(order)]


def _require_colour(encoding: str) -> None:
    """Raises ValueError for an encoding of depth: ROS's names of types of more than 8 bits with one
    channel, of which a CompressedImage's `format` begins with one."""
    if re.match(r"(16U|16S|32S|32F|64F)C1|mono16|.*compressedDepth", encoding):
        raise ValueError(f"holds depth ({short(encoding)}), not an image in colour")


def _bytes(value: Any) -> bytes:
    """Bytes; JSON holds them as base64."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except ValueError:
            raise ValueError("holds its bytes as text that is not base64") from None
    return value.tobytes() if isinstance(value, np.ndarray) else bytes(value)


def _has(value: Any, name: str) -> bool:
    if isinstance(value, Mapping):
        return name in value
    return not name.startswith("_") and hasattr(value, name)


def _get(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def _fields(value: Any) -> str:
    if isinstance(value, Mapping):
        return short(sorted(value))
    descriptor = getattr(value, "DESCRIPTOR", None)  # of protobuf
    if descriptor is not None:
        return short([one.name for one in descriptor.fields])
    names = getattr(value, "__dataclass_fields__", None) or getattr(value, "__slots__", None)
    return short(sorted(n for n in names if n[:1] != "_")) if names else short(value)
