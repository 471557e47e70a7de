"""Attention over some of the keys, with the log-sum-exp of its logits, and how such parts join.

Joining is exact (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). It
serves the prefix/suffix split, the sampler's key-value cache, several noised chunks that share one
prefix, and a sequence spread over devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

ATTENTION = "attention"
"""Name by which a remat policy selects the results that `differentiable` keeps for backward."""

MASKED = -1e30
"""Log-sum-exp of a query that sees no key; finite, so that gradients are finite too."""


class Partial(NamedTuple):
    """Normalised output and log-sum-exp of the logits; output 0 and `MASKED` where no key is
    seen."""

    out: Float[Array, "b q n d"]
    lse: Float[Array, "b q n"]


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the parts' disjoint key sets."""
    lse = jnp.stack([part.lse for part in parts])
    total = jax.nn.logsumexp(lse, axis=0)
    weights = jnp.exp(lse - total)[..., None]
    out = sum(w * part.out.astype(jnp.float32) for w, part in zip(weights, parts, strict=True))
    return Partial(jnp.asarray(out).astype(parts[0].out.dtype), jnp.maximum(total, MASKED))


def differentiable(
    forward: Callable[..., Partial], backward: Callable[..., tuple[Array, Array, Array]]
) -> Callable[..., Partial]:
    """`forward(q, k, v, *masks)` with the gradient that `backward` computes without its tape.

    `backward(q, k, v, *masks, d_out, lse, shift)` returns d_q, d_k, d_v. `shift` [b, q, n] is what
    softmax subtracts from the gradient of each weight of a query: rowsum(d_out · out) − d_lse; the
    gradient of the log-sum-exp enters nowhere else. `lse` is 0 where no key is seen.
    """

    @jax.custom_vjp
    def attention(*inputs: Any) -> Partial:
        return forward(*inputs)

    def saved(*inputs: Any) -> tuple[Partial, Any]:
        result = checkpoint_name(forward(*inputs), ATTENTION)
        return result, (inputs, result)

    def gradients(saved: Any, cotangent: Partial) -> tuple[Any, ...]:
        inputs, (out, lse) = saved
        d_out, d_lse = cotangent
        shift = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
        found = backward(*inputs, d_out, jnp.where(lse > MASKED / 2, lse, 0), shift)
        return *found, *(None,) * (len(inputs) - 3)

    attention.defvjp(saved, gradients)
    return attention
