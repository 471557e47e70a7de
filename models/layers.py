"""Layers shared by the towers: norms, feed-forward, rotary and sinusoidal positions.

Arithmetic is Gemma's and π0.5's (openpi; Gemma report arXiv 2403.08295): norms in f32, RMS scale
stored as its distance from 1, tanh GELU, rotary halves split, base 10,000.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

Carry = TypeVar("Carry")
_UNROLLED = 4


class RMSNorm(nnx.Module):
    """x / rms(x) · (1 + scale); statistics in f32."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return (normalise(x) * (1 + self.scale[...])).astype(x.dtype)


class AdaRMSNorm(nnx.Module):
    """RMS norm whose scale and shift, and the gate of the residual that follows, come from a
    condition.

    The projection is zero-initialised as in π0.5, so every block begins closed (gate 0).
    """

    def __init__(self, width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        zeros = nnx.initializers.zeros
        self.modulation = nnx.Linear(width, 3 * width, kernel_init=zeros, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*b d"], condition: Float[Array, "*c d"]
    ) -> tuple[Float[Array, "*b d"], Float[Array, "*c d"]]:
        """The modulated norm and the gate; `condition` broadcasts against `x`."""
        scale, shift, gate = jnp.split(self.modulation(condition), 3, axis=-1)
        return (normalise(x) * (1 + scale) + shift).astype(x.dtype), gate


class GatedMLP(nnx.Module):
    """GeGLU: gelu(x·gate) ⊙ (x·up), projected down."""

    def __init__(self, width: int, hidden: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = nnx.Linear(width, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


def scan_layers(layer: Callable[[Carry, Any], tuple[Carry, Any]], x: Carry, stacked: Any) -> Any:
    """`jax.lax.scan` over stacked layers; a few are unrolled, which spares a fifth of a small
    model's step (no copies of what backward needs), many are not, for the sake of compile time."""
    depth = len(jax.tree.leaves(stacked)[0])
    return jax.lax.scan(layer, x, stacked, unroll=depth <= _UNROLLED)


def normalise(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """x / sqrt(mean(x²) + 1e-6), in f32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotary(
    x: Float[Array, "*b t n d"], position: Int[Array, "*b t"], base: float = 10_000.0
) -> Float[Array, "*b t n d"]:
    """Rotates the two halves of each head by its position (RoPE, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angle = position[..., None, None] / base ** (jnp.arange(half) / half)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def sincos_embedding(
    value: Float[Array, "*b"], width: int, min_period: float = 4e-3, max_period: float = 4.0
) -> Float[Array, "*b d"]:
    """[sin, cos] of `value` at log-spaced periods; π0's embedding of flow time."""
    half = width // 2
    period = min_period * (max_period / min_period) ** jnp.linspace(0.0, 1.0, half)
    angle = value[..., None] * 2 * jnp.pi / period
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
