"""FlashAttention-2 (arXiv 2307.08691) for NVIDIA GPUs in Pallas/Triton, made for packed rows of a
multi-query model.

A program visits only the blocks of keys that its queries may see. The query heads that share a key
head lie beside each other in one tile, so keys are read once for all of them and never repeated.
The log-sum-exp is returned and differentiated, which jax.experimental.pallas.ops.gpu refuses.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from models.attention.blocked import cut, meets, visits
from models.attention.partial import MASKED, Partial, differentiable
from models.attention.partition import by_row

_Q_TILE, _K_TILE, _WIDE_K_TILE = 64, 64, 32


def flash(
    q: Float[Array, "b q n d"],
    k: Float[Array, "b k g d"],
    v: Float[Array, "b k g d"],
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    q_position: Int[Array, "b q"] | None = None,
    kv_position: Int[Array, "b k"] | None = None,
    *,
    interpret: bool = False,
) -> Partial:
    """Attention with the arguments of `attend`; causal where positions are given. `interpret` runs
    the kernels step by step on any backend."""
    run = _kernels(interpret)
    return run(q, k, v, q_segment, kv_segment, q_position, kv_position)


def flash_gradients(
    q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift,
    *, interpret: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of q, k and v, in the form that `partial.differentiable` expects."""
    run = by_row(partial(_backward, interpret))
    return run(q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift)


