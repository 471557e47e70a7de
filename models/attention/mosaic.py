"""FlashAttention-3 (arXiv 2407.08608) for Hopper GPUs in Pallas/Mosaic, made for packed rows of a
multi-query model.

Of three warpgroups, one copies the tiles of keys that some query of the program may see, and two
compute, so that one's matrix products run beside the other's softmax. The query heads that share a
key head lie beside each other, as in `models.attention.flash`, whose kernels compute the gradients.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from models.attention.blocked import cut, meets, visits
from models.attention.flash import flash_gradients
from models.attention.partial import MASKED, Partial, differentiable
from models.attention.partition import by_row

_TILE, _GROUPS, _STAGES = 64, 2, 2
"""Places that a product of one warpgroup takes, warpgroups that compute, and tiles of keys that
shared memory holds at once."""
_WIDEST = 128
"""Numbers of a head that one product adds to the output, which leaves room for its registers."""
_LOG2_E = 1.4426950408889634


def mosaic(
    q: Float[Array, "b q n d"],
    k: Float[Array, "b k g d"],
    v: Float[Array, "b k g d"],
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    q_position: Int[Array, "b q"] | None = None,
    kv_position: Int[Array, "b k"] | None = None,
) -> Partial:
    """Attention with the arguments of `attend`; causal where positions are given."""
    return _mosaic(q, k, v, q_segment, kv_segment, q_position, kv_position)


def forward(
    q, k, v, q_segment, kv_segment, q_position=None, kv_position=None, *, interpret: Any = None
) -> Partial:
    """`mosaic` without gradients and on one device. `interpret`: parameters of Pallas' interpreter,
    which runs the kernel with its barriers and copies on any backend."""
    causal = q_position is not None
    heads = q.shape[2] // k.shape[2]
    places = [jnp.repeat(x, heads, axis=1) for x in (q_segment, q_position)[: 1 + causal]]
    mine = [cut(x, _GROUPS * _TILE) for x in places]
    theirs = [cut(x, _TILE) for x in (kv_segment, kv_position)[: 1 + causal]]
    order, count = visits(meets(mine[0], theirs[0], *mine[1:], *theirs[1:]))
    mine[0] = jnp.where(mine[0] == 0, -1, mine[0])
    queries = cut(_by_head(q, k), _GROUPS * _TILE)
    queries = queries.reshape(*queries.shape[:2], _GROUPS, _TILE, -1)
    keys, values = (cut(_by_head(x, k), _TILE) for x in (k, v))
    arrays = _Arrays(
        queries,
        keys.swapaxes(2, 3),
        values,
        jnp.stack([x.reshape(len(q), *queries.shape[1:4]) for x in mine], 3),
        jnp.stack(theirs, 2),
        order,
        count,
    )
    out, lse = _call(arrays, interpret)
    return Partial(_by_place(out, q, k), _by_place(lse, q, k))


class _Arrays(NamedTuple):
    """Inputs of the kernel, or references to them, in tiles: r = rows x key heads, keys transposed.
    A mask has the segments and, where causal, the positions of its places."""

    q: Any  # [r, i, 2, 64, d]
    k: Any  # [r, j, d, 64]
    v: Any  # [r, j, 64, d]
    q_mask: Any  # [b, i, 2, m, 64]
    k_mask: Any  # [b, j, m, 64]
    order: Any  # [b, i, j]
    visited: Any  # [b, i]


def _by_head(x: Float[Array, "b t n d"], k: Array) -> Float[Array, "r places d"]:
    """Places of each key head; those of its query heads lie beside each other."""
    x = x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).swapaxes(1, 2)
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[4])


def _by_place(x: Float[Array, "r i 2 64 *d"], q: Array, k: Array) -> Float[Array, "b q n *d"]:
    b, length, n = q.shape[:3]
    groups, rest = k.shape[2], x.shape[4:]
    x = x.reshape(b * groups, -1, *rest)[:, : length * n // groups]
    return x.reshape(b, groups, length, -1, *rest).swapaxes(1, 2).reshape(b, length, n, *rest)


def _call(arrays: _Arrays, interpret: Any) -> tuple[Array, Array]:
    q, dim, masks = arrays.q, arrays.v.shape[3], arrays.k_mask.shape[2]
    shared: dict[str, Any] = {
        "q": plgpu.SMEM((_GROUPS, _TILE, dim), q.dtype),
        "k": plgpu.SMEM((_STAGES, dim, _TILE), q.dtype),
        "v": plgpu.SMEM((_STAGES, _TILE, dim), q.dtype),
        "weights": plgpu.SMEM((_GROUPS, _TILE, _TILE), q.dtype),
        "q_mask": plgpu.SMEM((_GROUPS, masks, _TILE), jnp.int32),
        "k_mask": plgpu.SMEM((_STAGES, masks, _TILE), jnp.int32),
        "lse": plgpu.SMEM((_GROUPS, _TILE), jnp.float32),
        "q_here": plgpu.Barrier(num_arrivals=2, num_barriers=_GROUPS),
        "k_here": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "v_here": plgpu.Barrier(num_barriers=_STAGES),
        "k_used": plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=_STAGES),
        "v_used": plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=_STAGES),
    }
    kernel = plgpu.kernel(
        _kernel,
        out_type=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:4], jnp.float32),
        ],
        scratch_types=shared,
        grid=q.shape[:2],
        grid_names=("row", "tile"),
        num_threads=_GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )
    out, lse = kernel(*arrays)
    return out, lse


def _kernel(*refs: Any, **shared: Any) -> None:
    """Program of one tile of queries of one key head."""
    arrays, here = _Arrays(*refs[:-2]), SimpleNamespace(**shared)
    group = jax.lax.axis_index("group")

    @pl.when(group == _GROUPS)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")
        _copy(arrays, here)

    @pl.when(group < _GROUPS)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        _attend(arrays, here, group, *refs[-2:])


def _at(arrays: _Arrays) -> tuple[Array, Array, Array, Array]:
    """The program's row of places, row of masks, tile, and number of tiles to visit."""
    row, tile = (jax.lax.axis_index(name) for name in ("row", "tile"))
    masks = jax.lax.div(row, jnp.int32(arrays.q.shape[0] // arrays.visited.shape[0]))
    return row, masks, tile, arrays.visited[masks, tile]


def _copy(arrays: _Arrays, here: Any) -> None:
    """Brings the tiles of keys and values to shared memory, each as soon as there is room."""
    row, masks, tile, count = _at(arrays)

    @pl.loop(0, count)
    def _(visit: Array) -> None:
        stage, key = _stage(visit), arrays.order[masks, tile, visit]
        again = visit >= _STAGES
        pl.when(again)(lambda: plgpu.barrier_wait(here.k_used.at[stage]))
        for array, buffer in ((arrays.k.at[row], here.k), (arrays.k_mask.at[masks], here.k_mask)):
            plgpu.copy_gmem_to_smem(array.at[key], buffer.at[stage], here.k_here.at[stage])
        pl.when(again)(lambda: plgpu.barrier_wait(here.v_used.at[stage]))
        plgpu.copy_gmem_to_smem(arrays.v.at[row, key], here.v.at[stage], here.v_here.at[stage])


def _attend(arrays: _Arrays, here: Any, group: Array, out_ref: Any, lse_ref: Any) -> None:
    row, masks, tile, count = _at(arrays)
    q, q_mask, weights = (x.at[group] for x in (here.q, here.q_mask, here.weights))
    for array, buffer in ((arrays.q.at[row], q), (arrays.q_mask.at[masks], q_mask)):
        plgpu.copy_gmem_to_smem(array.at[tile, group], buffer, here.q_here.at[group])
    plgpu.barrier_wait(here.q_here.at[group])
    mine = [q_mask[i] for i in range(q_mask.shape[0])]
    dim = q.shape[1]
    parts: list[Any] = [pl.ds(start, min(_WIDEST, dim - start)) for start in range(0, dim, _WIDEST)]

    def one(visit: Array, carry: Any) -> Any:
        top, total, *sums = carry
        stage, again = _stage(visit), visit + _STAGES < count
        plgpu.barrier_wait(here.k_here.at[stage])
        logits = _product(q, here.k.at[stage]) * (dim**-0.5 * _LOG2_E)
        seen = _seen(mine, [here.k_mask[stage, i] for i in range(len(mine))])
        logits = jnp.where(seen, logits, MASKED)
        new_top = jnp.maximum(top, logits.max(1))
        found = jnp.exp2(logits - _wide(new_top, logits))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + found.sum(1)
        weights[...] = found.astype(weights.dtype)
        plgpu.commit_smem()
        pl.when(again)(lambda: plgpu.barrier_arrive(here.k_used.at[stage]))
        plgpu.barrier_wait(here.v_here.at[stage])
        sums = [
            x * _wide(shrink, x) + _product(weights, here.v.at[stage, :, part])
            for x, part in zip(sums, parts, strict=True)
        ]
        pl.when(again)(lambda: plgpu.barrier_arrive(here.v_used.at[stage]))
        return new_top, total, *sums

    start = [jnp.full(_TILE, MASKED / 2, jnp.float32), jnp.zeros(_TILE, jnp.float32)]
    start += [jnp.zeros((_TILE, part.size), jnp.float32) for part in parts]
    top, total, *sums = jax.lax.fori_loop(0, count, one, tuple(start))
    safe = jnp.where(total > 0, total, 1)
    for x, part in zip(sums, parts, strict=True):
        q[:, part] = (x / _wide(safe, x)).astype(q.dtype)
    here.lse[group] = jnp.where(total > 0, top / _LOG2_E + jnp.log(safe), MASKED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, out_ref.at[row, tile, group])
    plgpu.copy_smem_to_gmem(here.lse.at[group], lse_ref.at[row, tile, group])
    plgpu.wait_smem_to_gmem(0)


def _stage(visit: Array) -> Array:
    return jax.lax.rem(visit, jnp.int32(_STAGES))


def _seen(mine: list[Array], theirs: list[Array]) -> Array:
    """True where the segment is the same and, where causal, the position is no later."""
    square = (_TILE, _TILE)
    queries = [jax.lax.broadcast_in_dim(x, square, (0,)) for x in mine]
    keys = [jax.lax.broadcast_in_dim(x, square, (1,)) for x in theirs]
    seen = queries[0] == keys[0]
    return seen & (keys[1] <= queries[1]) if len(mine) > 1 else seen


def _wide(x: Array, like: Array) -> Array:
    return jax.lax.broadcast_in_dim(x, like.shape, (0,))


def _product(a: Any, b: Any) -> Array:
    def run(sums: Any) -> Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


_mosaic = differentiable(by_row(forward), flash_gradients)
