"""Calibrated quantisation of kernels (GPTQ, arXiv 2210.17323): rows that are not rounded yet
compensate for the rounding error of a row of a matrix, as far as their inputs correlate.

For this, products of the inputs of each kernel are summed while the policy, not yet rounded, acts
on observations of its robot. They are kept only for rows in the same group of 1,024, so they take
about as much memory as the kernels.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.layers.quantized import (
    CODES,
    Kernel,
    Kind,
    inner_size,
    names,
    quantize_kernel,
    scales_of,
)
from models.sharding import path_name

GROUP, _BLOCK = 1024, 128
_EXACT = jax.lax.Precision.HIGHEST
_DAMPING = 0.03
"""Share of the mean second moment added to each, so that rare inputs are not relied on."""

Moments = Mapping[str, Float[np.ndarray, "_l _g _k _k"]]
"""Sums of products of inputs, by the kernel's path; the axes are layer, group of rows, row, row."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watched:
    """Stacked kernels, or one of them, that report the products of their inputs to `report(name,
    layer, products)` at every multiplication."""

    kernel: Float[Array, "..."]
    layer: Int[Array, "..."]
    name: str = field(metadata={"static": True})
    report: Callable[[str, Array, Array], None] = field(metadata={"static": True})


def watched(params: Any, pattern: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The parameters with the stacked kernels that `pattern` names wrapped in `Watched`, and their
    moments, 0 at first. Computations with these parameters add to the moments; the sums are
    complete once `jax.effects_barrier` returns."""
    moments: dict[str, np.ndarray] = {}

    def tell(name: str, layer: Array, products: Array) -> None:
        moments[name][int(layer)] += np.asarray(products)

    def leaf(path: tuple[Any, ...], kernel: Array) -> Any:
        name = path_name(path)
        if not names(pattern, name):
            return kernel
        group, groups = _groups(inner_size(name, kernel.shape))
        moments[name] = np.zeros((len(kernel), groups, group, group), np.float32)
        return Watched(kernel, jnp.arange(len(kernel)), name, tell)

    return jax.tree_util.tree_map_with_path(leaf, params), moments


def watched_dot(x: Float[Array, "*b i"], kernel: Watched) -> Float[Array, "*b o"]:
    """x @ kernel of one layer in x's dtype."""
    inner = x.shape[-1]
    group, groups = _groups(inner)
    flat = jnp.pad(x.reshape(-1, inner), ((0, 0), (0, group * groups - inner)))
    parts = flat.reshape(len(flat), groups, group).astype(jnp.float32)
    products = jnp.einsum("ngi,ngj->gij", parts, parts, precision=_EXACT)
    jax.debug.callback(partial(kernel.report, kernel.name), kernel.layer, products)
    return x @ kernel.kernel.reshape(inner, -1).astype(x.dtype)


def calibrated_kernel(
    moments: Moments, path: str, kernel: Float[Array, "l i *o"], kind: Kind
) -> Kernel:
    """Quantises the stacked kernels at `path` with the same scales as without calibration. GPTQ
    chooses the numbers under these scales, in blocks of 128 rows, in order. A layer that multiplied
    nothing is rounded number by number.

    Raises:
      ValueError: as `quantize_kernel`, or its inputs were not finite.
    """
    made: Any = quantize_kernel(path, kernel, kind)
    seen = moments[path]
    if not np.isfinite(seen).all():
        raise ValueError(f"{path}: inputs are not finite; the policy cannot be calibrated.")
    inner = inner_size(path, kernel.shape)
    flat = kernel.reshape(len(kernel), inner, -1).astype(jnp.float32)
    scales = jax.vmap(lambda layer: scales_of(layer, inner))(made)
    layers = [_rounded(*own, kind) for own in zip(flat, seen, scales, strict=True)]
    q = CODES[kind].packed(jnp.stack(layers))
    return replace(made, q=q.reshape(made.q.shape))


@partial(jax.jit, static_argnames="kind")
def _rounded(
    flat: Float[Array, "i o"],
    moments: Float[Array, "g k k"],
    scales: Float[Array, "i o"],
    kind: Kind,
) -> Array:
    """Codes of a layer's matrix, [i, o]."""
    groups, group, _ = moments.shape
    lacking = ((0, groups * group - len(flat)), (0, 0))
    shape = groups, group, flat.shape[1]
    rows, each = jnp.pad(flat, lacking), jnp.pad(scales, lacking, constant_values=1.0)
    own_rows = jnp.minimum(len(flat) - jnp.arange(groups) * group, group)  # the last may be short
    diagonal = jnp.trace(moments, axis1=1, axis2=2) / own_rows * _DAMPING
    steadying = jnp.where(diagonal > 0, diagonal, 1.0)[:, None, None] * jnp.eye(group)
    given = rows.reshape(shape), each.reshape(shape), moments + steadying
    codes = jax.lax.map(lambda own: _group(own[0], own[1], own[2], kind), given)
    return codes.reshape(-1, flat.shape[1])[: len(flat)]


def _group(
    rows: Float[Array, "k o"], scales: Float[Array, "k o"], moments: Float[Array, "k k"], kind: Kind
) -> Array:
    """Codes of rows that compensate for each other's errors, from damped moments. `share` is the
    upper Cholesky factor of their inverse: `share[i, j]` is what row j loses to compensate for an
    error of row i in units of `share[i, i]`."""
    codes = CODES[kind]
    share = jnp.linalg.cholesky(jnp.linalg.inv(moments), upper=True)

    def block(b: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        left, found = carried
        first = b * _BLOCK
        own = jax.lax.dynamic_slice_in_dim(share, first, _BLOCK)
        within = jax.lax.dynamic_slice_in_dim(own, first, _BLOCK, axis=1)
        scale = jax.lax.dynamic_slice_in_dim(scales, first, _BLOCK)

        def row(i: Array, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            left, found, errors = carried
            code = codes.code(left[i] / scale[i])
            error = (left[i] - codes.number(code) * scale[i]) / within[i, i]
            left = left - within[i][:, None] * error
            return left, found.at[i].set(code), errors.at[i].set(error)

        mine = jax.lax.dynamic_slice_in_dim(left, first, _BLOCK)
        begun = mine, jnp.zeros(mine.shape, found.dtype), jnp.zeros(mine.shape)
        _, coded, errors = jax.lax.fori_loop(0, _BLOCK, row, begun)
        found = jax.lax.dynamic_update_slice_in_dim(found, coded, first, axis=0)
        return left - jnp.matmul(own.T, errors, precision=_EXACT), found

    found = jnp.zeros(rows.shape, codes.code(rows[:1, :1]).dtype)
    return jax.lax.fori_loop(0, len(rows) // _BLOCK, block, (rows, found))[1]


def _groups(inner: int) -> tuple[int, int]:
    """Number of rows in a group (whole blocks), and number of groups."""
    group = min(GROUP, -(-inner // _BLOCK) * _BLOCK)
    return group, math.ceil(inner / group)