def head_problem(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Reason why these kernels do not support such heads, None if they do."""
    if head_dim > 256:
        return f"head dim {head_dim} is more than 256, the largest that shared memory holds"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16 only, not in {jnp.dtype(dtype).name}"
    return None


@cache
def _kernels(interpret: bool) -> Any:
    return differentiable(
        by_row(partial(_forward, interpret)), by_row(partial(_backward, interpret))
    )


class _Tiles:
    """Tiles of rows: arrays [b, places, g, ...] padded to whole tiles, where a query place is one
    head of one position; which tiles meet; and kernels run over the tiles of one side."""

    def __init__(self, interpret: bool, q, k, q_segment, kv_segment, q_position, kv_position):
        self.scale, self.interpret = q.shape[3] ** -0.5, interpret
        self.rows, self.groups, self.dim = len(q), k.shape[2], q.shape[3]
        self.heads = q.shape[2] // self.groups
        self.wide = max(16, pl.next_power_of_2(self.dim))
        self.tile = {"q": _Q_TILE, "k": _WIDE_K_TILE if self.wide > 128 else _K_TILE}
        sides = [("q", q_segment), ("q", q_position), ("k", kv_segment), ("k", kv_position)]
        self.masks = [x if x is None else cut(self._places(x, s), self.tile[s]) for s, x in sides]
        q_segment, q_position, kv_segment, kv_position = self.masks
        self.needed = meets(q_segment, kv_segment, q_position, kv_position)

    def flat(self, x: Float[Array, "b t n *d"], side: str) -> Float[Array, "b places g *d"]:
        """The query heads of each key head as its places, end to end. It copies only if there are
        several of both, or if whole tiles need more places."""
        x = x.reshape(*x.shape[:2], self.groups, -1, *x.shape[3:]).swapaxes(2, 3)
        x = cut(x.reshape(len(x), -1, self.groups, *x.shape[4:]), self.tile[side])
        return x.reshape(len(x), -1, *x.shape[3:])

    def unflat(self, x: Float[Array, "b places g *d"], like: Array) -> Float[Array, "b t n *d"]:
        length, heads = like.shape[1], like.shape[2] // self.groups
        x = x[:, : length * heads].reshape(self.rows, length, heads, *x.shape[2:])
        return x.swapaxes(2, 3).reshape(*like.shape[:3], *x.shape[4:])

    def run(self, kernel: Any, own: str, arrays: list[Any], results: list[Any]) -> Any:
        """Runs `kernel(tiles, visits, masks, arrays, *results)` for every tile of the side `own`.
        The kernel gets all places of the other side and, in `visits`, the tiles that it needs.
        `arrays` and `results` are pairs (side, array or shape)."""
        order, count = visits(self.needed if own == "q" else self.needed.mT)
        places = [order, count[..., None]]
        owned = count.shape[1]

        def spec(side: str, x: Any) -> pl.BlockSpec:
            """Places of one row and, for arrays with heads, one key head."""
            length = self.tile[own] if side == own else x.shape[1]
            head, rest = x.ndim > 2, (0,) * (x.ndim - 3)

            def block(i: Any, r: Any) -> tuple[Any, ...]:
                at = (r // self.groups, i if side == own else 0)
                return (*at, r % self.groups, *rest) if head else at

            return pl.BlockSpec((None, length, *[None] * head, *x.shape[3:]), block)

        masks = [x if x is None else x.reshape(self.rows, -1) for x in self.masks]
        mask_specs = [
            x if x is None else spec(side, x) for side, x in zip("qqkk", masks, strict=True)
        ]
        visit_specs = [
            pl.BlockSpec((None, None, x.shape[2]), lambda i, r: (r // self.groups, i, 0))
            for x in places
        ]
        return pl.pallas_call(
            partial(kernel, self),
            grid=(owned, self.rows * self.groups),
            in_specs=[visit_specs, mask_specs, [spec(*x) for x in arrays]],
            out_specs=[spec(*x) for x in results],
            out_shape=[x for _, x in results],
            compiler_params=triton.CompilerParams(
                num_warps=8 if self.wide > 64 else 4, num_stages=2
            ),
            interpret=self.interpret,
        )(places, masks, [x for _, x in arrays])

    def at(self, side: str, index: Any) -> Any:
        return pl.ds(index * self.tile[side], self.tile[side])

    def read(self, ref: Any, at: Any = slice(None)) -> Float[Array, "places w"]:
        """A tile's vectors; a tile is a power of two wide, and zero beyond the dims of a head."""
        if self.wide == self.dim:
            return ref[at, :]
        return triton.load(ref.at[at, self._dims()], mask=self._inside(), other=0)

    def write(self, ref: Any, vectors: Float[Array, "places w"]) -> None:
        vectors = vectors.astype(ref.dtype)
        if self.wide == self.dim:
            ref[...] = vectors
        else:
            triton.store(ref.at[:, self._dims()], vectors, mask=self._inside())

    def _dims(self) -> Any:
        """Dims of a tile. The start is traced because JAX 0.12 refuses a slice that it can see to
        end past the array, even if a mask hides the rest."""
        return pl.ds(jnp.zeros((), jnp.int32), self.wide)

    def _inside(self) -> Bool[Array, "1 w"]:
        return (jnp.arange(self.wide) < self.dim)[None, :]

    def _places(self, mask: Int[Array, "b t"], side: str) -> Int[Array, "b places"]:
        return jnp.repeat(mask, self.heads, axis=1) if side == "q" else mask


def _forward(interpret, q, k, v, *masks) -> Partial:
    tiles = _Tiles(interpret, q, k, *masks)
    flat_q = tiles.flat(q, "q")
    arrays = [("q", flat_q), ("k", tiles.flat(k, "k")), ("k", tiles.flat(v, "k"))]
    results = [
        ("q", jax.ShapeDtypeStruct(flat_q.shape, q.dtype)),
        ("q", jax.ShapeDtypeStruct(flat_q.shape[:3], jnp.float32)),
    ]
    out, lse = tiles.run(_forward_kernel, "q", arrays, results)
    return Partial(tiles.unflat(out, q), tiles.unflat(lse, q))


def _backward(interpret, q, k, v, *rest) -> tuple[Array, Array, Array]:
    *masks, d_out, lse, shift = rest
    tiles = _Tiles(interpret, q, k, *masks)
    arrays = [("q", tiles.flat(x, "q")) for x in (q, d_out, lse, shift)]
    arrays += [("k", tiles.flat(x, "k")) for x in (k, v)]
    like = [(side, jax.ShapeDtypeStruct(x.shape, q.dtype)) for side, x in arrays]
    (d_q,) = tiles.run(_query_kernel, "q", arrays, like[:1])
    d_k, d_v = tiles.run(_key_kernel, "k", arrays, like[4:])
    return tiles.unflat(d_q, q), tiles.unflat(d_k, k), tiles.unflat(d_v, v)


def _forward_kernel(tiles: _Tiles, visits, masks, arrays, out_ref, lse_ref) -> None:
    (order, count), (q_ref, k_ref, v_ref) = visits, arrays
    q = tiles.read(q_ref)

    def one(visit, carry):
        top, total, out = carry
        at = tiles.at("k", order[visit])
        logits = _logits(tiles, q, tiles.read(k_ref, at), masks, (slice(None), at))
        new_top = jnp.maximum(top, logits.max(1))
        weights = jnp.exp(logits - new_top[:, None])
        shrink = jnp.exp(top - new_top)
        values = triton.dot(weights.astype(q.dtype), tiles.read(v_ref, at))
        return new_top, total * shrink + weights.sum(1), out * shrink[:, None] + values

    places = len(q)
    start = (
        jnp.full(places, MASKED / 2, jnp.float32),
        jnp.zeros(places, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    top, total, out = jax.lax.fori_loop(0, count[0], one, start)
    safe = jnp.where(total > 0, total, 1)
    tiles.write(out_ref, out / safe[:, None])
    lse_ref[...] = jnp.where(total > 0, top + jnp.log(safe), MASKED)


def _query_kernel(tiles: _Tiles, visits, masks, arrays, d_q_ref) -> None:
    (order, count), (q_ref, d_out_ref, lse_ref, shift_ref, k_ref, v_ref) = visits, arrays
    query = [tiles.read(q_ref), tiles.read(d_out_ref), lse_ref[...], shift_ref[...]]

    def one(visit, d_q):
        at = tiles.at("k", order[visit])
        k = tiles.read(k_ref, at)
        _, d_logits = _pair(tiles, query, (k, tiles.read(v_ref, at)), masks, (slice(None), at))
        return d_q + triton.dot(d_logits.astype(k.dtype), k)

    zeros = jnp.zeros(query[0].shape, jnp.float32)
    tiles.write(d_q_ref, jax.lax.fori_loop(0, count[0], one, zeros))


def _key_kernel(tiles: _Tiles, visits, masks, arrays, d_k_ref, d_v_ref) -> None:
    (order, count), (q_ref, d_out_ref, lse_ref, shift_ref, k_ref, v_ref) = visits, arrays
    key = (tiles.read(k_ref), tiles.read(v_ref))

    def one(visit, carry):
        d_k, d_v = carry
        at = tiles.at("q", order[visit])
        q, d_out = tiles.read(q_ref, at), tiles.read(d_out_ref, at)
        query = [q, d_out, lse_ref[at], shift_ref[at]]
        weights, d_logits = _pair(tiles, query, key, masks, (at, slice(None)))
        d_k = d_k + triton.dot(d_logits.astype(q.dtype), q, trans_a=True)
        return d_k, d_v + triton.dot(weights.astype(q.dtype), d_out, trans_a=True)

    zeros = jnp.zeros(key[0].shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, count[0], one, (zeros, zeros))
    tiles.write(d_k_ref, d_k)
    tiles.write(d_v_ref, d_v)


def _pair(tiles: _Tiles, query: Any, key: Any, masks: Any, at: Any) -> tuple[Array, Array]:
    """Weights of a pair of tiles, and the gradient of their logits."""
    (q, d_out, lse, shift), (k, v) = query, key
    weights = jnp.exp(_logits(tiles, q, k, masks, at) - lse[:, None])
    d_weights = triton.dot(d_out, v, trans_b=True)
    return weights, weights * (d_weights - shift[:, None]) * tiles.scale


def _logits(tiles: _Tiles, q: Array, k: Array, masks: Any, at: Any) -> Array:
    """Scaled logits of a pair of tiles, `MASKED` where hidden; `at` slices the masks of both."""
    q_segment, q_position, kv_segment, kv_position = masks
    mine, theirs = q_segment[at[0]][:, None], kv_segment[at[1]][None, :]
    seen = (mine == theirs) & (mine != 0)
    if q_position is not None:
        seen &= kv_position[at[1]][None, :] <= q_position[at[0]][:, None]
    return jnp.where(seen, triton.dot(q, k, trans_b=True) * tiles.scale, MASKED)
