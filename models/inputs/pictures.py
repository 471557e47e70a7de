"""Pictures of any size fitted to the size that a model sees, in each way in which released
policies were trained: openpi's (Pillow), LeRobot's (torch's `interpolate`), and GR00T's
(torchvision).

The ways differ by several grey levels at edges, for which a policy returns other actions.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped, UInt8
from PIL import Image

from models.files.bounds import LARGEST_IMAGE, check_size
from models.inputs.parts import InputPart, part_class

Size = int | tuple[int, int]
"""Height and width of a picture in pixels, or the side of a square."""

_MIDDLE = 0.95


def shape_of(size: Size) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def sizes_told(sizes: Iterable[tuple[int, int]]) -> str:
    """Heights and widths as text, for errors."""
    return " and ".join(f"{height} × {width}" for height, width in sizes) or "no pixels"


@dataclass(frozen=True)
class PictureFit(InputPart):
    """A way to fit pictures to a `size`, in grey levels from 0 to 255: a dataclass made as
    `class Mine(PictureFit, kind="mine")`.

    `dtype`: uint8 if it rounds to grey levels, else float32. `border`: the level beside a picture
    whose aspect is kept. `whole`: False if it cuts off edges.

    Raises:
      ValueError: the size is out of bounds.
    """

    size: Size

    dtype: ClassVar[type[np.generic]] = np.uint8
    border: ClassVar[float] = 0.0
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for side in self.shape:
            check_size("image_size", side, LARGEST_IMAGE)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width."""
        return shape_of(self.size)

    @abstractmethod
    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> Shaped[np.ndarray, "h w 3"]:
        """The fitted picture, in the middle of its size if the aspect is kept."""

    @property
    def black(self) -> Shaped[np.ndarray, "h w 3"]:
        """A black picture, which an absent camera shows to a model that is never without."""
        return np.zeros((*self.shape, 3), self.dtype)


@dataclass(frozen=True)
class Antialiased(PictureFit, kind="antialiased"):
    """Pillow's bilinear filter, which averages when it shrinks; black borders (openpi)."""

    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "h w 3"]:
        return resize_with_pad(image, self.shape)


@dataclass(frozen=True)
class Bilinear(PictureFit, kind="bilinear"):
    """torch's bilinear filter, which reads four pixels; black borders (LeRobot from 0.5.0 on)."""

    dtype = np.float32

    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> Float32[np.ndarray, "h w 3"]:
        high, wide = fitted_size(image.shape[0], image.shape[1], self.shape)
        return _in_the_middle(_bilinear(image, high, wide), self.shape, self.border)


@dataclass(frozen=True)
class BilinearDark(Bilinear, kind="bilinear-dark"):
    """`Bilinear` with borders of −255 (LeRobot before 0.5.0)."""

    border = -255.0


@dataclass(frozen=True)
class Stretched(PictureFit, kind="stretched"):
    """torchvision's bicubic filter, each side by its own factor (GR00T in LeRobot)."""

    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "h w 3"]:
        return bicubic(image, self.shape)


@dataclass(frozen=True)
class StretchedMiddle(PictureFit, kind="stretched-middle"):
    """torchvision's bilinear filter, each side by its own factor, for the middle 95 % of each side
    (NVIDIA's GR00T)."""

    whole = False

    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "h w 3"]:
        return _middle(image, self.shape)


def picture_fit(kind: str, size: Size) -> PictureFit:
    """The fit of a kind.

    Raises:
      ValueError: there is no such kind, or the size is out of bounds.
    """
    found: type = part_class(PictureFit, kind)
    return found(size)


