"""Stacks of layers of one kind: how they run, and how their weights lie in memory.

A stack's weights are stacked, [l, ...], and its layers run as a loop, so that they are compiled
once, are sharded alike, and can be split over stages. A loop copies a layer's weights out of the
stack first; a policy that only acts can have them `apart`, one array per layer.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from models.attention.partial import ATTENTION
from models.layers.layers import QKV, Remat
from models.layers.pipeline import Pipeline, circulate
from models.layers.recomputation import recomputes
from models.sharding import ROWS, axis_size, keep_rows, path_name

Carry = TypeVar("Carry")
Module = TypeVar("Module", bound=nnx.Module)
_UNROLLED = 4
_SMALL = 2**22
"""Entries of an array up to which it is split together with others, by one program."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Apart:
    """A parameter of a stack of L layers as one array per layer."""

    layers: tuple[Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, stacked."""
        return len(self.layers), *self.layers[0].shape


def apart(params: Any, stacked: str, free: bool = False) -> Any:
    """Parameters with the arrays of all stacks `Apart`; only acting can use them.

    Args:
      stacked: a regex that matches (`re.search`) the paths of the stacks' parameters.
      free: deletes arrays of `params` once they are split, so that at most one large array is
        there twice.
    """
    given, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = [w for _, w in given]
    chosen = [i for i, (path, _) in enumerate(given) if re.search(stacked, path_name(path))]
    small = [i for i in chosen if leaves[i].size <= _SMALL]
    for group in (small, *([i] for i in chosen if leaves[i].size > _SMALL)):
        whole = [leaves[i] for i in group]
        split = [Apart(tuple(layers)) for layers in _unstack(whole)]
        if free:
            jax.block_until_ready(split)
            for w in whole:
                w.delete()
        for i, found in zip(group, split, strict=True):
            leaves[i] = found
    return jax.tree.unflatten(tree, leaves)


def layer_of(stacked: Any, layer: int) -> Any:
    """The part of one layer in trees of arrays [L, ...] and of `Apart`."""
    return jax.tree.map(
        lambda w: w.layers[layer] if _is_apart(w) else w[layer], stacked, is_leaf=_is_apart
    )


def layers_of(stacked: Any, first: int, last: int) -> Any:
    """The part of layers `first` to `last` − 1."""

    def part(w: Any) -> Any:
        return Apart(w.layers[first:last]) if _is_apart(w) else w[first:last]

    return jax.tree.map(part, stacked, is_leaf=_is_apart)


def over_layers(function: Callable[[Any], Any], stacked: Any) -> Any:
    """Results of `function` for each layer's parameters, stacked."""
    if not _any_apart(stacked):
        return jax.vmap(function)(stacked)
    return _stack([function(layer_of(stacked, layer)) for layer in range(_depth(stacked))])


def stack_layers(make: Callable[[nnx.Rngs], Module], depth: int, rngs: nnx.Rngs) -> Module:
    """`depth` layers as one module whose parameters have a leading axis of that length."""
    return nnx.split_rngs(splits=depth)(nnx.vmap(make))(rngs)


def scan_layers(
    layer: Callable[..., tuple[Carry, Any]],
    x: Carry,
    stacked: Any,
    remat: Remat = "none",
    rows: tuple[Any, ...] = (),
    cached: tuple[Any, ...] = (),
    pipeline: Pipeline | None = None,
    axes: tuple[str, ...] = ROWS,
    unroll: bool = False,
) -> tuple[Carry, Any]:
    """Runs `x, left = layer(x, weights, *cached, *rows)` from layer to layer. Returns the last x,
    and `left` of all layers, stacked.

    `remat` decides what is kept for backward. `stacked` [L, ...] are weights, `rows` [R, ...] are
    inputs that every layer reads, and `cached` [L, R, ...] are inputs of each layer's own; a layer
    takes nothing else that has rows. Therefore, on a mesh with stages, the layers can run as a
    `pipeline` (None: on all stages alike); with repeats, it replaces remat "none" by "dots". On
    such a mesh, everything that is cached must have rows. The rows of x are split over `axes`.

    Layers whose weights are `Apart` run one after the other, and nothing is recomputed. A few
    layers are also unrolled, which saves a fifth of a small model's step (no copies of what
    backward needs). Many layers are unrolled only if `unroll` is true, because of compile time.
    """
    if _any_apart(stacked):
        return _one_by_one(layer, x, stacked, rows, cached, _depth(stacked))
    pipeline = pipeline if axis_size("stage") > 1 else None
    remat = remat if recomputes() else "none"
    if pipeline is not None and remat == "none" and pipeline.repeats > 1:
        remat = "dots"

    def scan(layer: Any, x: Carry, stacked: Any, cached: Any, rows: Any) -> tuple[Carry, Any]:
        def step(x: Carry, xs: Any) -> tuple[Carry, Any]:
            x, left = layer(keep_rows(x, axes), xs[0], *xs[1], *rows)
            return keep_rows(x, axes), left

        if remat != "none":  # outside a loop, XLA's CSE would undo the recomputation
            step = jax.checkpoint(step, policy=_POLICIES[remat], prevent_cse=unroll)
        few = remat == "none" and len(jax.tree.leaves(stacked)[0]) <= _UNROLLED
        return jax.lax.scan(step, x, (stacked, cached), unroll=unroll or few)

    if pipeline is not None:
        return circulate(scan, layer, x, stacked, cached, rows, pipeline)
    return scan(layer, x, stacked, cached, rows)


def scan_but_last(
    layer: Callable[..., tuple[Carry, Any]],
    x: Carry,
    stacked: Any,
    remat: Remat = "none",
    rows: tuple[Any, ...] = (),
    cached: tuple[Any, ...] = (),
    unroll: bool = False,
) -> tuple[Carry, Any]:
    """Runs all layers but the last, as `scan_layers` does on a mesh without stages. It has
    reverse-mode derivatives alone, and `layer` must not close over anything differentiated.

    Where nothing is differentiated, each layer's weights and `cached` are read where they lie. A
    loop over a slice of them would begin with a copy of it, which in backward is made anyway.
    """
    if _any_apart(stacked):
        return _one_by_one(layer, x, stacked, rows, cached, _depth(stacked) - 1)

    def sliced(x: Carry, own: Any, rows: tuple[Any, ...]) -> tuple[Carry, Any]:
        weights, cached = jax.tree.map(lambda w: w[:-1], own)
        return scan_layers(layer, x, weights, remat, rows, cached, unroll=unroll)

    @jax.custom_vjp
    def run(x: Carry, own: Any, rows: tuple[Any, ...]) -> tuple[Carry, Any]:
        def indexed(x: Carry, at: Int[Array, ""], *rows: Any) -> tuple[Carry, Any]:
            weights, cached = jax.tree.map(
                lambda w: jax.lax.dynamic_index_in_dim(w, at, keepdims=False), own
            )
            return layer(x, weights, *cached, *rows)

        at = jnp.arange(len(jax.tree.leaves(stacked)[0]) - 1)
        return scan_layers(indexed, x, at, rows=rows, unroll=unroll)

    run.defvjp(partial(jax.vjp, sliced), lambda back, given: back(given))
    return run(x, (stacked, cached), rows)


def _one_by_one(
    layer: Callable[..., tuple[Carry, Any]],
    x: Carry,
    stacked: Any,
    rows: tuple[Any, ...],
    cached: tuple[Any, ...],
    count: int,
) -> tuple[Carry, Any]:
    def run(x: Carry, number: int) -> tuple[Carry, Any]:
        return layer(x, *layer_of((stacked, *cached), number), *rows)

    left = []
    for number in range(count):
        x, last = run(x, number)
        left.append(last)
    if not left:
        nothing = jax.eval_shape(lambda: run(x, 0)[1])
        return x, jax.tree.map(lambda s: jnp.zeros((0, *s.shape), s.dtype), nothing)
    return x, _stack(left)


@jax.jit
def _unstack(arrays: list[Array]) -> list[list[Array]]:
    return [list(jnp.unstack(w)) for w in arrays]


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _depth(stacked: Any) -> int:
    return jax.tree.leaves(stacked, is_leaf=_is_apart)[0].shape[0]


def _any_apart(stacked: Any) -> bool:
    return any(map(_is_apart, jax.tree.leaves(stacked, is_leaf=_is_apart)))


def _is_apart(x: Any) -> bool:
    return isinstance(x, Apart)


_names = jax.checkpoint_policies.save_only_these_names
_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _names(ATTENTION)
    ),
    "qkv": _names(QKV, ATTENTION),
    "attention": _names(ATTENTION),
    "full": jax.checkpoint_policies.nothing_saveable,
}
