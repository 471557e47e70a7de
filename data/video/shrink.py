"""Downscaling of decoded frames by libswscale's vector code, within one grey level of
`resize_with_pad`.

Pillow's filter costs more than decoding does. libswscale has the same filter, but converts colours
to YUV and back, so red, green and blue are given to it one by one as grey images. Where the filter
reaches over the border, libswscale repeats the outermost pixel, which Pillow does not, so the
outermost line is computed by Pillow's rule.
"""

import math
import threading
from collections.abc import Sequence

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from jaxtyping import Float32, UInt8
from PIL import Image

from models.inputs.pictures import fitted_size

MOST_TIMES, LARGEST = 16, 256
"""Largest factor of a side and largest size; beyond them, the rounded weights and places of
libswscale's filter add up to more than a level."""
_FILTER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
_PLANES = ((2, 0), (0, 1), (1, 2))
"""Planes of `gbrp`, each with its channel of RGB."""
_SPLIT_ALIKE = {f"yuv{full}{chroma}p" for full in ("", "j") for chroma in (420, 422, 444)}
"""Formats that libswscale converts to the same pixels in planes as packed, if the width is a
multiple of 16 (it leaves the ends of other lines unchanged). Otherwise planes are made from packed
pixels."""


def shrinks(frame: av.VideoFrame, shape: tuple[int, int]) -> bool:
    """True if `shrink_with_pad` can fit a frame into a height and width: the frame becomes smaller,
    by a factor that is not too large, and no side becomes shorter than the filter reaches."""
    factor = max(frame.height / shape[0], frame.width / shape[1])
    small = fitted_size(frame.height, frame.width, shape)
    return max(shape) <= LARGEST and 1 < factor <= MOST_TIMES and min(small) >= 4


def shrink_with_pad(frame: av.VideoFrame, out: UInt8[np.ndarray, "h w 3"]) -> None:
    """Fills `out` with a frame in the middle of a black picture; no value differs by more than 1
    from that of `resize_with_pad`."""
    high, wide = fitted_size(frame.height, frame.width, out.shape[:2])
    top, left = (out.shape[0] - high) // 2, (out.shape[1] - wide) // 2
    out[:top], out[top + high :] = 0, 0
    out[:, :left], out[:, left + wide :] = 0, 0
    inner = out[top : top + high, left : left + wide]
    to_rgb, to_planes, to_small = _converters(frame, out.shape[:2])
    if frame.format.name not in _SPLIT_ALIKE or frame.width % 16:
        frame = to_rgb.reformat(frame, format="rgb24", threads=1)
    full = to_planes.reformat(frame, format="gbrp", threads=1)
    planes = [_lines(full.planes[number]) for number, _ in _PLANES]
    for lines, (_, channel) in zip(planes, _PLANES, strict=True):
        grey = av.VideoFrame.from_numpy_buffer(lines, format="gray", width=full.width)
        small = to_small.reformat(grey, wide, high, interpolation=_FILTER, threads=1)
        inner[..., channel] = _lines(small.planes[0])[:, :wide]
    _fill_border([lines[:, : full.width] for lines in planes], inner)


def _fill_border(
    planes: Sequence[UInt8[np.ndarray, "h w"]], out: UInt8[np.ndarray, "_high _wide 3"]
) -> None:
    """Fills the outermost line of `out` as Pillow does: each side of it follows from a strip as
    wide as the filter reaches, first over its columns, then over its rows."""
    (height, width), (high, wide) = planes[0].shape, out.shape[:2]
    tall = height / high
    deep, weights = math.ceil(2 * tall) + 1, _outermost(width / wide)
    ends = np.empty((2 * deep, width, 3), np.uint8)
    sides = np.empty((height, 2, 3), np.float32)
    for channel, plane in enumerate(planes):
        ends[:deep, :, channel], ends[deep:, :, channel] = plane[:deep], plane[-deep:]
        sides[:, 0, channel] = plane[:, : len(weights)] @ weights
        sides[:, 1, channel] = plane[:, -len(weights) :] @ weights[::-1]
    strip = Image.fromarray(ends)
    for line, top in ((out[:1], 0), (out[-1:], 2 * deep - tall)):
        resized = strip.resize((wide, 1), Image.Resampling.BILINEAR, (0, top, width, top + tall))
        np.copyto(line, np.asarray(resized))
    columns = Image.fromarray(np.rint(sides).astype(np.uint8))
    out[:, [0, -1]] = np.asarray(columns.resize((2, high), Image.Resampling.BILINEAR))


def _outermost(scale: float) -> Float32[np.ndarray, " far"]:
    """Weights of the outermost pixels in the first of the pixels that are `scale` times as wide."""
    places = np.arange(math.ceil(2 * scale) + 1) + 0.5
    weights = np.maximum(1 - np.abs(places / scale - 0.5), 0)
    return (weights / weights.sum()).astype(np.float32)


def _lines(plane: av.video.plane.VideoPlane) -> UInt8[np.ndarray, "h _w"]:
    """A plane's lines with their padding."""
    return np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)


def _converters(frame: av.VideoFrame, shape: tuple[int, ...]) -> tuple[VideoReformatter, ...]:
    """Three converters of this thread, cached because making one costs more than using it."""
    kept = _local.__dict__.setdefault("converters", {})
    kind = (frame.format.name, frame.width, frame.height, shape)
    if kind not in kept:
        kept[kind] = tuple(VideoReformatter() for _ in range(3))
    return kept[kind]


_local = threading.local()
