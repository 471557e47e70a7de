"""Attention block by block: each block of queries visits only the blocks of keys it may see.

Softmax is accumulated online (FlashAttention, arXiv 2205.14135) and backward recomputes the weights
from the log-sum-exp, so memory is linear in the row and time follows the sum of the squared segment
lengths, in any order. Plain XLA, for every backend.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.attention.partial import MASKED, Partial, differentiable
from models.attention.partition import by_row

_SMALLEST, _LARGEST = 40, 96


def blocked(
    q: Float[Array, "b q n d"],
    k: Float[Array, "b k g d"],
    v: Float[Array, "b k g d"],
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    q_position: Int[Array, "b q"] | None = None,
    kv_position: Int[Array, "b k"] | None = None,
) -> Partial:
    """Attention with the arguments of `attend`; causal where positions are given."""
    return _blocked(q, k, v, q_segment, kv_segment, q_position, kv_position)


def block_length(length: int) -> int:
    """The largest multiple of 8 up to 96 that pads a row of this length least."""
    if length <= _LARGEST:
        return length
    return min(range(_LARGEST, _SMALLEST - 1, -8), key=lambda block: -length % block)


def meets(
    q_segment: Int[Array, "b i l"],
    kv_segment: Int[Array, "b j m"],
    q_position: Int[Array, "b i l"] | None = None,
    kv_position: Int[Array, "b j m"] | None = None,
) -> Bool[Array, "b i j"]:
    """True if some query of block i may see some key of block j, judged by the spans of both."""

    def lowest(x: Array, segment: Array) -> Array:
        return jnp.where(segment == 0, jnp.iinfo(jnp.int32).max, x).min(-1)

    low, high = lowest(q_segment, q_segment)[:, :, None], q_segment.max(-1)[:, :, None]
    needed = (low <= kv_segment.max(-1)[:, None]) & (
        lowest(kv_segment, kv_segment)[:, None] <= high
    )
    if q_position is None or kv_position is None:
        return needed
    return needed & (lowest(kv_position, kv_segment)[:, None] <= q_position.max(-1)[:, :, None])


def visits(needed: Bool[Array, "b i j"]) -> tuple[Int[Array, "b i j"], Int[Array, "b i"]]:
    """The indices j for each i, needed ones first and in order, and the number of needed ones."""
    return jnp.argsort(~needed, axis=-1, stable=True), needed.sum(-1)


def cut(x: Array, block: int) -> Array:
    """[b, t, ...] in blocks along t, padded with zeros: [b, blocks, block, ...]."""
    if spare := -x.shape[1] % block:
        x = jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


class _Queries(NamedTuple):
    """Blocks of queries of all rows, the heads of a place beside each other: leading axis i = b ×
    blocks, arrays [i, g, l × h, ...]. Masks are segments and, where causal, positions; the
    blocks of keys to visit are the first `visited` of `order`."""

    arrays: tuple[Array, ...]
    masks: tuple[Int[Array, "i l"], Int[Array, "i l"] | None]
    order: Int[Array, "i j"]
    visited: Int[Array, " i"]


class _Keys(NamedTuple):
    """Blocks of keys and values of all rows: leading axis j = b × blocks."""

    k: Float[Array, "j g m d"]
    v: Float[Array, "j g m d"]
    masks: tuple[Int[Array, "j m"], Int[Array, "j m"] | None]

    def at(self, index: Int[Array, ""]) -> "_Keys":
        return jax.tree.map(lambda x: _at(x, index), self)


def _at(x: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _sides(
    arrays: tuple[Array, ...], k: Array, v: Array, q_segment, kv_segment, q_position, kv_position
) -> tuple[_Queries, _Keys]:
    mine, theirs = block_length(q_segment.shape[1]), block_length(k.shape[1])
    q_masks = jax.tree.map(lambda x: cut(x, mine), (q_segment, q_position))
    kv_masks = jax.tree.map(lambda x: cut(x, theirs), (kv_segment, kv_position))
    order, count = visits(meets(q_masks[0], kv_masks[0], q_masks[1], kv_masks[1]))
    order = order + jnp.arange(len(k))[:, None, None] * kv_masks[0].shape[1]

    def flat(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def grouped(x: Array) -> Array:
        x = flat(cut(x, mine))
        x = jnp.moveaxis(x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:]), 2, 1)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    queries = _Queries(tuple(map(grouped, arrays)), flat(q_masks), flat(order), flat(count))
    k, v = (jnp.moveaxis(flat(cut(x, theirs)), 2, 1) for x in (k, v))
    return queries, _Keys(k, v, flat(kv_masks))


def _in_place(x: Array, like: Array) -> Array:
    """Undoes the grouping and cutting of queries: [i, g, l × h, ...] as [b, q, n, ...]."""
    b, length, heads = like.shape[:3]
    x = x.reshape(*x.shape[:2], -1, heads // x.shape[1], *x.shape[3:])
    return jnp.moveaxis(x, 1, 2).reshape(b, -1, heads, *x.shape[4:])[:, :length]


def _logits(query: _Queries, key: _Keys) -> Float[Array, "g lh m"]:
    """Scaled logits; where the key is hidden, `MASKED` is added."""
    (segment, position), (kv_segment, kv_position) = query.masks, key.masks
    seen = (segment[:, None] == kv_segment) & (segment[:, None] != 0)
    if position is not None and kv_position is not None:
        seen &= kv_position <= position[:, None]
    logits = _product("gqd,gkd->gqk", query.arrays[0], key.k) * key.k.shape[-1] ** -0.5
    groups, _, keys = logits.shape
    by_head = logits.reshape(groups, len(segment), -1, keys)
    return (by_head + jnp.where(seen, 0.0, MASKED)[:, None]).reshape(logits.shape)


def _product(how: str, x: Array, y: Array) -> Array:
    """A matrix product in the dtype of the inputs, accumulated in f32."""
    return jnp.einsum(how, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


@by_row
def _forward(q, k, v, q_segment, kv_segment, q_position, kv_position) -> Partial:
    queries, keys = _sides((q,), k, v, q_segment, kv_segment, q_position, kv_position)

    def rows(query: _Queries) -> tuple[Array, Array]:
        def one(visit: Array, carry: Any) -> Any:
            top, total, out = carry
            key = keys.at(query.order[visit])
            logits = _logits(query, key)
            new_top = jnp.maximum(top, logits.max(-1))
            weights = jnp.exp(logits - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            out = out * shrink[..., None] + _product("gqk,gkd->gqd", weights, key.v)
            return new_top, total * shrink + weights.sum(-1), out

        shape = query.arrays[0].shape
        start = (jnp.full(shape[:2], MASKED / 2), jnp.zeros(shape[:2]), jnp.zeros(shape))
        top, total, out = jax.lax.fori_loop(0, query.visited, one, start)
        safe = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(safe), MASKED)
        return (out / safe[..., None]).astype(q.dtype), lse

    out, lse = jax.lax.map(rows, queries)
    return Partial(_in_place(out, q), _in_place(lse, q))


@by_row
def blocked_gradients(q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift):
    arrays = (q, d_out, lse, shift)
    queries, keys = _sides(arrays, k, v, q_segment, kv_segment, q_position, kv_position)
    scale = q.shape[-1] ** -0.5

    def rows(sums: tuple[Array, Array], query: _Queries) -> tuple[tuple[Array, Array], Array]:
        q_block, d_block, lse_block, shift_block = query.arrays

        def one(visit: Array, carry: Any) -> Any:
            d_q, d_k, d_v = carry
            j = query.order[visit]
            key = keys.at(j)
            weights = jnp.exp(_logits(query, key) - lse_block[..., None])
            d_weights = _product("gqd,gkd->gqk", d_block, key.v)
            d_logits = weights * (d_weights - shift_block[..., None]) * scale
            d_q = d_q + _product("gqk,gkd->gqd", d_logits, key.k)
            d_k = _add_at(d_k, j, _product("gqk,gqd->gkd", d_logits, q_block))
            return d_q, d_k, _add_at(d_v, j, _product("gqk,gqd->gkd", weights, d_block))

        start = (jnp.zeros(q_block.shape), *sums)
        d_q, d_k, d_v = jax.lax.fori_loop(0, query.visited, one, start)
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = jnp.zeros(keys.k.shape)
    sums, d_q = jax.lax.scan(rows, (zeros, zeros), queries)
    d_k, d_v = (
        jnp.moveaxis(x, 1, 2).reshape(len(k), -1, *k.shape[2:])[:, : k.shape[1]].astype(k.dtype)
        for x in sums
    )
    return _in_place(d_q, q), d_k, d_v


def _add_at(x: Array, index: Array, term: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, _at(x, index) + term, index, 0)


_blocked = differentiable(_forward, blocked_gradients)
