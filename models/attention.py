"""One attention for everything: a query sees a key iff their segment ids are equal and not 0.

Every implementation can return the log-sum-exp of its logits, and `merge` joins attentions over
disjoint key sets exactly from it. That identity (Milakov and Gimelshein, arXiv 1805.02867;
FlashAttention, arXiv 2205.14135) serves the prefix/suffix split, the sampler's key-value cache, and
several noised chunks that share one prefix.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Implementation = Literal["auto", "dense", "blocked"]

MASKED = -1e30
"""Log-sum-exp of a query that sees no key; finite, so that gradients stay so."""
_BLOCK = 256
_DENSE_UP_TO = 1024 * 1024


class Partial(NamedTuple):
    """Attention over some of the keys: normalised output and log-sum-exp of the logits."""

    out: Float[Array, "b q n d"]
    lse: Float[Array, "b q n"]


def attend(
    q: Float[Array, "b q n d"],
    k: Float[Array, "b k g d"],
    v: Float[Array, "b k g d"],
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    *,
    q_position: Int[Array, "b q"] | None = None,
    kv_position: Int[Array, "b k"] | None = None,
    causal: bool = False,
    implementation: Implementation = "auto",
) -> Partial:
    """Segment-masked scaled dot-product attention with grouped key-value heads (n a multiple of g).

    Logits and softmax are f32 whatever the inputs. A query that sees no key gets output 0. With
    `causal` a key is also hidden where its position is past the query's. "auto" is dense up to a
    million query-key pairs and blocked beyond.

    Raises:
      ValueError: unknown implementation, heads that do not divide, or `causal` without positions.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key-value heads.")
    if causal and (q_position is None or kv_position is None):
        raise ValueError("causal attention needs q_position and kv_position.")
    if implementation == "auto":
        implementation = "dense" if q.shape[1] * k.shape[1] <= _DENSE_UP_TO else "blocked"
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"Unknown attention implementation '{implementation}'; "
            f"choose one of {list(_IMPLEMENTATIONS)}."
        )
    if not causal:
        q_position, kv_position = jnp.zeros_like(q_segment), jnp.zeros_like(kv_segment)
    return _IMPLEMENTATIONS[implementation](q, k, v, q_segment, kv_segment, q_position, kv_position)


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the parts' disjoint key sets."""
    lse = jnp.stack([part.lse for part in parts])
    total = jax.nn.logsumexp(lse, axis=0)
    weights = jnp.exp(lse - total)[..., None]
    out = sum(w * part.out.astype(jnp.float32) for w, part in zip(weights, parts, strict=True))
    return Partial(jnp.asarray(out).astype(parts[0].out.dtype), jnp.maximum(total, MASKED))


def _visible(
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    q_position: Int[Array, "b q"],
    kv_position: Int[Array, "b k"],
) -> Bool[Array, "b 1 1 q k"]:
    same = (q_segment[:, :, None] == kv_segment[:, None, :]) & (q_segment[:, :, None] != 0)
    return (same & (kv_position[:, None, :] <= q_position[:, :, None]))[:, None, None]


def _logits(q: Float[Array, "b q n d"], k: Float[Array, "b k g d"]) -> Float[Array, "b g h q k"]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bqghd,bkgd->bghqk", grouped, k, preferred_element_type=jnp.float32)
    return scores * q.shape[3] ** -0.5


def _dense(q, k, v, q_segment, kv_segment, q_position, kv_position) -> Partial:
    visible = _visible(q_segment, kv_segment, q_position, kv_position)
    logits = jnp.where(visible, _logits(q, k), MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1), MASKED / 2))
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    seen = total > 0
    safe = jnp.where(seen, total, 1)
    out = jnp.einsum(
        "bghqk,bkgd->bghqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    lse = jnp.where(seen, top + jnp.log(safe), MASKED)
    return _ungroup(out / safe[..., None], lse, q)


def _ungroup(out: Float[Array, "b g h q d"], lse: Float[Array, "b g h q"], q: Array) -> Partial:
    out = jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)
    return Partial(out, jnp.moveaxis(lse, 3, 1).reshape(q.shape[:3]))


class _Side(NamedTuple):
    """Queries or keys cut into blocks along the sequence: arrays are [blocks, b, block, ...]."""

    arrays: tuple[Array, ...]
    segment: Int[Array, "j b l"]
    position: Int[Array, "j b l"]

    @classmethod
    def cut(cls, arrays, segment, position) -> "_Side":
        block = min(_BLOCK, segment.shape[1])

        def split(x: Array) -> Array:
            spare = -x.shape[1] % block
            x = jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

        return cls(tuple(split(x) for x in arrays), split(segment), split(position))


def _join(blocks: Float[Array, "j b l ..."], length: int) -> Float[Array, "b t ..."]:
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _meets(q: _Side, kv: _Side) -> Bool[Array, "i j"]:
    """Whether any row of the batch has a query in block i that may see a key in block j."""

    def span(side: _Side) -> tuple[Array, Array]:
        low = jnp.where(side.segment == 0, jnp.iinfo(jnp.int32).max, side.segment).min(-1)
        return low, side.segment.max(-1)

    (q_low, q_high), (k_low, k_high) = span(q), span(kv)
    return ((q_low[:, None] <= k_high[None]) & (k_low[None] <= q_high[:, None])).any(-1)


