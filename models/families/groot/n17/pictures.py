"""Pictures as GR00T-N1.7's processors prepare them, to the byte: the shortest edge resized, the
middle cut out and resized again, then the size that Qwen3-VL's tower reads.

NVIDIA's way is OpenCV's INTER_AREA, rebuilt here from its arithmetic; the other is torchvision's
bicubic filter. The size that results depends on the camera's aspect.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int64, Shaped, UInt8

from models.inputs.pictures import PictureFit, bicubic

_FIXED = 2048


@dataclass(frozen=True)
class GrootPicture(PictureFit, kind="groot17_picture"):
    """`size`: of the pictures that result. `area`: NVIDIA's way, else torchvision's, which
    stretches to squares of `edge`. `edge`: shortest edge; 0: pictures are not resized before the
    tower's size. `crop`: share of each edge that is kept, 0 or 1 for all; `target`: height and
    width after the crop (torchvision's way). `letter_box`: black borders first make a square.
    `step`, `least`, `most`: the tower's sizes are multiples of `step` with so many pixels; without
    `most`, pictures are stretched to `size`. `any_size`: pictures of other aspects than `size` are
    fitted too, to a size of their own.
    """

    area: bool = True
    edge: int = 0
    crop: float = 0.0
    target: tuple[int, int] = (256, 256)
    letter_box: bool = False
    step: int = 32
    least: int = 0
    most: int = 0
    any_size: bool = False

    @property
    def whole(self) -> bool:  # type: ignore[override]
        """False if it cuts off edges."""
        return not 0 < self.crop < 1

    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "h w 3"]:
        """See `PictureFit`.

        Raises:
          ValueError: the picture's aspect leads to another size than `size`, unless `any_size`.
        """
        fitted = self._cut(_square(image) if self.letter_box else image)
        if not self.most:
            return bicubic(fitted, self.shape)
        fitted = bicubic(fitted, tower_size(fitted.shape[:2], self.step, self.least, self.most))
        if not self.any_size and fitted.shape[:2] != self.shape:
            told = " × ".join(map(str, fitted.shape[:2]))
            raise ValueError(
                f"A picture of {image.shape[0]} × {image.shape[1]} pixels becomes one of {told}, "
                f"but the model reads {self.shape[0]} × {self.shape[1]}; give --model.image-size "
                f"{fitted.shape[0]} {fitted.shape[1]}."
            )
        return fitted

    def _cut(self, image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "_a _b 3"]:
        if not self.edge:
            return image
        image = self._resized(image)
        if not self.whole:
            whole = int if self.area else round
            high, wide = (max(1, whole(side * self.crop)) for side in image.shape[:2])
            top, left = (image.shape[0] - high) // 2, (image.shape[1] - wide) // 2
            image = image[top : top + high, left : left + wide]
        return self._resized(image) if self.area else bicubic(image, self.target)

    def _resized(self, image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "_a _b 3"]:
        if not self.area:
            return bicubic(image, (self.edge, self.edge))
        if (shortest := min(image.shape[:2])) == self.edge:
            return image
        scale = self.edge / shortest
        high, wide = (max(1, round(side * scale)) for side in image.shape[:2])
        return area_resized(image, (high, wide))


def tower_size(shape: tuple[int, ...], step: int, least: int, most: int) -> tuple[int, int]:
    """Height and width, multiples of `step`, nearest to a picture's that have from `least` to
    `most` pixels (Qwen2-VL's smart resize)."""
    sides, area = [max(step, round(side / step) * step) for side in shape], math.prod(shape)
    if math.prod(sides) > most:
        shrink = math.sqrt(area / most)
        sides = [max(step, math.floor(side / shrink / step) * step) for side in shape]
    elif math.prod(sides) < least:
        grow = math.sqrt(least / area)
        sides = [math.ceil(side * grow / step) * step for side in shape]
    return sides[0], sides[1]


def area_resized(
    image: UInt8[np.ndarray, "_h _w 3"], shape: tuple[int, int]
) -> UInt8[np.ndarray, "h w 3"]:
    """OpenCV's resize by INTER_AREA, to the byte: means of areas where both sides shrink, and
    else its own linear interpolation in fixed point."""
    before = image.shape[:2]
    if before == shape:
        return image
    if any(new > old for new, old in zip(shape, before, strict=True)):
        return _enlarged(image, shape)
    factors = [old // new for new, old in zip(shape, before, strict=True)]
    if all(new * f == old for new, f, old in zip(shape, factors, before, strict=True)):
        blocks = image.reshape(shape[0], factors[0], shape[1], factors[1], 3)
        sums = blocks.sum(axis=(1, 3), dtype=np.int64)
        if factors == [2, 2]:
            return ((sums + 2) >> 2).astype(np.uint8)
        share = np.float32(1 / math.prod(factors))
        return np.rint(sums.astype(np.float32) * share).astype(np.uint8)
    columns = _means(np.moveaxis(image, 1, 0), shape[1])
    return np.rint(_means(np.moveaxis(columns, 1, 0), shape[0])).clip(0, 255).astype(np.uint8)


def _means(lines: Shaped[np.ndarray, "_n _m 3"], count: int) -> Float32[np.ndarray, "c _m 3"]:
    """Means of the lines that each of `count` covers, products added in turn in f32."""
    n = len(lines)
    scale = n / count
    out = np.zeros((count, *lines.shape[1:]), np.float32)
    for at in range(count):
        begin, end = at * scale, at * scale + scale
        cell = min(scale, n - begin)
        last = min(math.floor(end), n - 1)
        first = min(math.ceil(begin), last)
        weights = [(first - 1, (first - begin) / cell)] if first - begin > 1e-3 else []
        weights += [(line, 1 / cell) for line in range(first, last)]
        weights += [(last, min(end - last, 1, cell) / cell)] if end - last > 1e-3 else []
        for line, weight in weights:
            out[at] += lines[line].astype(np.float32) * np.float32(weight)
    return out


def _enlarged(
    image: UInt8[np.ndarray, "_h _w 3"], shape: tuple[int, int]
) -> UInt8[np.ndarray, "h w 3"]:
    (top, bottom, low, high), (left, right, near, far) = (
        _taps(old, new) for old, new in zip(image.shape, shape, strict=False)
    )
    wide = image.astype(np.int64)
    rows = wide[:, left] * near[:, None] + wide[:, right] * far[:, None]
    first, second = rows[top] >> 4, rows[bottom] >> 4
    sums = (first * low[:, None, None] >> 16) + (second * high[:, None, None] >> 16)
    return ((sums + 2) >> 2).clip(0, 255).astype(np.uint8)


def _taps(old: int, new: int) -> tuple[Int64[np.ndarray, " new"], ...]:
    """The two lines that each new line reads, and their weights in 2048ths."""
    grow, at = new / old, np.arange(new)
    first = np.floor(at * (1 / grow)).astype(np.int64)
    share: Float[np.ndarray, " new"] = ((at + 1) - (first + 1) * grow).astype(np.float32)
    share = np.where(share <= 0, np.float32(0), share - np.floor(share))
    over = first >= old - 1
    first, share = np.where(over, old - 1, first), np.where(over, np.float32(0), share)
    near = np.rint((1 - share) * _FIXED).astype(np.int64)
    return first, np.minimum(first + 1, old - 1), near, np.rint(share * _FIXED).astype(np.int64)


def _square(image: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "n n 3"]:
    high, wide = image.shape[:2]
    side = max(high, wide)
    out = np.zeros((side, side, 3), np.uint8)
    top, left = (side - high) // 2, (side - wide) // 2
    out[top : top + high, left : left + wide] = image
    return out
