"""Token-wise layers, computed a few tokens at a time and again for backward, so that a wide layer's
result for all tokens never exists as a whole (StreamBP, arXiv 2506.03077).

On a mesh every device takes the tokens it holds: weights are gathered once before the first chunk
and their gradients summed once after the last, not in every iteration.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from models.layers.float8.fp8 import copies, split_histories
from models.layers.functional import fill
from models.layers.recomputation import recomputes
from models.sharding import ROWS, axis_size

PyTree = Any


def in_chunks(
    function: Callable[..., Float[Array, "n o"]],
    modules: tuple[nnx.Module, ...],
    x: Float[Array, "r *b i"],
    size: int,
) -> Float[Array, "r *b o"]:
    """`function(*modules, x)` of the tokens x, `size` at a time on each device (0: all at once)."""
    if not size:
        return function(*modules, x)
    graphs, weights = zip(*map(nnx.split, modules), strict=True)

    def chunk(weights: PyTree, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
        return function(*map(nnx.merge, graphs, weights), x)

    def run(weights: PyTree, x: Array) -> Array:
        out = chunked(chunk, weights, x.reshape(-1, x.shape[-1]), size)
        return out.reshape(*x.shape[:-1], -1)

    return on_each_device(run, weights, x)


def chunked(
    function: Callable[[PyTree, PyTree], Array], weights: PyTree, tokens: PyTree, size: int
) -> Array:
    """`function(weights, tokens)`, arrays [n, ...], at most `size` tokens at a time; zero-padded.

    Gradients of weights are summed over chunks; in the float8 histories among them
    (`models.layers.float8.fp8`) the largest magnitudes are kept.
    """
    length = len(jax.tree.leaves(tokens)[0])
    count = -(-length // size)
    if count <= 1:
        return function(weights, tokens)
    histories, others = split_histories(weights)

    def some(xs: tuple[PyTree, PyTree]) -> Array:
        return function(fill(xs[0], others), xs[1])

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, -length % count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, -1, *x.shape[1:])

    xs = (copies(histories, count), jax.tree.map(cut, tokens))
    chunk = jax.checkpoint(some, prevent_cse=False) if recomputes() else some
    out = jax.lax.map(chunk, xs)
    return out.reshape(-1, *out.shape[2:])[:length]


def on_each_device(
    function: Callable[..., Array], weights: PyTree, *rows: Shaped[Array, "r ..."]
) -> Float[Array, "r ..."]:
    """`function(weights, *rows)` of the rows that each device holds, and of its places (the
    dimension after) if these divide over "context". Arrays split over "tensor" stay split."""
    places = [x.shape[1] for x in rows if x.ndim > 1]
    axes = (*ROWS, "context") if all(p % axis_size("context") == 0 for p in places) else ROWS
    devices = math.prod(map(axis_size, axes))
    if devices == 1:
        return function(weights, *rows)
    histories, others = split_histories(weights)
    spec = PartitionSpec(ROWS, *axes[2:])

    def run(histories: PyTree, others: PyTree, *rows: Array) -> Array:
        mine = jax.tree.map(lambda h: h[0], histories)
        return function(fill(mine, others), *rows)

    return jax.shard_map(
        run,
        in_specs=(PartitionSpec(axes), PartitionSpec(), *[spec] * len(rows)),
        out_specs=spec,
        axis_names=set(axes),
        check_vma=False,
    )(copies(histories, devices), others, *rows)
