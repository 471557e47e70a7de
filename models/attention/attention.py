"""One attention for everything: a query sees a key iff their segment ids are equal and not 0.

Implementations are rows of one table. Each says which shapes and backends it supports, returns the
log-sum-exp with which `merge` joins parts, and differentiates it; `explain` reports which one
"auto" chooses and why not the others. On a mesh, each device runs it on its own rows and heads;
where places are split too, `models.attention.ring` joins them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.attention.blocked import blocked, blocked_gradients
from models.attention.cudnn import cudnn, cudnn_gradients
from models.attention.flash import flash, flash_gradients, head_problem
from models.attention.partial import MASKED, Partial, merge
from models.attention.ring import Kernel, is_split, spread
from models.attention.target import Target, target
from models.attention.te import missing, te, te_gradients
from models.sharding import ROWS, axis_size

__all__ = [
    "MASKED", "Implementation", "Partial", "attend", "attend_fully", "attend_locally", "explain",
    "merge",
]  # fmt: skip

Implementation = Literal["auto", "pallas", "cudnn", "te", "mosaic", "dense", "blocked"]

_FEW, _MANY = 32 * 1024, 1024 * 1024
"""Query-key pairs of a row up to which dense is preferred: the first measured on a CPU, the second
bounded by memory on an accelerator that the kernels do not support."""


@jax.named_scope("attention")
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
    split_queries: bool = True,
    samples: int | None = None,
) -> Partial:
    """Segment-masked scaled dot-product attention with grouped key-value heads (n a multiple of g).

    Logits and softmax are f32 whatever the inputs. A query that sees no key gets output 0. With
    `causal`, a key is also hidden if its position is past the query's. "auto" takes the first row
    of `explain` without an objection; an implementation that is named runs, or raises an error that
    says why it cannot.

    Under a mesh, rows are split over `ROWS`, heads over "tensor", and keys over "context". Queries
    are split over "context" too, unless `split_queries` is false: then every device along it has
    all of them. `samples`: the highest segment, given if the queries of each segment stand end to
    end; "cudnn" and "te" need it.

    Raises:
      ValueError: unknown implementation or one that cannot serve these inputs, heads that do not
        divide, `causal` without positions, or heads or places that the mesh does not divide.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key-value heads.")
    if causal and (q_position is None or kv_position is None):
        raise ValueError("causal attention needs q_position and kv_position.")
    if not causal:
        q_position = kv_position = None
    case = _case(q, k, samples, causal)
    if not is_split():
        kernel = _kernel(implementation, case)
        return kernel.run(q, k, v, q_segment, kv_segment, q_position, kv_position)
    context = axis_size("context")
    queries = case.queries // context if split_queries else case.queries
    local = case._replace(queries=queries, keys=case.keys // context)
    kernel = _kernel(implementation, local)
    arrays = (q, k, v, q_segment, kv_segment, q_position, kv_position)
    return spread(kernel, arrays, split_queries)


@jax.named_scope("attention")
def attend_locally(
    q: Float[Array, "b q n d"],
    k: Float[Array, "b k g d"],
    v: Float[Array, "b k g d"],
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    *,
    q_position: Int[Array, "b q"] | None = None,
    kv_position: Int[Array, "b k"] | None = None,
) -> Partial:
    """`attend` by plain products of all pairs, which the compiler shards like their inputs. It is
    for the few places of a chunk, which no mesh axis splits. Causal if positions are given."""
    return _dense(q, k, v, q_segment, kv_segment, q_position, kv_position)


@jax.named_scope("attention")
def attend_fully(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    axes: tuple[str, ...] = ROWS,
) -> Float[Array, "b t n d"]:
    """Attention of every place to its whole row, such as that of a picture's patches. Rows are
    split over `axes` and heads over "tensor". Our kernel computes it where "auto" takes that
    kernel, so that the logits of all pairs are never in memory; otherwise JAX's plain products
    do."""
    if _choose("auto", case := _case(q, k)) != "pallas":
        return jax.nn.dot_product_attention(q, k, v)
    whole = jnp.ones(q.shape[:2], jnp.int32)
    kernel = _TABLE["pallas"].kernel(case)
    if all(axis_size(axis) == 1 for axis in (*axes, "tensor")):
        return kernel.run(q, k, v, whole, whole, None, None).out
    heads, places = PartitionSpec(axes, None, "tensor"), PartitionSpec(axes)
    return jax.shard_map(
        lambda q, k, v, one: kernel.run(q, k, v, one, one, None, None).out,
        in_specs=(heads, heads, heads, places),
        out_specs=heads,
        axis_names={*ROWS, *axes, "tensor"},
        check_vma=False,
    )(q, k, v, whole)


def explain(
    q: Any, k: Any, samples: int | None = None, causal: bool = False
) -> list[tuple[str, str | None]]:
    """Implementations in the order in which "auto" tries them, each with the reason against it for
    these queries and keys (arrays or ShapeDtypeStructs), or None if there is none. "auto" takes the
    first with None."""
    case = _case(q, k, samples, causal)
    return [
        *((name, row.cannot(case) or row.slower(case)) for name, row in _TABLE.items()),
        *_LEFT_OUT.items(),
    ]


class _Case(NamedTuple):
    queries: int
    keys: int
    head_dim: int
    dtype: jnp.dtype
    target: Target
    samples: int | None = None
    causal: bool = False


class _Row(NamedTuple):
    """An implementation, why it cannot serve a case, and why another is faster there."""

    kernel: Callable[[_Case], Kernel]
    cannot: Callable[[_Case], str | None] = lambda case: None
    slower: Callable[[_Case], str | None] = lambda case: None


def _case(q: Any, k: Any, samples: int | None = None, causal: bool = False) -> _Case:
    sizes = q.shape[1], k.shape[1], q.shape[3]
    return _Case(*sizes, jnp.dtype(q.dtype), target(), samples, causal)


def _kernel(implementation: str, case: _Case) -> Kernel:
    return _TABLE[_choose(implementation, case)].kernel(case)


def _choose(implementation: str, case: _Case) -> str:
    if implementation == "auto":
        fits = (name for name, row in _TABLE.items() if not (row.cannot(case) or row.slower(case)))
        return next(fits)
    if implementation in _LEFT_OUT:
        raise ValueError(
            f"Attention '{implementation}' is not supported: {_LEFT_OUT[implementation]}; choose "
            f"one of {['auto', *_TABLE]}."
        )
    if implementation not in _TABLE:
        raise ValueError(
            f"Unknown attention implementation '{implementation}'; "
            f"choose one of {['auto', *_TABLE]}."
        )
    if reason := _TABLE[implementation].cannot(case):
        raise ValueError(f"Attention '{implementation}' cannot compute this: {reason}; use 'auto'.")
    return implementation


def _dense_is_slower(case: _Case) -> str | None:
    pairs = case.queries * case.keys
    limit = {"cpu": _FEW, "any": pairs}.get(case.target.platform, _MANY)
    if pairs > limit:
        return f"computes all {pairs:,} query-key pairs of a row, worth it up to {limit:,}"
    return None


def _pallas_is_slower(case: _Case) -> str | None:
    pairs = case.queries * case.keys
    return f"no block of {pairs:,} query-key pairs is worth skipping" if pairs <= _FEW else None


def _pallas_cannot(case: _Case) -> str | None:
    return _device_problem(case.target, 8.0) or head_problem(case.head_dim, case.dtype)


def _unmeasured(case: _Case) -> str:
    return "not yet measured to be faster on any GPU"


def _of_samples(run: Any, gradients: Any) -> Callable[[_Case], Kernel]:
    """Kernels that take the number of samples in a row."""
    return lambda case: Kernel(*(partial(f, samples=case.samples) for f in (run, gradients)))


def _cudnn_cannot(case: _Case) -> str | None:
    if problem := _device_problem(case.target, 9.0):
        return problem
    if case.causal:
        return "its causal mask follows the order of tokens in the row, not `positions`"
    if case.samples is None:
        return (
            "it needs `samples`, the number of samples in a row, whose queries must lie end to end"
        )
    if case.head_dim % 8:
        return f"head dim {case.head_dim} is not a multiple of 8"
    return head_problem(case.head_dim, case.dtype)


def _te_cannot(case: _Case) -> str | None:
    return _cudnn_cannot(case) or missing()


def _mosaic(case: _Case) -> Kernel:
    from models.attention.mosaic import mosaic  # Mosaic is slow to import

    return Kernel(mosaic, flash_gradients)


def _mosaic_cannot(case: _Case) -> str | None:
    if problem := _device_problem(case.target, 9.0):
        return problem
    if case.target.capability >= 10:
        return f"compute capability {case.target.capability} lacks its instructions, a Hopper's"
    if case.head_dim % 64:
        return f"head dim {case.head_dim} is not a multiple of 64"
    return head_problem(case.head_dim, case.dtype)


def _device_problem(target: Target, least: float) -> str | None:
    platform, capability = target
    if capability < least:
        return f"needs an NVIDIA GPU of compute capability {least}, not {platform} ({capability})"
    return None


def _visible(
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    q_position: Int[Array, "b q"] | None,
    kv_position: Int[Array, "b k"] | None,
) -> Bool[Array, "b 1 1 q k"]:
    seen = (q_segment[:, :, None] == kv_segment[:, None, :]) & (q_segment[:, :, None] != 0)
    if q_position is not None and kv_position is not None:
        seen &= kv_position[:, None, :] <= q_position[:, :, None]
    return seen[:, None, None]


def _dense(q, k, v, q_segment, kv_segment, q_position=None, kv_position=None) -> Partial:
    """Attention over all pairs at once, differentiated by JAX; tests compare the others with it."""
    logits = _logits(q, k, q_segment, kv_segment, q_position, kv_position)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1), MASKED / 2))
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    safe = jnp.where(total > 0, total, 1)
    out = jnp.einsum(
        "bghqk,bkgd->bghqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    out = jnp.moveaxis(out / safe[..., None], 3, 1).reshape(q.shape).astype(q.dtype)
    lse = jnp.where(total > 0, top + jnp.log(safe), MASKED)
    return Partial(out, jnp.moveaxis(lse, 3, 1).reshape(q.shape[:3]))


def _dense_gradients(
    q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift
) -> tuple[Array, Array, Array]:
    """Gradients of `_dense` if its keys are some of many, see `Kernel`."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    q_heads, d_heads = _grouped(q, k), _grouped(d_out, k)
    lse, shift = (jnp.moveaxis(_grouped(x, k), 1, -1)[..., None] for x in (lse, shift))
    logits = _logits(q, k, q_segment, kv_segment, q_position, kv_position)
    weights = jnp.exp(logits - lse)
    d_weights = product("bqghd,bkgd->bghqk", d_heads, v)
    d_logits = (weights * (d_weights - shift) * q.shape[3] ** -0.5).astype(q.dtype)
    d_q = product("bghqk,bkgd->bqghd", d_logits, k).reshape(q.shape)
    d_k = product("bghqk,bqghd->bkgd", d_logits, q_heads)
    d_v = product("bghqk,bqghd->bkgd", weights.astype(v.dtype), d_heads)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _logits(q, k, q_segment, kv_segment, q_position, kv_position) -> Float[Array, "b g h q k"]:
    """Scaled logits, `MASKED` where the key is hidden."""
    visible = _visible(q_segment, kv_segment, q_position, kv_position)
    scores = jnp.einsum("bqghd,bkgd->bghqk", _grouped(q, k), k, preferred_element_type=jnp.float32)
    return jnp.where(visible, scores * q.shape[3] ** -0.5, MASKED)


def _grouped(x: Array, k: Array) -> Float[Array, "b q g h *d"]:
    """Queries grouped by the key-value head that they share."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:])


_TABLE = {
    "pallas": _Row(lambda case: Kernel(flash, flash_gradients), _pallas_cannot, _pallas_is_slower),
    "cudnn": _Row(_of_samples(cudnn, cudnn_gradients), _cudnn_cannot, _unmeasured),
    "te": _Row(_of_samples(te, te_gradients), _te_cannot, _unmeasured),
    "mosaic": _Row(_mosaic, _mosaic_cannot, _unmeasured),
    "dense": _Row(lambda case: Kernel(_dense, _dense_gradients), slower=_dense_is_slower),
    "blocked": _Row(lambda case: Kernel(blocked, blocked_gradients)),
}
"""Implementations in order of preference; the last supports everything."""

_LEFT_OUT = {
    "pallas.ops.gpu": (
        "its backward pass rejects the log-sum-exp, and it has no grouped key-value heads"
    ),
    "tokamax": (
        "its backward pass forms rowsum(d_out · out) itself, so the log-sum-exp that merge needs "
        "has no gradient, and its range mask, a private interface, takes only keys that lie end "
        "to end"
    ),
    "pallas.ops.gpu.attention_mgpu": (
        "its mask cannot separate samples, and its backward pass does not take the log-sum-exp"
    ),
}
"""Known kernels that are not in the table, and why."""
