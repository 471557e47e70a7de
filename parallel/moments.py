"""Adam's moments in float8: one byte per value and two per group of 128 values, about a quarter of
the memory of f32.

A group is raised to the power that makes its range equal to e4m3's, 2.3·10⁵ (COAT, arXiv
2410.19313). Rounding is stochastic, since an average that changes by less than half a code would
never change if rounded to the nearest.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float8e4m3fn, Int, Int8, PRNGKeyArray, UInt8

GROUP = 128
SMALLEST_LEAF = 4096
"""Leaves with fewer elements (norms, biases) keep f32 moments."""

_DTYPE = jnp.float8_e4m3fn
_LARGEST, _SUBNORMAL = float(jnp.finfo(_DTYPE).max), float(jnp.finfo(_DTYPE).smallest_subnormal)
_STEPS = 16
_RANGE = _LARGEST / _SUBNORMAL


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8:
    """sign(code) · 2^scale · |code / 448|^(16 / power), where groups lie along the last dimension.

    Scales and powers change in steps, so most groups keep theirs from one training step to the
    next, and only the change to their values is rounded.
    """

    codes: Float8e4m3fn[Array, "*d n"]
    scale: Int8[Array, "*d g"]
    power: UInt8[Array, "*d g"]


class MomentsState(NamedTuple):
    """Updates made, and first and second moments as trees of `Float8` or, where small, f32."""

    step: Int[Array, ""]
    mu: Any
    nu: Any


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with its moments kept as `Float8` between steps.

    A step's update uses the moments before they are rounded. The random rounding depends only on
    the step and on the leaf's place in the tree, so the mesh does not change it.
    """

    def init(params: Any) -> MomentsState:
        zeros = jax.tree.map(lambda p: _stored(jnp.zeros(p.shape, jnp.float32)), params)
        return MomentsState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(grads: Any, state: MomentsState, params: Any = None) -> tuple[Any, MomentsState]:
        del params
        step = optax.safe_increment(state.step)
        key = jax.random.fold_in(jax.random.key(0), step)
        tree: Any = jax.tree.structure(grads)
        leaves = zip(*map(tree.flatten_up_to, (grads, state.mu, state.nu)), strict=True)
        updates, mus, nus = [], [], []
        for i, (g, mu, nu) in enumerate(leaves):
            first, second = jax.random.split(jax.random.fold_in(key, i))
            m = b1 * _loaded(mu) + (1 - b1) * g
            v = b2 * _loaded(nu) + (1 - b2) * g * g
            updates.append(m / (1 - b1**step) / (jnp.sqrt(v / (1 - b2**step)) + eps))
            mus.append(_stored(m, first))
            nus.append(_stored(v, second, least_power=0.5))
        new_mu, new_nu = tree.unflatten(mus), tree.unflatten(nus)
        return tree.unflatten(updates), MomentsState(step, new_mu, new_nu)

    return optax.GradientTransformation(init, update)


def encode(
    x: Float[Array, "*d n"], key: PRNGKeyArray | None = None, least_power: float = 1.0
) -> Float8:
    """x in float8. Values other than 0 do not become 0, and the expected value of the result of
    `decode` is x (without a key, values are rounded to the nearest).

    Args:
      least_power: bounds how far a wide range is compressed: values too small for e4m3's range to
        the power 1 / least_power take the smallest code. Use 1 for first moments, and 1/2 for
        second moments, which are squares; a tiny second moment is then too large and its step too
        short.
    """
    grouped = _grouped(x)
    size = jnp.abs(grouped)
    largest = size.max(-1)
    least = jnp.where(size > 0, size, jnp.inf).min(-1)
    scale = jnp.where(largest > 0, jnp.frexp(largest)[1], 0).clip(-126, 127)
    spread = jnp.maximum(scale - jnp.log2(least), 1e-3)
    power = jnp.floor(_STEPS * jnp.log2(_RANGE) / spread).clip(_STEPS * least_power, 255)
    power = jnp.where(largest > 0, power, _STEPS)
    ratio = jnp.ldexp(size, -scale[..., None])
    exponent = power[..., None] / _STEPS
    y = _LARGEST * ratio**exponent
    step = jnp.ldexp(1.0, jnp.maximum(jnp.frexp(y)[1] - 4, -9))
    if key is None:
        code = jnp.round(y / step) * step
    else:
        low = jnp.floor(y / step) * step
        ends = [(c / _LARGEST) ** (1 / exponent) for c in (low, low + step)]
        share = (ratio - ends[0]) / (ends[1] - ends[0])
        draw = jax.random.uniform(key, x.shape, jnp.float32)
        code = low + step * (_grouped(draw) < share)
    code = jnp.where(size > 0, jnp.clip(code, _SUBNORMAL, _LARGEST), 0) * jnp.sign(grouped)
    codes = code.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(_DTYPE)
    return Float8(codes, scale.astype(jnp.int8), power.astype(jnp.uint8))


def decode(x: Float8) -> Float[Array, "*d n"]:
    """f32 values."""
    code = _grouped(x.codes.astype(jnp.float32))
    exponent = _STEPS / x.power.astype(jnp.float32)
    size = (jnp.abs(code) / _LARGEST) ** exponent[..., None]
    values = jnp.sign(code) * jnp.ldexp(size, x.scale.astype(jnp.int32)[..., None])
    return values.reshape(*x.codes.shape[:-1], -1)[..., : x.codes.shape[-1]]


def _stored(
    x: Float[Array, "*d"], key: PRNGKeyArray | None = None, least_power: float = 1.0
) -> Any:
    return x if x.size < SMALLEST_LEAF else encode(x, key, least_power)


def _loaded(x: Any) -> Float[Array, "*d"]:
    return decode(x) if isinstance(x, Float8) else x


def _grouped(x: Float[Array, "*d n"]) -> Float[Array, "*d g m"]:
    """Groups of up to 128 along the last dimension, the last padded with zeros."""
    length = min(GROUP, x.shape[-1])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % length)])
    return x.reshape(*x.shape[:-1], -1, length)
