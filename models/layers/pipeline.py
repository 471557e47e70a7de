"""A circular pipeline over stacked layers: each stage of the mesh holds some of the layers, and
micro-batches of rows pass from stage to stage, so that no stage waits for a whole batch.

GPipe's schedule (arXiv 1811.06965) is one loop that every stage runs, differentiated by JAX. With
repeats, a micro-batch goes around the stages several times, which shortens the wait at both ends
(Megatron-LM's interleaved stages, arXiv 2104.04473).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from models.layers.float8.fp8 import copies, split_histories
from models.layers.functional import fill
from models.sharding import ROWS, Rules, axis_size, constrain

PyTree = Any
Layer = Callable[..., tuple[PyTree, PyTree]]
Scan = Callable[..., tuple[PyTree, PyTree]]
_STAGED = PartitionSpec("stage")


@dataclass(frozen=True)
class Pipeline:
    """Schedule of rows over the mesh's stages, if it has several: the number of micro-batches (0:
    as many as stages), and how many times each goes around the stages. More of either make the
    bubble smaller. But more micro-batches also make the products smaller, and repeats make weights
    travel (see `circulate`)."""

    microbatches: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.microbatches < 0 or self.repeats < 1:
            raise ValueError(
                f"pipeline.microbatches is {self.microbatches} and pipeline.repeats is "
                f"{self.repeats}; they must be at least 0 and 1."
            )

    def on(self, stages: int) -> "Pipeline":
        """The pipeline with its number of micro-batches set for that many stages."""
        return Pipeline(self.microbatches or stages, self.repeats)

    def bubble(self, stages: int) -> float:
        """Share of microbatches · repeats + stages − 1 ticks in which a stage has nothing to do:
        the last stage waits at the beginning, the first at the end."""
        waiting = stages - 1
        return waiting / (self.on(stages).microbatches * self.repeats + waiting)


def check_pipeline(pipeline: Pipeline, stages: int, depth: int, rows: int, row_shards: int) -> None:
    """Raises ValueError unless layers divide over stages and repeats, rows divide over
    micro-batches and row shards, and repeats have at least as many micro-batches as stages."""
    micro, repeats = pipeline.on(stages).microbatches, pipeline.repeats
    _check_depth(depth, stages, repeats)
    if rows % (micro * row_shards):
        raise ValueError(
            f"{rows} rows at a time do not divide over {row_shards} devices × {micro} "
            f"micro-batches of the pipeline; use a multiple of {micro * row_shards} rows, or "
            "change pipeline.microbatches."
        )
    if repeats > 1 and micro < stages:
        raise ValueError(
            f"pipeline.repeats is {repeats} with {micro} micro-batches on {stages} stages, so the "
            f"second repeat would begin before the first ends; use at least {stages} "
            "micro-batches."
        )


def circulate(
    scan: Scan,
    layer: Layer,
    x: PyTree,
    weights: PyTree,
    cached: tuple[PyTree, ...],
    rows: tuple[PyTree, ...],
    pipeline: Pipeline,
) -> tuple[PyTree, PyTree]:
    """Computes `scan(layer, x, weights, cached, rows)`, with each layer on its own stage.

    Args:
      scan: takes some rows through the layers whose weights it is given; with repeats, it keeps
        none of these weights for backward.
      x, rows: trees of arrays [R, ...], the same on every stage. Row r belongs to micro-batch r
        modulo their number, so that no row leaves its device.
      weights: tree of arrays [L, ...]; stage s of S holds layers s·L/S to (s + 1)·L/S.
      cached: tree of arrays [L, R, ...], split over stages as weights are.

    Returns x after the last layer, on every stage, and what the layers leave, [L, R, ...], each on
    its layer's stage. Only x travels between stages. With repeats, however, a stage works on layers
    that are not adjacent, so once per call a permutation moves its share of weights, of cached
    arrays and of what layers leave (and moves gradients back).

    Gradients of weights are summed over micro-batches; in a float8 history
    (`models.layers.float8.fp8`) the largest magnitudes are kept. A stage that has nothing to do
    computes on whatever arrives (zeros, or old rows), and nothing reads the result.

    Raises:
      ValueError: as `check_pipeline`.
    """
    stages, batch = axis_size("stage"), len(jax.tree.leaves(x)[0])
    shards = math.prod(axis_size(axis) for axis in ROWS)
    check_pipeline(pipeline, stages, len(jax.tree.leaves(weights)[0]), batch, shards)
    micro = pipeline.on(stages).microbatches
    run = jax.shard_map(
        partial(_stage, scan, layer, stages, micro, pipeline.repeats),
        in_specs=_STAGED,
        out_specs=_STAGED,
        axis_names={"stage"},
        check_vma=False,
    )
    split = partial(_split, micro)

    def everywhere(z: Array) -> Array:
        return _placed(jnp.broadcast_to(z, (stages, *z.shape)), 2)

    x, rows = jax.tree.map(lambda z: everywhere(split(z, 0)), (x, rows))
    cached = jax.tree.map(lambda z: _placed(split(z, 1), 2), cached)
    out, left = run(weights, cached, x, rows)
    out = jax.tree.map(lambda z: _merged(jax.lax.reduce_sum(z, (0,)), 0), out)
    return out, jax.tree.map(lambda z: _merged(z, 1), left)


def on_each_stage(function: Callable[[Array, PyTree], PyTree], x: Array, stacked: PyTree) -> PyTree:
    """`function(x, stacked)`, arrays [L, ...], for layers that all read the same x [R, ...] and
    nothing of each other: every stage computes its own layers for all rows.

    Raises:
      ValueError: layers do not divide over stages.
    """
    stages = axis_size("stage")
    if stages == 1:
        return function(x, stacked)
    _check_depth(len(jax.tree.leaves(stacked)[0]), stages)
    run = jax.shard_map(
        lambda x, stacked: function(x[0], stacked),
        in_specs=_STAGED,
        out_specs=_STAGED,
        axis_names={"stage"},
        check_vma=False,
    )
    return run(_placed(jnp.broadcast_to(x, (stages, *x.shape)), 1), stacked)


def staged(rules: Rules, stacks: str) -> Rules:
    """Sharding rules that also split, over the stages, the leading axis of every parameter whose
    path begins with the pattern `stacks`. For these, `rules` must not split that axis."""
    return tuple(
        rule
        for pattern, spec in rules
        for rule in (
            (rf"^(?!{stacks}).*?(?:{pattern})", spec),
            (rf"^(?={stacks}).*?(?:{pattern})", PartitionSpec("stage", *spec[1:])),
        )
    )


def _stage(
    scan: Scan,
    layer: Layer,
    stages: int,
    micro: int,
    repeats: int,
    weights: PyTree,
    cached: PyTree,
    x: PyTree,
    rows: PyTree,
) -> tuple[PyTree, PyTree]:
    """One stage's share of `circulate`: weights [L/S, ...], cached [L/S, M, m, ...], x and rows [1,
    M, m, ...]. Returns x [1, M, m, ...], zeros except on the last stage, and [L/S, M, m, ...]."""
    stage, total = jax.lax.axis_index("stage"), micro * repeats
    ring = [(s, (s + 1) % stages) for s in range(stages)]
    x, rows = jax.tree.map(lambda z: z[0], (x, rows))

    def late(z: Array) -> Array:
        """[M · repeats, ...] by turn to [ticks, ...]: stage s begins at tick s."""
        room = jnp.zeros((total + stages - 1, *z.shape[1:]), z.dtype)
        return jax.lax.dynamic_update_slice_in_dim(room, z, stage, 0)

    def by_turn(z: Array) -> Array:
        """[L/S, M, ...] to [M · repeats, layers, ...]."""
        z = _dealt(z, stages, repeats)
        return late(jnp.moveaxis(z, 2, 1).reshape(total, z.shape[1], *z.shape[3:]))

    def by_layer(z: Array) -> Array:
        """[ticks, layers, ...] to [L/S, M, ...]."""
        z = jax.lax.dynamic_slice_in_dim(z, stage, total).reshape(repeats, micro, *z.shape[1:])
        return _dealt(jnp.moveaxis(z, 1, 2), stages, repeats, back=True)

    def by_micro_batch(history: Array) -> Array:
        """[repeats, layers, ...] to [ticks, layers, ...]."""
        each = jnp.moveaxis(copies(history, micro), 0, 1)
        return late(each.reshape(total, *history.shape[1:]))

    weights = jax.tree.map(lambda w: _dealt(w, stages, repeats), weights)
    per_turn = jax.tree.leaves(weights)[0].shape[1]
    history, weights = split_histories(weights)
    history = jax.tree.map(by_micro_batch, history)
    weights = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), weights)

    def picked(x: PyTree, xs: tuple[Array, PyTree], *read: PyTree) -> tuple[PyTree, PyTree]:
        mine = jax.tree.map(lambda w: _at(w, xs[0]), weights)
        return layer(x, fill(mine, xs[1]), *read)

    def layers(x: PyTree, turn: Array, history: PyTree, *read: PyTree) -> tuple[PyTree, PyTree]:
        """With repeats, each layer selects its own weights and keeps none of them; otherwise those
        of every tick would be kept for backward."""
        if repeats == 1:
            return scan(layer, x, fill(weights, history), *read)
        index = turn * per_turn + jnp.arange(per_turn)
        return scan(picked, x, (index, history), *read)

    def tick(carry: tuple[PyTree, PyTree], xs: Any) -> tuple[Any, Any]:
        given, line = carry
        t, history, *read = xs
        came = jax.tree.map(lambda z: jax.lax.ppermute(z, "stage", ring), given)
        again, line = _queue(line, came, t) if repeats > 1 else (came, line)
        first = jax.tree.map(
            lambda new, old: jnp.where(t < micro, _at(new, jnp.minimum(t, micro - 1)), old),
            x,
            again,
        )
        taken = jax.tree.map(lambda f, c: _placed(jnp.where(stage == 0, f, c), 0), first, came)
        turn = jnp.clip((t - stage) // micro, 0, repeats - 1)
        given, left = layers(taken, turn, history, *read)
        return (given, line), (given, left)

    still = jax.tree.map(lambda z: jnp.zeros_like(z[0]), x)
    wait = micro - stages if repeats > 1 else 0
    line = jax.tree.map(lambda z: jnp.zeros((wait, *z.shape), z.dtype), still)
    read = (
        jax.tree.map(by_turn, cached),
        jax.tree.map(lambda z: late(jnp.concatenate([z] * repeats)), rows),
    )
    ticks = jnp.arange(total + stages - 1)
    _, (given, left) = jax.lax.scan(tick, (still, line), (ticks, history, *read))
    last = stage == stages - 1
    out = jax.tree.map(lambda z: jnp.where(last, z[-micro:], 0)[None], given)
    return out, jax.tree.map(by_layer, left)


def _check_depth(depth: int, stages: int, repeats: int = 1) -> None:
    if depth % (stages * repeats):
        raise ValueError(
            f"A stack of {depth} layers does not divide over {stages} stages × {repeats} repeats; "
            f"choose a mesh.stage (and pipeline.repeats) whose product divides {depth}."
        )


def _queue(line: PyTree, came: PyTree, t: Array) -> tuple[PyTree, PyTree]:
    """The tree of n ticks ago, and the queue of n with the newest tree added; n may be 0."""
    n = len(jax.tree.leaves(line)[0])
    if not n:
        return came, line
    slot = t % n
    put = partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=0)
    return jax.tree.map(lambda z: _at(z, slot), line), jax.tree.map(put, line, came)


def _dealt(z: Array, stages: int, repeats: int, back: bool = False) -> Array:
    """Converts a stage's share [repeats · layers, ...] of arrays split over stages in order to the
    share [repeats, layers, ...] that it works on. Block b of layers is stored on stage b //
    repeats, and stage b % stages works on it in turn b // stages. `back` does the inverse."""
    z = z if back else z.reshape(repeats, -1, *z.shape[1:])
    if repeats > 1:
        z = _permuted(z, stages, repeats, back)
    return z.reshape(-1, *z.shape[2:]) if back else z


