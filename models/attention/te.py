"""Transformer Engine's fused attention for NVIDIA GPUs from Hopper on: one call for the samples of
packed rows (its THD layout).

Its `fused_attn` returns the output alone. The two functions beneath, of which that one's gradient
is made, also return the log-sum-exp and take it back (transformer_engine.jax.cpp_extensions, 2.20),
and its gradient goes in as in `cudnn`. `make te` builds the package into an environment of its own.
"""

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float, Int

from models.attention.partial import MASKED, Partial, differentiable
from models.attention.samples import RowSamples, output_of, zero_outside


def te(
    q: Float[Array, "b q n d"],
    k: Float[Array, "b k g d"],
    v: Float[Array, "b k g d"],
    q_segment: Int[Array, "b q"],
    kv_segment: Int[Array, "b k"],
    q_position: None = None,
    kv_position: None = None,
    *,
    samples: int,
) -> Partial:
    """Attention with the arguments and the limits of `cudnn`, on one device.

    Raises:
      ValueError: a mesh of several devices is in use.
    """
    if get_abstract_mesh().size > 1:
        raise ValueError(
            "Attention 'te' runs on one device; use 'cudnn', whose kernels are the same, on a mesh."
        )
    return _kernel(samples)(q, k, v, q_segment, kv_segment)


def te_gradients(
    q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift, *, samples: int
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in the form that `partial.differentiable` expects."""
    return _backward(samples, q, k, v, q_segment, kv_segment, d_out, lse, shift)


def missing() -> str | None:
    """Reason why Transformer Engine cannot be called here, None if it can."""
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed; `make te` builds it"
    return None


@cache
def _kernel(samples: int) -> Any:
    return differentiable(partial(_forward, samples), partial(_backward, samples))


def _forward(samples: int, q, k, v, q_segment, kv_segment) -> Partial:
    rows = RowSamples(samples, q_segment, kv_segment)
    out, stats, *_ = _call("fused_attn_fwd", rows, q, k, v, seed=None)
    lse = jnp.where(rows.seen_q[..., None], stats.reshape(q.shape[:3]), MASKED)
    return Partial(zero_outside(rows.seen_q, out), lse)


def _backward(samples: int, q, k, v, q_segment, kv_segment, d_out, lse, shift):
    rows = RowSamples(samples, q_segment, kv_segment)
    (d_q, d_k, d_v), *_ = _call(
        "fused_attn_bwd",
        rows,
        q,
        k,
        v,
        softmax_aux=lse[..., None],
        rng_state=jnp.zeros((2, 4), jnp.uint32),
        output=output_of(d_out, shift).astype(q.dtype),
        doutput=d_out,
    )
    return zero_outside(rows.seen_q, d_q), rows.apart(d_k), rows.apart(d_v)


def _call(function: str, rows: RowSamples, q: Array, k: Array, v: Array, **operands: Any) -> Any:
    """Transformer Engine's `function` for all samples, without bias and dropout."""
    from transformer_engine.jax import attention, cpp_extensions

    def starts(place: Int[Array, "b m"]) -> Int[Array, "b m+1"]:
        starts = jnp.where(rows.here, place, -1).astype(jnp.int32)
        return jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)

    return getattr(cpp_extensions, function)(
        qkv=(q, rows.together(k), rows.together(v)),
        bias=None,
        softmax_offset=None,
        sequence_descriptor=attention.SequenceDescriptor.from_seqlens_and_offsets(
            (rows.q_length, rows.k_length), (starts(rows.q_start), starts(rows.k_start))
        ),
        attn_bias_type=attention.AttnBiasType.NO_BIAS,
        attn_mask_type=attention.AttnMaskType.PADDING_MASK,
        softmax_type=attention.AttnSoftmaxType.VANILLA_SOFTMAX,
        qkv_layout=attention.QKVLayout.THD_THD_THD,
        scaling_factor=q.shape[3] ** -0.5,
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=rows.here.shape[1],
        **operands,
    )
