"""ResNet (He et al., arXiv 1512.03385) as torchvision builds it, without its classifier: the tower
of policies such as ACT and Diffusion Policy. Pictures are channels last; padding is torch's, the
same on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8

from models.files.bounds import check_size
from models.inputs.embodiment import Normalizer
from models.layers.batch_norm import EPSILON, BatchNorm, FrozenBatchNorm

Norm = Literal["frozen", "running", "group"]
"""Normalisation after each convolution: by statistics that were trained elsewhere and never change
(`FrozenBatchNorm`), by those of a batch in training (`BatchNorm`), or of groups of 16 channels."""
DEPTHS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
"""Blocks of each of the four stages by torchvision's names, and whether they are bottlenecks."""
IMAGENET = Normalizer((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet's pictures from 0 to 1."""
_GROUP = 16


@dataclass(frozen=True)
class ResnetConfig:
    """`name`: depth and kind of blocks, one of `DEPTHS`. `width`: channels of the first stage, 64
    as released; each stage doubles them."""

    name: str = "resnet18"
    norm: Norm = "frozen"
    width: int = 64

    def __post_init__(self) -> None:
        check_size("resnet.width", self.width)
        for value, known, field in (
            (self.name, list(DEPTHS), "name"),
            (self.norm, list(get_args(Norm)), "norm"),
        ):
            if value not in known:
                raise ValueError(f"resnet.{field} is {value!r}; expected one of {known}.")
        if self.norm == "group" and self.width % _GROUP:
            raise ValueError(
                f"resnet.width is {self.width}, but norm 'group' has groups of {_GROUP} channels; "
                f"give a multiple of {_GROUP}, or another norm."
            )

    @property
    def channels(self) -> int:
        """Channels of what the tower gives: 8 widths, 4 times as many from bottlenecks."""
        return self.width * (32 if DEPTHS[self.name][1] else 8)

    @staticmethod
    def places(height: int, width: int) -> tuple[int, int]:
        """Rows and columns of what the tower gives of a picture: 1 for each 32 pixels begun."""
        return -(-height // 32), -(-width // 32)


class Resnet(nnx.Module):
    """The tower up to its last stage."""

    def __init__(self, config: ResnetConfig, dtype: str, rngs: nnx.Rngs):
        depths, deep = DEPTHS[config.name]
        width, norm = config.width, partial(_norm, config.norm)
        conv = partial(_conv, dtype=jnp.dtype(dtype), rngs=rngs)
        self.conv1, self.bn1 = conv(3, width, 7, 2), norm(width)
        before, stages = width, []
        for stage, depth in enumerate(depths):
            inner, blocks = width << stage, []
            after = inner * (4 if deep else 1)
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(_Block(before, inner, after, stride, deep, conv, norm))
                before = after
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)

    @jax.named_scope("vision")
    def __call__(
        self, x: Float[Array, "b h w 3"], present: Bool[Array, " b"]
    ) -> Float[Array, "b _h _w c"]:
        """Features at each 32nd place, `ResnetConfig.places`.

        Args:
          x: scaled pictures.
          present: those that count, for the statistics of a batch.
        """
        x = jax.nn.relu(_normed(self.bn1, self.conv1(x.astype(self.conv1.dtype)), present))
        x = _pooled(_pooled(x, 1), 2)
        for stage in self.stages:
            for block in stage:
                x = block(x, present)
        return x


class _Block(nnx.Module):
    """Two 3 × 3 convolutions, or one between two of 1 × 1, beside a shortcut."""

    def __init__(
        self, before: int, inner: int, after: int, stride: int, deep: bool, conv: Any, norm: Any
    ):
        sizes: tuple[tuple[int, int, int, int], ...]
        if deep:
            sizes = ((before, inner, 1, 1), (inner, inner, 3, stride), (inner, after, 1, 1))
        else:
            sizes = ((before, inner, 3, stride), (inner, after, 3, 1))
        self.depth = len(sizes)
        for i, size in enumerate(sizes, 1):
            setattr(self, f"conv{i}", conv(*size))
            setattr(self, f"bn{i}", norm(size[1]))
        if stride > 1 or before != after:
            self.short, self.short_bn = conv(before, after, 1, stride), norm(after)

    def __call__(self, x: Array, present: Array) -> Array:
        y = x
        for i in range(1, self.depth + 1):
            y = _normed(getattr(self, f"bn{i}"), getattr(self, f"conv{i}")(y), present)
            y = jax.nn.relu(y) if i < self.depth else y
        if hasattr(self, "short"):
            x = _normed(self.short_bn, self.short(x), present)
        return jax.nn.relu(x + y)


def standardised(
    images: UInt8[Array, "b h w 3"] | Float32[Array, "b h w 3"],
    camera: Int[Array, " b"],
    scales: Sequence[Normalizer],
) -> Float32[Array, "b h w 3"]:
    """Pictures of grey levels from 0 to 255 as numbers from 0 to 1, scaled by those of their
    camera; by the only one, if there is one, and not at all if there is none."""
    x = images.astype(jnp.float32) / 255
    if not scales:
        return x
    offset, scale = (jnp.asarray([getattr(s, n) for s in scales]) for n in ("offset", "scale"))
    at = jnp.minimum(camera, len(scales) - 1)
    return (x - offset[at][:, None, None]) / scale[at][:, None, None]


def _conv(inner: int, outer: int, side: int, stride: int, dtype: Any, rngs: nnx.Rngs) -> nnx.Conv:
    """A convolution without bias, drawn as torchvision draws it."""
    return nnx.Conv(
        inner,
        outer,
        (side, side),
        stride,
        padding=side // 2,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        dtype=dtype,
        rngs=rngs,
    )


def _pooled(x: Float[Array, "b h w c"], axis: int) -> Float[Array, "b _h _w c"]:
    """The largest of each even place and its two neighbours along an axis; `x` is at least 0.

    A reduced window's gradient builds arrays of places, for a tenth of a small step's time."""
    pad = [(0, 0)] * 4
    pad[axis] = (1, x.shape[axis] % 2)
    x = jnp.moveaxis(jnp.pad(x, pad), axis, 0)
    first, second, third = x[:-1:2], x[1::2], x[2::2]
    larger = jnp.where(first >= second, first, second)
    return jnp.moveaxis(jnp.where(larger >= third, larger, third), 0, axis)


def _norm(kind: Norm, width: int) -> nnx.Module:
    if kind == "group":
        groups = partial(nnx.GroupNorm, num_groups=width // _GROUP, group_size=None)
        return groups(width, epsilon=EPSILON, use_fast_variance=False, rngs=nnx.Rngs(0))
    return (FrozenBatchNorm if kind == "frozen" else BatchNorm)(width)


def _normed(norm: Any, x: Array, present: Array) -> Array:
    return norm(x, present) if isinstance(norm, BatchNorm) else norm(x)