def in_grey_levels(picture: Shaped[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "_h _w 3"]:
    """A fitted picture rounded to grey levels, as frame stores keep it."""
    if picture.dtype == np.uint8:
        return picture
    return np.rint(picture).clip(0, 255).astype(np.uint8)


def set_border(
    picture: Shaped[np.ndarray, "h w 3"], border: float, source: tuple[int, int]
) -> None:
    """Sets what lies beside the inner part of a fitted picture; `source` is its height and width
    before it was fitted with its aspect kept."""
    high, wide = fitted_size(*source, picture.shape[:2])
    top, left = (picture.shape[0] - high) // 2, (picture.shape[1] - wide) // 2
    picture[:top], picture[top + high :] = border, border
    picture[:, :left], picture[:, left + wide :] = border, border


def resize_with_pad(image: Shaped[np.ndarray, "_h _w 3"], size: Size) -> UInt8[np.ndarray, "h w 3"]:
    """Bilinear resize to fit a black picture of `size`, keeping the aspect (as openpi does)."""
    shape = shape_of(size)
    if image.shape[:2] == shape:
        return image
    high, wide = fitted_size(image.shape[0], image.shape[1], shape)
    small = Image.fromarray(image).resize((wide, high), Image.Resampling.BILINEAR)
    return _in_the_middle(np.asarray(small), shape, 0)


def fitted_size(height: int, width: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of a picture that fits into a height and width, its aspect kept."""
    ratio = max(width / shape[1], height / shape[0])
    return max(1, int(height / ratio)), max(1, int(width / ratio))


def _in_the_middle(
    small: Shaped[np.ndarray, "_h _w 3"], shape: tuple[int, int], border: float
) -> Shaped[np.ndarray, "h w 3"]:
    high, wide = small.shape[:2]
    out = np.full((*shape, 3), border, small.dtype)
    top, left = (shape[0] - high) // 2, (shape[1] - wide) // 2
    out[top : top + high, left : left + wide] = small
    return out


def _bilinear(
    image: Shaped[np.ndarray, "_h _w 3"], high: int, wide: int
) -> Float32[np.ndarray, "_high _wide 3"]:
    rows = _lines(np.asarray(image, np.float32), high)
    return np.ascontiguousarray(_lines(rows.swapaxes(0, 1), wide).swapaxes(0, 1))


def _lines(image: Float[np.ndarray, "_n _m 3"], count: int) -> Float32[np.ndarray, "_count _m 3"]:
    """Lines interpolated between those of `image`; pixels lie in the middle of their places."""
    if len(image) == count:
        return image
    scale = np.float32(len(image) / count)
    at = np.maximum((np.arange(count, dtype=np.float32) + 0.5) * scale - 0.5, 0)
    first = at.astype(np.int64)
    weight = (at - first).astype(np.float32)[:, None, None]
    second = np.minimum(first + 1, len(image) - 1)
    return image[first] * (1 - weight) + image[second] * weight


def bicubic(
    image: UInt8[np.ndarray, "_h _w 3"], shape: tuple[int, int]
) -> UInt8[np.ndarray, "h w 3"]:
    """Resize in integers, antialiased, as torch does of uint8: first rows, then columns, each sum
    of 16-bit weights rounded."""
    for axis in (1, 0):
        if image.shape[axis] != shape[axis]:
            weights, precision = _fixed_point(image.shape[axis], shape[axis])
            sums = np.tensordot(weights, image, (1, axis)) + (1 << (precision - 1))
            rounded = np.floor(sums / (1 << precision)).clip(0, 255).astype(np.uint8)
            image = np.moveaxis(rounded, 0, axis)
    return np.ascontiguousarray(image)


def _middle(
    image: UInt8[np.ndarray, "_h _w 3"], shape: tuple[int, int]
) -> UInt8[np.ndarray, "h w 3"]:
    """Resizes the middle in floats from 0 to 1, and truncates to grey levels at the end."""
    sides = [int(side * _MIDDLE) for side in image.shape[:2]]
    top, left = (round((a - b) / 2) for a, b in zip(image.shape, sides, strict=False))
    cut = image[top : top + sides[0], left : left + sides[1]].astype(np.float32) / np.float32(255)
    for axis in (1, 0):
        if cut.shape[axis] != shape[axis]:
            cut = np.moveaxis(_in_turn(np.moveaxis(cut, axis, 0), shape[axis]), 0, axis)
    return np.ascontiguousarray((cut * np.float32(255)).astype(np.uint8))


def _in_turn(lines: Float32[np.ndarray, "_n _m 3"], size: int) -> Float32[np.ndarray, "s _m 3"]:
    """Weighted sums of lines, each product added in turn and rounded once, as torch does: after
    truncation, a last bit can change a grey level."""
    weights = _weights(len(lines), size, "linear", np.float32)
    first = (weights > 0).argmax(axis=1)
    sums = np.zeros((size, *lines.shape[1:]), np.float32)
    for tap in range(int((weights > 0).sum(axis=1).max())):
        at = np.minimum(first + tap, len(lines) - 1)
        weight = np.where(first + tap < len(lines), weights[np.arange(size), at], 0)
        product = lines[at].astype(np.float64) * weight[:, None, None]
        sums = (sums + product).astype(np.float32)
    return sums


@lru_cache(64)
def _fixed_point(inner: int, outer: int) -> tuple[Float64[np.ndarray, "outer inner"], int]:
    """Weights as whole numbers of at most 15 bits, and how many of the bits are the fraction."""
    weights = _weights(inner, outer, "cubic")
    precision = 0
    while precision < 22 and int(0.5 + weights.max() * (1 << (precision + 1))) < 1 << 15:
        precision += 1
    scaled = weights * (1 << precision)
    return np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)), precision


@lru_cache(64)
def _weights(
    inner: int, outer: int, kind: Literal["linear", "cubic"], dtype: type = np.float64
) -> Float[np.ndarray, "outer inner"]:
    """Weights of `inner` pixels in each of `outer`, for a filter that widens when it shrinks."""
    scale = dtype(inner) / dtype(outer)
    reach = (2 if kind == "cubic" else 1) * max(scale, dtype(1))
    centre = scale * (np.arange(outer, dtype=dtype) + dtype(0.5))
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), inner)
    at: np.ndarray = np.arange(inner, dtype=dtype)
    distance = np.abs(at - centre[:, None] + dtype(0.5)) * (1 / max(scale, dtype(1)))
    if kind == "linear":
        values = np.maximum(1 - distance, 0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
        values = np.where(distance < 1, near, np.where(distance < 2, far, 0))
    values = np.where((at >= first[:, None]) & (at < last[:, None]), values, 0)
    return values / values.sum(axis=1, keepdims=True)
