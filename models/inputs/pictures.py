"""Pictures of any size fitted to the square that a model sees, each way that released policies were
trained: openpi's (Pillow), and LeRobot's (torch's `interpolate`).

The ways differ by several grey levels at edges, which a policy answers with other actions.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Shaped, UInt8
from PIL import Image

Resize = Literal["antialiased", "bilinear", "bilinear-dark"]
"""Pillow's bilinear filter, which averages where it shrinks; torch's, which reads four pixels; and
the latter with borders of −255 instead of black (LeRobot before 0.5.0)."""


def fit(
    image: Shaped[np.ndarray, "_h _w 3"], size: int, resize: Resize
) -> UInt8[np.ndarray, "s s 3"] | Float32[np.ndarray, "s s 3"]:
    """Picture in the middle of a square of `size`, keeping the aspect; as floats from 0 to 255
    where `resize` does not round."""
    if resize == "antialiased":
        return resize_with_pad(image, size)
    border = -255.0 if resize == "bilinear-dark" else 0.0
    return _in_the_middle(_bilinear(image, *_fitted(image, size)), size, border)


def resize_with_pad(image: Shaped[np.ndarray, "_h _w 3"], size: int) -> UInt8[np.ndarray, "s s 3"]:
    """Bilinear resize to fit a black square of `size`, keeping the aspect (as openpi does)."""
    if image.shape[:2] == (size, size):
        return image
    high, wide = _fitted(image, size)
    small = Image.fromarray(image).resize((wide, high), Image.Resampling.BILINEAR)
    return _in_the_middle(np.asarray(small), size, 0)


def _fitted(image: Shaped[np.ndarray, "_h _w 3"], size: int) -> tuple[int, int]:
    height, width = image.shape[:2]
    ratio = max(width / size, height / size)
    return max(1, int(height / ratio)), max(1, int(width / ratio))


def _in_the_middle(
    small: Shaped[np.ndarray, "_h _w 3"], size: int, border: float
) -> Shaped[np.ndarray, "s s 3"]:
    high, wide = small.shape[:2]
    out = np.full((size, size, 3), border, small.dtype)
    top, left = (size - high) // 2, (size - wide) // 2
    out[top : top + high, left : left + wide] = small
    return out


def _bilinear(
    image: Shaped[np.ndarray, "_h _w 3"], high: int, wide: int
) -> Float32[np.ndarray, "_high _wide 3"]:
    rows = _lines(np.asarray(image, np.float32), high)
    return np.ascontiguousarray(_lines(rows.swapaxes(0, 1), wide).swapaxes(0, 1))


def _lines(image: Float[np.ndarray, "_n _m 3"], count: int) -> Float32[np.ndarray, "_count _m 3"]:
    """Lines between those of `image`, pixels taken to lie in the middle of their places."""
    if len(image) == count:
        return image
    scale = np.float32(len(image) / count)
    at = np.maximum((np.arange(count, dtype=np.float32) + 0.5) * scale - 0.5, 0)
    first = at.astype(np.int64)
    weight = (at - first).astype(np.float32)[:, None, None]
    second = np.minimum(first + 1, len(image) - 1)
    return image[first] * (1 - weight) + image[second] * weight