def _accumulate(one: Callable, start, others, needed: Bool[Array, "j"]):
    """Folds `one(carry, other)` over the blocks that are needed and skips the rest."""

    def step(carry, xs):
        other, need = xs
        return jax.lax.cond(need, one, lambda carry, _: carry, carry, other), None

    return jax.lax.scan(step, start, (others, needed))[0]


@jax.custom_vjp
def _blocked(q, k, v, q_segment, kv_segment, q_position, kv_position) -> Partial:
    return _blocked_forward(q, k, v, q_segment, kv_segment, q_position, kv_position)[0]


def _blocked_forward(q, k, v, q_segment, kv_segment, q_position, kv_position):
    queries = _Side.cut((q,), q_segment, q_position)
    keys = _Side.cut((k, v), kv_segment, kv_position)

    def rows(xs):
        query, needed = xs
        (q_block,) = query.arrays
        b, t, n, d = q_block.shape

        def one(carry, key: _Side):
            top, total, out = carry
            k_block, v_block = key.arrays
            visible = _visible(query.segment, key.segment, query.position, key.position)
            logits = jnp.where(visible, _logits(q_block, k_block), MASKED)
            new_top = jnp.maximum(top, logits.max(-1))
            weights = jnp.exp(logits - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            values = jnp.einsum(
                "bghqk,bkgd->bghqd",
                weights.astype(v_block.dtype),
                v_block,
                preferred_element_type=jnp.float32,
            )
            return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + values

        heads = (b, k.shape[2], n // k.shape[2], t)
        start = (jnp.full(heads, MASKED / 2), jnp.zeros(heads), jnp.zeros((*heads, d)))
        top, total, out = _accumulate(one, start, keys, needed)
        safe = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(safe), MASKED)
        return _ungroup(out / safe[..., None], lse, q_block)

    out, lse = jax.lax.map(rows, (queries, _meets(queries, keys)))
    result = Partial(_join(out, q.shape[1]), _join(lse, q.shape[1]))
    return result, (q, k, v, q_segment, kv_segment, q_position, kv_position, *result)


def _blocked_backward(saved, cotangent: Partial):
    q, k, v, q_segment, kv_segment, q_position, kv_position, out, lse = saved
    d_out, d_lse = cotangent
    shift = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
    queries = _Side.cut((q, d_out, lse, shift), q_segment, q_position)
    keys = _Side.cut((k, v), kv_segment, kv_position)
    needed = _meets(queries, keys)
    groups = k.shape[2]

    def pair(query: _Side, key: _Side) -> tuple[Array, Array]:
        """Weights and gradient of the logits of one block pair, both [b, g, h, q, k]."""
        q_block, do_block, lse_block, shift_block = query.arrays
        k_block, v_block = key.arrays

        def per_head(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(*x.shape[:2], groups, -1), 1, 3)[..., None]

        visible = _visible(query.segment, key.segment, query.position, key.position)
        logits = _logits(q_block, k_block)
        weights = jnp.where(visible, jnp.exp(logits - per_head(lse_block)), 0)
        grouped = do_block.reshape(*do_block.shape[:2], groups, -1, do_block.shape[3])
        d_weights = jnp.einsum(
            "bqghd,bkgd->bghqk", grouped, v_block, preferred_element_type=jnp.float32
        )
        return weights, weights * (d_weights - per_head(shift_block)) * q.shape[3] ** -0.5

    def query_rows(xs):
        query, need = xs

        def one(d_q, key: _Side):
            _, d_logits = pair(query, key)
            return d_q + jnp.einsum(
                "bghqk,bkgd->bqghd", d_logits, key.arrays[0].astype(jnp.float32)
            )

        b, t, n, d = query.arrays[0].shape
        return _accumulate(one, jnp.zeros((b, t, groups, n // groups, d)), keys, need)

    def key_rows(xs):
        key, need = xs

        def one(carry, query: _Side):
            d_k, d_v = carry
            weights, d_logits = pair(query, key)
            grouped = [
                x.reshape(*x.shape[:2], groups, -1, x.shape[3]).astype(jnp.float32)
                for x in query.arrays[:2]
            ]
            d_k = d_k + jnp.einsum("bghqk,bqghd->bkgd", d_logits, grouped[0])
            return d_k, d_v + jnp.einsum("bghqk,bqghd->bkgd", weights, grouped[1])

        zeros = jnp.zeros(key.arrays[0].shape)
        return _accumulate(one, (zeros, zeros), queries, need)

    d_q = _join(jax.lax.map(query_rows, (queries, needed)), q.shape[1])
    d_k, d_v = (_join(x, k.shape[1]) for x in jax.lax.map(key_rows, (keys, needed.T)))
    gradients = (d_q.reshape(q.shape).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype))
    return *gradients, None, None, None, None


_blocked.defvjp(_blocked_forward, _blocked_backward)

_IMPLEMENTATIONS: dict[str, Callable[..., Partial]] = {"dense": _dense, "blocked": _blocked}
