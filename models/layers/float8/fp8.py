"""Matrix products in float8: e4m3 operands forward, e5m2 gradients backward, f32 accumulation, and
master weights that stay f32 (Micikevicius et al., arXiv 2209.05433).

XLA's GEMM rewriter turns each product of a per-tensor recipe into one float8 cuBLAS call with the
scale folded in; the recipe `block` is `models.layers.float8.block_scaled`.
"""

import operator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.layers.float8 import block_scaled
from models.layers.float8.scales import quantise, scale_of
from models.layers.functional import only
from models.sharding import path_name

Recipe = Literal["current", "delayed", "block"]
"""Source of the scales. "current": the tensor itself. "delayed": the largest magnitudes of the last
`HISTORY` steps. "block": one scale for every 1×128 block of an activation or gradient, along the
contraction, and for every 128×128 block of a kernel; gradients are in e4m3 too."""

HISTORY = 16
HISTORY_LEAF = "fp8_history"

_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def dot(
    x: Float[Array, "*b i"],
    kernel: Float[Array, "i o"],
    recipe: Recipe,
    history: Float[Array, "3 n"] | None = None,
) -> Float[Array, "*b o"]:
    """x @ kernel in float8; the result has x's dtype, and the kernel's gradient has the kernel's.

    Args:
      history: for "delayed", the largest magnitudes of x, kernel and the result's gradient in
        earlier steps, newest first. Its "gradient" has this step's magnitudes in column 0, which
        `advance` enters. An all-zero row, as at first, means scale 1; magnitudes above the largest
        are clipped.

    Raises:
      ValueError: "delayed" has no history, or another recipe has one.
    """
    if (history is None) == (recipe == "delayed"):
        raise ValueError(
            f"fp8 recipe {recipe!r} was given {'no' if history is None else 'a'} history; "
            f"'delayed' needs one and no other recipe takes one."
        )
    rows = x.reshape(-1, x.shape[-1])
    y = block_scaled.dot(rows, kernel) if recipe == "block" else _tensor_dot(rows, kernel, history)
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def add(total: Any, gradients: Any) -> Any:
    """Sum of two gradient trees; in histories, the larger magnitudes are kept."""
    return jax.tree_util.tree_map_with_path(
        lambda path, a, b: jnp.maximum(a, b) if is_history(path) else a + b, total, gradients
    )


def advance(updated: Any, params: Any, gradients: Any) -> Any:
    """`updated` with its histories replaced: those of `params`, with this step's magnitudes (in
    `gradients`, neither divided nor clipped) added in front and the oldest dropped."""

    def leaf(path: Any, new: Array, old: Array, gradient: Array) -> Array:
        if not is_history(path):
            return new
        return jnp.concatenate([gradient[..., :1], old[..., :-1]], axis=-1).astype(old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, updated, params, gradients)


def split_histories(weights: Any) -> tuple[Any, Any]:
    """The tree with only its histories, and the tree with everything else; other leaves are None.
    `fill` of `models.layers.functional` joins them."""
    chosen = jax.tree_util.tree_map_with_path(lambda path, _: is_history(path), weights)
    return only(weights, chosen), only(weights, jax.tree.map(operator.not_, chosen))


def copies(histories: Any, count: int) -> Any:
    """Copies [count, ...] of each history for several users in one step; the largest of their
    "gradients" are kept."""
    return jax.tree.map(lambda h: _repeated(h, count), histories)


def is_history(path: tuple[Any, ...]) -> bool:
    """True if a key path of `jax.tree_util` leads to a history."""
    return HISTORY_LEAF in path_name(path).split("/")


@jax.custom_vjp
def _tensor_dot(
    x: Float[Array, "m k"], kernel: Float[Array, "k n"], history: Float[Array, "3 h"] | None
) -> Float[Array, "m n"]:
    return _tensor_forward(x, kernel, history)[0]


def _tensor_forward(x: Array, kernel: Array, history: Array | None) -> tuple[Array, Any]:
    amax_x, amax_k = _amax(x), _amax(kernel)
    scale_x = scale_of(amax_x if history is None else history[0].max(), _FORWARD)
    scale_k = scale_of(amax_k if history is None else history[1].max(), _FORWARD)
    qx, qk = quantise(x, scale_x, _FORWARD), quantise(kernel, scale_k, _FORWARD)
    y = _product(qx, qk, (1, 0), scale_x * scale_k, x.dtype)
    return y, (qx, scale_x, kernel, scale_k, (amax_x, amax_k), history)


def _tensor_backward(saved: Any, g: Float[Array, "m n"]) -> tuple[Array, Array, Array | None]:
    qx, scale_x, kernel, scale_k, amax, history = saved
    amax_g = _amax(g)
    scale_g = scale_of(amax_g if history is None else history[2].max(), _BACKWARD)
    qg, qk = quantise(g, scale_g, _BACKWARD), quantise(kernel, scale_k, _FORWARD)
    dx = _product(qg, qk, (1, 1), scale_g * scale_k, g.dtype)
    dk = _product(qx, qg, (0, 0), scale_x * scale_g, g.dtype).astype(kernel.dtype)
    if history is None:
        return dx, dk, None
    return dx, dk, jnp.zeros_like(history).at[:, 0].set(jnp.stack([*amax, amax_g]))


_tensor_dot.defvjp(_tensor_forward, _tensor_backward)


def _product(a: Array, b: Array, contract: tuple[int, int], scale: Array, dtype: Any) -> Array:
    """The form that the GEMM rewriter recognises: a product of bare operands, then a scalar."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    y = jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)
    return y * scale.astype(dtype)


def _amax(x: Array) -> Float[Array, ""]:
    return jnp.abs(x).max().astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeated(history: Float[Array, "*h"], count: int) -> Float[Array, " c *h"]:
    return jnp.broadcast_to(history, (count, *history.shape))


_repeated.defvjp(
    lambda history, count: (_repeated(history, count), None),
    lambda count, _, g: (g.max(0),),
)