def _permuted(z: Array, stages: int, repeats: int, back: bool) -> Array:
    """Permutes in a round for each repeat; in each, every stage sends and receives one block."""
    stage, together = jax.lax.axis_index("stage"), math.gcd(stages, repeats)
    out = jnp.zeros_like(z)
    for turn in range(repeats):
        slot = [(turn + s * together // stages) % repeats for s in range(stages)]
        block = [s * repeats + slot[s] for s in range(stages)]
        pairs = [(s, b % stages) for s, b in enumerate(block)]
        arrives = [0] * stages
        for b in block:
            arrives[b % stages] = b // stages
        if back:
            pairs, slot, arrives = [(b, a) for a, b in pairs], arrives, slot
        sent = _at(z, jnp.array(slot)[stage])
        got = jax.lax.ppermute(sent, "stage", pairs)
        out = jax.lax.dynamic_update_index_in_dim(out, got, jnp.array(arrives)[stage], 0)
    return out


def _at(z: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(z, index, keepdims=False)


def _split(micro: int, z: Array, axis: int) -> Array:
    """[..., R, ...] to [..., M, R / M, ...]."""
    shape = (*z.shape[:axis], z.shape[axis] // micro, micro, *z.shape[axis + 1 :])
    return jnp.moveaxis(z.reshape(shape), axis + 1, axis)


def _merged(z: Array, axis: int) -> Array:
    """The inverse of `_split`."""
    z = jnp.moveaxis(z, axis, axis + 1)
    return _placed(z.reshape(*z.shape[:axis], -1, *z.shape[axis + 2 :]), axis)


def _placed(z: Array, axis: int) -> Array:
    """Shards rows, along `axis`, over their mesh axes; the first of several axes over stages."""
    spec = [(ROWS,), ("stage", ROWS), ("stage", None, ROWS)][axis]
    free = (PartitionSpec.UNCONSTRAINED,) * (z.ndim - axis - 1)
    return constrain(z, *spec, *free)
