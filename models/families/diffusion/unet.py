"""The U-Net over a chunk's steps with which Diffusion Policy (Chi et al., arXiv 2303.04137)
denoises: residual blocks whose features a condition scales and shifts (FiLM).

Sizes and order are LeRobot's (lerobot.policies.diffusion): padding is PyTorch's, the first skip is
never read, and the last block has 8 groups whatever the others have.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

_LAST_GROUPS = 8


@dataclass(frozen=True)
class UnetConfig:
    """Sizes: `widths` of the levels, each half as long as the one before; `kernel` of convolutions
    along the chunk, `norm_groups` of a group norm, and `time_width` of the time's embedding.
    `scales`: the condition scales features, else it only shifts them.

    Raises:
      ValueError: a width does not divide into the groups, or a size has the wrong parity.
    """

    widths: tuple[int, ...] = (512, 1024, 2048)
    kernel: int = 5
    norm_groups: int = 8
    time_width: int = 128
    scales: bool = True

    def __post_init__(self) -> None:
        groups = self.norm_groups
        wrong = groups < 1 or any(width < 1 or width % groups for width in self.widths)
        wrong = wrong or not self.widths or self.widths[0] % _LAST_GROUPS != 0
        if wrong or self.time_width < 4 or self.time_width % 2 or self.kernel % 2 != 1:
            raise ValueError(
                f"unet.widths is {self.widths}, time_width {self.time_width} and kernel "
                f"{self.kernel}; give multiples of norm_groups ({groups}), the first of "
                f"{_LAST_GROUPS} too, an even width of at least 4, and an odd kernel."
            )


class Unet(nnx.Module):
    """Predictions for noised chunks of `dims` dims, from their times and a condition."""

    def __init__(
        self, config: UnetConfig, dims: int, condition: int, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.half = config.time_width // 2
        self.time_in = nnx.Linear(2 * self.half, 8 * self.half, dtype=dtype, rngs=rngs)
        self.time_out = nnx.Linear(8 * self.half, 2 * self.half, dtype=dtype, rngs=rngs)
        block = partial(_Block, config, condition + 2 * self.half, dtype, rngs=rngs)

        def level(inner: int, outer: int) -> nnx.List:
            return nnx.List([block(inner, outer), block(outer, outer)])

        def shrink(width: int) -> nnx.Conv:
            pad = ((1, 1),)
            return nnx.Conv(width, width, (3,), strides=2, padding=pad, dtype=dtype, rngs=rngs)

        def grow(width: int) -> nnx.ConvTranspose:
            how: Any = {"padding": ((2, 2),), "transpose_kernel": True, "dtype": dtype}
            return nnx.ConvTranspose(width, width, (4,), 2, **how, rngs=rngs)

        widths = config.widths
        pairs = list(pairwise(widths))
        self.down = nnx.List([level(*pair) for pair in ((dims, widths[0]), *pairs)])
        self.shrink = nnx.List([shrink(width) for width in widths[:-1]])
        self.mid = nnx.List([level(widths[-1], widths[-1])])
        self.up = nnx.List([level(2 * outer, inner) for inner, outer in reversed(pairs)])
        self.grow = nnx.List([grow(width) for width in widths[-2::-1]])
        self.last = _Convolved(widths[0], widths[0], config.kernel, _LAST_GROUPS, dtype, rngs)
        self.out = nnx.Linear(widths[0], dims, dtype=dtype, rngs=rngs)

    @jax.named_scope("unet")
    def __call__(
        self,
        x: Float[Array, "b h a"],
        time: Int[Array, " b"],
        condition: Float[Array, "b c"],
    ) -> Float[Array, "b h a"]:
        """Predictions for the chunks, f32.

        Args:
          time: of the noise, from 0 on.
        """
        angle = time[:, None] * jnp.exp(-jnp.arange(self.half) * jnp.log(1e4) / (self.half - 1))
        embedded = self.time_in(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1))
        embedded = self.time_out(jax.nn.mish(embedded))
        given = jax.nn.mish(jnp.concatenate([embedded, condition.astype(embedded.dtype)], -1))
        skips = []
        for number, level in enumerate(self.down):
            for block in level:
                x = block(x, given)
            skips.append(x)
            x = self.shrink[number](x) if number < len(self.shrink) else x
        for block in self.mid[0]:
            x = block(x, given)
        for level, grow in zip(self.up, self.grow, strict=True):
            x = jnp.concatenate([x, skips.pop()], axis=-1)
            for block in level:
                x = block(x, given)
            x = grow(x)
        return self.out(self.last(x)).astype(jnp.float32)


class _Block(nnx.Module):
    """Two convolutions with the condition between them, around a skip."""

    def __init__(
        self,
        config: UnetConfig,
        condition: int,
        dtype: str,
        inner: int,
        outer: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.scales = config.scales
        sizes = config.kernel, config.norm_groups, dtype, rngs
        self.conv1, self.conv2 = (_Convolved(width, outer, *sizes) for width in (inner, outer))
        self.film = nnx.Linear(condition, (1 + self.scales) * outer, dtype=dtype, rngs=rngs)
        skip = inner != outer
        self.skip = nnx.Linear(inner, outer, dtype=dtype, rngs=rngs) if skip else None

    def __call__(
        self, x: Float[Array, "b h _i"], given: Float[Array, "b c"]
    ) -> Float[Array, "b h _o"]:
        y, told = self.conv1(x), self.film(given)[:, None]
        if self.scales:
            scale, told = jnp.split(told, 2, axis=-1)
            y = scale * y
        return self.conv2(y + told) + (x if self.skip is None else self.skip(x))


class _Convolved(nnx.Module):
    """A convolution along the chunk, group norm, and Mish."""

    def __init__(
        self, inner: int, outer: int, kernel: int, groups: int, dtype: str, rngs: nnx.Rngs
    ) -> None:
        pad = ((kernel // 2, kernel // 2),)
        self.conv = nnx.Conv(inner, outer, (kernel,), padding=pad, dtype=dtype, rngs=rngs)
        normed = partial(nnx.GroupNorm, epsilon=1e-5, use_fast_variance=False, dtype=dtype)
        self.norm = normed(outer, groups, rngs=rngs)

    def __call__(self, x: Float[Array, "b h _i"]) -> Float[Array, "b h _o"]:
        return jax.nn.mish(self.norm(self.conv(x)))
