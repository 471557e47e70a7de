"""Scales of float8 numbers, for a tensor or for each of its blocks.

Every scale is a power of two, so scaling rounds nothing: what a float8 tensor core computes equals
what a CPU computes on the same quantised numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 128
"""Side of a kernel's blocks, and length of the blocks of an activation or gradient."""

_MANTISSA = 0x7FFFFF


def scale_of(amax: Float[Array, "*s"], kind: Any) -> Float[Array, "*s"]:
    """Smallest power of two that scales amax into `kind`; 1 if amax is 0 or not finite."""
    needed = jnp.maximum(amax / float(jnp.finfo(kind).max), jnp.finfo(jnp.float32).tiny)
    bits = jax.lax.bitcast_convert_type(needed, jnp.int32)
    scale = jax.lax.bitcast_convert_type((bits + _MANTISSA) & ~_MANTISSA, jnp.float32)
    return jnp.where((amax > 0) & jnp.isfinite(amax), scale, 1.0)


def quantise(x: Array, scale: Array, kind: Any) -> Array:
    """x / scale, clipped to the range of `kind`; NaN stays, and infinity becomes NaN, so that a
    diverged step still shows."""
    largest = float(jnp.finfo(kind).max)
    scaled = x.astype(jnp.float32) / scale
    nothing = scaled - scaled  # NaN for infinity
    return (jnp.clip(scaled, -largest, largest) + nothing).astype(kind)


def block_scales(x: Float[Array, "m n"], block: tuple[int, int]) -> Float[Array, "p q"]:
    """One scale for e4m3 for every block (the last in a dimension may be short); NaN where a number
    of the block is not finite."""
    amax = block_amax(x, block)
    return jnp.where(jnp.isfinite(amax), scale_of(amax, jnp.float8_e4m3fn), jnp.nan)


def in_blocks(
    x: Float[Array, "m n"], scale: Float[Array, "p q"], block: tuple[int, int]
) -> Float[Array, "m n"]:
    """x in e4m3 under `block_scales`; a whole block is NaN if a number in it is not finite."""
    return quantise(x, spread(scale, block, x.shape), jnp.float8_e4m3fn)


def block_amax(x: Float[Array, "m n"], block: tuple[int, int]) -> Float[Array, "p q"]:
    """Largest magnitude of every block, f32; the last block in a dimension may be short."""
    (m, n), (rows, columns) = x.shape, block
    padded = jnp.pad(x, ((0, -m % rows), (0, -n % columns)))
    tiles = padded.reshape(-1, rows, padded.shape[1] // columns, columns)
    return jnp.abs(tiles).max((1, 3)).astype(jnp.float32)


def spread(
    scale: Float[Array, "p q"], block: tuple[int, int], shape: tuple[int, ...]
) -> Float[Array, "m n"]:
    """Every block's scale, repeated at all places of a matrix of shape `shape`."""
    tall = jnp.repeat(scale, block[0], axis=0)[: shape[0]]
    return jnp.repeat(tall, block[1], axis=1)[:, : shape[1]]
