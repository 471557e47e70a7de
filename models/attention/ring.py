"""Attention on a mesh: every device takes its own rows and heads, and where the places of a row are
split over the "context" axis, keys go from device to device.

Ring attention (arXiv 2310.01889) through `merge`: backward sends the keys round once more, with
their gradients, so memory does not grow with the ring. Places are dealt out in short runs, so every
device holds a share of every sample (striped attention, arXiv 2311.09431, deals out single places,
which leaves no block of pairs to skip).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from models.attention.partial import MASKED, Partial, differentiable, merge
from models.inputs.packed_batch import PackedBatch
from models.sharding import ROWS, axis_size

_AXES = (*ROWS, "context", "tensor")
RUN = 64
"""Length of a run of places: one tile of the GPU's kernels. Of lengths from 1 to a device's whole
share, this one left the slowest device the fewest blocks to visit
(`tests/models/attention/test_ring.py`)."""


class Kernel(NamedTuple):
    """Attention on one device: `run(q, k, v, q_segment, kv_segment, q_position, kv_position)`, and
    `gradients(*the same, d_out, lse, shift)` as in `partial.differentiable`. The gradients are also
    right if the keys are only some of those that the log-sum-exp and `shift` account for."""

    run: Callable[..., Partial]
    gradients: Callable[..., tuple[Array, Array, Array]]


def is_split() -> bool:
    """True if the mesh that the program is traced under splits attention in any way."""
    return any(axis_size(axis) > 1 for axis in _AXES)


def spread(kernel: Kernel, arrays: tuple[Any, ...], split_queries: bool) -> Partial:
    """`kernel.run(*arrays)`, rows over `ROWS`, heads over "tensor", keys over "context".

    Queries are split over "context" too, or (`split_queries` false) every device along it has all
    of them and the same result. A single key-value head is shared by the heads of all devices.

    Raises:
      ValueError: heads or places do not divide over their axis.
    """
    q, k = arrays[:2]
    _check(q, k, split_queries)
    context, tensor = axis_size("context"), axis_size("tensor")
    shared = k.shape[2] == 1 and tensor > 1
    query = PartitionSpec(ROWS, "context" if split_queries else None, "tensor")
    key = PartitionSpec(ROWS, "context", None if shared else "tensor")
    specs = (query, key, key, *(PartitionSpec(*s[:2]) for s in (query, key, query, key)))
    on_mesh = partial(jax.shard_map, axis_names=set(_AXES), check_vma=False)
    if context == 1:
        return on_mesh(kernel.run, in_specs=specs, out_specs=query)(*arrays)

    def forward(*arrays: Any) -> Partial:
        return _ring(kernel, *arrays) if split_queries else _joined(kernel.run(*arrays))

    def backward(*arrays: Any) -> tuple[Array, Array, Array]:
        if split_queries:
            d_q, d_k, d_v = _ring_gradients(kernel, *arrays)
        else:
            d_q, d_k, d_v = kernel.gradients(*arrays)
            d_q = jax.lax.psum(d_q, "context")
        return d_q, *(jax.lax.psum((d_k, d_v), "tensor") if shared else (d_k, d_v))

    return differentiable(
        on_mesh(forward, in_specs=specs, out_specs=query),
        on_mesh(backward, in_specs=(*specs, query, query, query), out_specs=(query, key, key)),
    )(*arrays)


def deal(batch: PackedBatch) -> PackedBatch:
    """The batch with the places of its prefixes in another order: runs of up to `RUN` places go to
    the devices along "context" in turn. Segments and positions move along, so the only change is
    which device holds what.

    Raises:
      ValueError: the places do not divide over the axis.
    """
    devices, places = axis_size("context"), batch.prefix_source.shape[1]
    if devices == 1:
        return batch
    if places % devices:
        raise ValueError(
            f"A row's prefix of {places} places does not divide over mesh axis context of size "
            f"{devices}; choose a prefix that is a multiple of {devices}."
        )
    run = math.gcd(places // devices, RUN)

    def dealt(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(len(x), -1, devices, run), 1, 2).reshape(x.shape)

    return replace(
        batch,
        prefix_source=dealt(batch.prefix_source),
        prefix_segment=dealt(batch.prefix_segment),
        prefix_position=dealt(batch.prefix_position),
    )


def append(x: Array, y: Array, axis: int) -> Array:
    """`y` appended to `x` along an axis that is split over "context": each device's share of `y`
    follows its share of `x`, padded with zeros if the shares of `y` are not equal."""
    devices = axis_size("context")
    pad = [(0, 0)] * y.ndim
    pad[axis] = (0, -y.shape[axis] % devices)

    def shares(z: Array) -> Array:
        return z.reshape(*z.shape[:axis], devices, -1, *z.shape[axis + 1 :])

    joined = jnp.concatenate([shares(x), shares(jnp.pad(y, pad))], axis + 1)
    return joined.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _check(q: Array, k: Array, split_queries: bool) -> None:
    sizes = [("query heads", q.shape[2], "tensor"), ("key places", k.shape[1], "context")]
    if k.shape[2] > 1:
        sizes.append(("key-value heads", k.shape[2], "tensor"))
    if split_queries:
        sizes.append(("query places", q.shape[1], "context"))
    for name, count, axis in sizes:
        if count % axis_size(axis):
            raise ValueError(
                f"Attention over {count} {name} does not divide over mesh axis {axis} of size "
                f"{axis_size(axis)}; change the model or its rows, or make mesh.{axis} smaller."
            )


def _ring(kernel: Kernel, q, k, v, q_segment, kv_segment, q_position, kv_position) -> Partial:
    """Attention to the keys of all devices along "context", f32 until all have been seen."""

    def attend(seen: Partial, keys: Any) -> Partial:
        k, v, kv_segment, kv_position = keys
        return merge(seen, kernel.run(q, k, v, q_segment, kv_segment, q_position, kv_position))

    def visit(carry: Any, _: None) -> tuple[Any, None]:
        keys, seen = carry
        return (_pass_on(keys), attend(seen, keys)), None

    nothing = Partial(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], MASKED))
    start = ((k, v, kv_segment, kv_position), nothing)
    (keys, seen), _ = jax.lax.scan(visit, start, length=axis_size("context") - 1)
    out, lse = attend(seen, keys)
    return Partial(out.astype(q.dtype), lse)


def _ring_gradients(
    kernel: Kernel, q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift
) -> tuple[Array, Array, Array]:
    """Gradients as in `_ring`; the sums for keys follow these until back on their own devices."""

    def attend(sums: Any, keys: Any) -> Any:
        k, v, kv_segment, kv_position = keys
        masks = (q_segment, kv_segment, q_position, kv_position)
        return jax.tree.map(jnp.add, sums, kernel.gradients(q, k, v, *masks, d_out, lse, shift))

    def visit(carry: Any, _: None) -> tuple[Any, None]:
        keys, sums = carry
        d_q, *d_keys = attend(sums, keys)
        return (_pass_on(keys), (d_q, *_pass_on(d_keys))), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    start = ((k, v, kv_segment, kv_position), zeros)
    (keys, sums), _ = jax.lax.scan(visit, start, length=axis_size("context") - 1)
    d_q, *d_keys = attend(sums, keys)
    d_k, d_v = _pass_on(d_keys)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _joined(part: Partial) -> Partial:
    """`merge` of the parts of all devices along "context", on each of them."""
    top = jax.lax.pmax(part.lse, "context")
    weight = jnp.exp(part.lse - top)
    out = weight[..., None] * part.out.astype(jnp.float32)
    total, out = jax.lax.psum((weight, out), "context")
    return Partial((out / total[..., None]).astype(part.out.dtype), top + jnp.log(total))


def _pass_on(tree: Any) -> Any:
    """The tree that the previous device along "context" holds."""
    devices = axis_size("context")
    ring = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, "context", ring), tree)
