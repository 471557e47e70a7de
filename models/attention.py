"""One attention for everything: a query sees a key iff their segment ids are equal and not 0.

Implementations are rows of one table. Each says which shapes and backends it can serve, returns the
log-sum-exp that `merge` joins parts by, and differentiates it; `explain` tells which one "auto"
takes and why not the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.blocked import blocked
from models.flash import flash, head_problem
from models.partial import MASKED, Partial, merge

__all__ = [
    "MASKED", "Implementation", "Partial", "Target", "attend", "compiling_for", "explain", "merge",
]  # fmt: skip

Implementation = Literal["auto", "pallas", "dense", "blocked"]

_FEW, _MANY = 32 * 1024, 1024 * 1024
"""Query-key pairs of a row up to which dense is preferred: measured on a CPU; bounded by memory on
an accelerator that the kernels cannot serve."""


class Target(NamedTuple):
    """What programs are made for: JAX's platform, and CUDA's compute capability (0 elsewhere)."""

    platform: str
    capability: float = 0.0


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
    `causal` a key is also hidden where its position is past the query's. "auto" takes the first row
    of `explain` without an objection; a row that is named runs, or says why it cannot.

    Raises:
      ValueError: unknown implementation or one that cannot serve these inputs, heads that do not
        divide, or `causal` without positions.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key-value heads.")
    if causal and (q_position is None or kv_position is None):
        raise ValueError("causal attention needs q_position and kv_position.")
    if not causal:
        q_position = kv_position = None
    run = _TABLE[_choose(implementation, _case(q, k))].run
    return run(q, k, v, q_segment, kv_segment, q_position, kv_position)


def explain(q: Any, k: Any) -> list[tuple[str, str | None]]:
    """Every implementation in the order "auto" tries them, each with what speaks against it for
    these queries and keys (arrays or ShapeDtypeStructs); None where nothing does. "auto" takes the
    first of those.
    """
    case = _case(q, k)
    return [
        *((name, row.cannot(case) or row.slower(case)) for name, row in _TABLE.items()),
        *_LEFT_OUT.items(),
    ]


@contextmanager
def compiling_for(platform: str, capability: float = 0.0) -> Iterator[None]:
    """Implementations are chosen for this target instead of this process's devices, in programs
    that are traced within (such as those compiled for a GPU that is not there)."""
    token = _target.set(Target(platform, capability))
    try:
        yield
    finally:
        _target.reset(token)


class _Case(NamedTuple):
    queries: int
    keys: int
    head_dim: int
    dtype: jnp.dtype
    target: Target


class _Row(NamedTuple):
    """An implementation, why it cannot serve a case, and why another is faster there."""

    run: Callable[..., Partial]
    cannot: Callable[[_Case], str | None] = lambda case: None
    slower: Callable[[_Case], str | None] = lambda case: None


_target: ContextVar[Target | None] = ContextVar("target", default=None)


def _case(q: Any, k: Any) -> _Case:
    target = _target.get()
    if target is None:
        device = jax.devices()[0]
        on_cuda = device.platform == "gpu" and "NVIDIA" in device.device_kind
        capability = float(getattr(device, "compute_capability", 0)) if on_cuda else 0.0
        target = Target(device.platform, capability)
    return _Case(q.shape[1], k.shape[1], q.shape[3], jnp.dtype(q.dtype), target)


def _choose(implementation: str, case: _Case) -> str:
    if implementation == "auto":
        fits = (name for name, row in _TABLE.items() if not (row.cannot(case) or row.slower(case)))
        return next(fits)
    if implementation in _LEFT_OUT:
        raise ValueError(
            f"Attention '{implementation}' is left out: {_LEFT_OUT[implementation]}; "
            f"choose one of {['auto', *_TABLE]}."
        )
    if implementation not in _TABLE:
        raise ValueError(
            f"Unknown attention implementation '{implementation}'; "
            f"choose one of {['auto', *_TABLE]}."
        )
    if reason := _TABLE[implementation].cannot(case):
        raise ValueError(f"Attention '{implementation}' cannot serve this: {reason}; use 'auto'.")
    return implementation


def _dense_is_slower(case: _Case) -> str | None:
    pairs, limit = case.queries * case.keys, _FEW if case.target.platform == "cpu" else _MANY
    if pairs > limit:
        return f"computes all {pairs:,} query-key pairs of a row, worth it up to {limit:,}"
    return None


def _pallas_is_slower(case: _Case) -> str | None:
    pairs = case.queries * case.keys
    return f"no block of {pairs:,} query-key pairs is worth skipping" if pairs <= _FEW else None


def _pallas_cannot(case: _Case) -> str | None:
    platform, capability = case.target
    if capability < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0, not {platform} ({capability})"
    return head_problem(case.head_dim, case.dtype)


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
    """All query-key pairs at once, differentiated by JAX: what the others are tested against."""
    visible = _visible(q_segment, kv_segment, q_position, kv_position)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bqghd,bkgd->bghqk", grouped, k, preferred_element_type=jnp.float32)
    logits = jnp.where(visible, scores * q.shape[3] ** -0.5, MASKED)
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


_TABLE = {
    "pallas": _Row(flash, cannot=_pallas_cannot, slower=_pallas_is_slower),
    "dense": _Row(_dense, slower=_dense_is_slower),
    "blocked": _Row(blocked),
}
"""In the order of preference; the last serves everything."""

_LEFT_OUT = {
    "pallas.ops.gpu": "its backward refuses the log-sum-exp, and it has no grouped key-value heads",
    "tokamax": (
        "its backward forms rowsum(d_out · out) itself, so the log-sum-exp that merge needs has no "
        "gradient, and its range mask, a private interface, takes keys that lie end to end only"
    ),
    "cudnn": (
        "JAX's wrapper drops the gradient of the log-sum-exp that merge needs, and its packed "
        "layout is a private interface that nothing checks without a GPU"
    ),
    "transformer_engine": (
        "its fused_attn returns no log-sum-exp, and it is built from source with nvcc and cuDNN"
    ),
}
"""Known kernels that are not rows, and why."""
