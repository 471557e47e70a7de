"""cuDNN's flash attention for NVIDIA GPUs from Hopper on: one variable-length call for all samples
of all rows.

The custom call is XLA's own (openxla/xla PR 20861), made through `jax.ffi`: JAX's wrapper of it
offers no packed rows in public, places the keys of grouped heads wrongly in versions before JAX's
PR 39521, and drops the gradient of the log-sum-exp. That gradient needs no other kernel: cuDNN uses
the output only for rowsum(d_out · out), so it is given an output for which this sum is `shift`.
"""

import json
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.attention.partial import MASKED, Partial, differentiable
from models.attention.partition import by_row
from models.attention.samples import RowSamples, output_of, zero_outside

_FEWEST = 2
"""Number of samples from which XLA treats a row as packed."""


def cudnn(
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
    """Attention with the arguments of `attend`, for segments 1 to `samples`. The queries of a
    segment stand end to end; the keys of each, of which there are fewer, are first brought
    together.

    The gradient is NaN for a query whose log-sum-exp has a gradient but whose output has none; no
    `merge` of parts leads to this case.

    Raises:
      ValueError: the queries or keys on a device have more numbers than 32 bits can count.
    """
    return _kernel(max(samples, _FEWEST))(q, k, v, q_segment, kv_segment)


def cudnn_gradients(
    q, k, v, q_segment, kv_segment, q_position, kv_position, d_out, lse, shift, *, samples: int
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in the form that `partial.differentiable` expects."""
    run = by_row(partial(_backward, max(samples, _FEWEST)))
    return run(q, k, v, q_segment, kv_segment, d_out, lse, shift)


@cache
def _kernel(samples: int) -> Any:
    return differentiable(by_row(partial(_forward, samples)), by_row(partial(_backward, samples)))


class SampleRuns(NamedTuple):
    """Operands that tell cuDNN where samples are: the number of places of each, and the offset of
    its first number in the whole array. Samples that have queries and keys come first, in order;
    the rest is empty."""

    q_length: Int[Array, "b m"]
    k_length: Int[Array, "b m"]
    q_offset: Int[Array, "b m+1"]
    k_offset: Int[Array, "b m+1"]


class _Runs:
    """`operands` for the samples of rows, and the mapping between places and runs."""

    def __init__(self, rows: RowSamples, q: Array, k: Array, q_segment: Array):
        count, length, heads, _ = q.shape
        for name, x in (("queries", q), ("keys", k)):
            if x.size >= 2**31:
                raise ValueError(
                    f"Attention 'cudnn' counts array elements in 32 bits, but {name} {x.shape} "
                    f"have {x.size:,} on a device; use fewer rows, or 'pallas'."
                )
        here, self._heads = rows.here, heads
        row = jnp.arange(count)[:, None]
        q_place = (rows.q_start + row * length).reshape(-1)
        k_place = (rows.k_start + row * k.shape[1]).reshape(-1)
        (filled,) = jnp.nonzero(here.reshape(-1), size=here.size, fill_value=here.size)

        def packed(x: Array, fill: int) -> Array:
            return x.reshape(-1).at[filled].get(mode="fill", fill_value=fill)

        def offsets(place: Array, x: Array) -> Array:
            end = x.shape[0] * x.shape[1]
            offset = jnp.pad(packed(place, end), (0, count), constant_values=end)
            return (offset * (x.shape[2] * x.shape[3])).astype(jnp.int32).reshape(count, -1)

        self.operands = SampleRuns(
            packed(rows.q_length, 0).reshape(here.shape),
            packed(rows.k_length, 0).reshape(here.shape),
            offsets(q_place, q),
            offsets(k_place, k),
        )
        rank = (jnp.cumsum(here.reshape(-1)) - 1).reshape(here.shape)
        at = jnp.clip(q_segment - 1, 0, here.shape[1] - 1)
        self._run = jnp.take_along_axis(rank, at, 1)
        self._step = jnp.arange(length) - jnp.take_along_axis(rows.q_start, at, 1)
        self._places = packed(q_place, 0)[:, None] + jnp.arange(length)

    def by_place(self, stats: Float[Array, "bm n q"]) -> Float[Array, "b q n"]:
        return stats[self._run, :, self._step]

    def by_run(self, x: Float[Array, "b q n"]) -> Float[Array, "bm n q"]:
        flat = x.reshape(-1, self._heads)
        return jnp.moveaxis(flat.at[self._places].get(mode="clip"), 1, 2)


def _forward(samples: int, q, k, v, q_segment, kv_segment) -> Partial:
    rows = RowSamples(samples, q_segment, kv_segment)
    runs = _Runs(rows, q, k, q_segment)
    out, stats = call_forward(q, rows.together(k), rows.together(v), runs.operands)
    lse = jnp.where(rows.seen_q[..., None], runs.by_place(stats), MASKED)
    return Partial(zero_outside(rows.seen_q, out), lse)


def _backward(samples: int, q, k, v, q_segment, kv_segment, d_out, lse, shift):
    rows = RowSamples(samples, q_segment, kv_segment)
    runs = _Runs(rows, q, k, q_segment)
    d_q, d_k, d_v = call_backward(
        q,
        rows.together(k),
        rows.together(v),
        runs.by_run(lse),
        d_out,
        output_of(d_out, shift).astype(q.dtype),
        runs.operands,
    )
    return zero_outside(rows.seen_q, d_q), rows.apart(d_k), rows.apart(d_v)


def call_forward(q: Array, k: Array, v: Array, runs: SampleRuns) -> tuple[Array, Array]:
    """Output [b, q, n, d], and log-sum-exp [b m, n, q] of the places of each run."""
    b, length, n, d = q.shape
    results = [
        jax.ShapeDtypeStruct((b, n, length, d), q.dtype),
        jax.ShapeDtypeStruct((runs.q_length.size, n, length), jnp.float32),
    ]
    config = _config(q, k, runs, _FORWARD)
    out, stats = _call("__cudnn$fmhaSoftmax", [q, k, v, *runs], results, config)
    return out.swapaxes(1, 2), stats


def call_backward(
    q: Array, k: Array, v: Array, stats: Array, d_out: Array, out: Array, runs: SampleRuns
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in their shapes."""
    results = [jax.ShapeDtypeStruct(x.swapaxes(1, 2).shape, q.dtype) for x in (q, k, v)]
    operands, config = [q, k, v, stats, d_out, out, *runs], _config(q, k, runs, _BACKWARD)
    found = _call("__cudnn$fmhaSoftmaxBackward", operands, results, config)
    d_q, d_k, d_v = (x.swapaxes(1, 2) for x in found)
    return d_q, d_k, d_v


def _call(target: str, operands: list[Array], results: list[Any], config: str) -> list[Array]:
    """XLA's custom call; results of four axes, [b, n, t, d], lie in memory as operands do."""
    *found, _ = jax.ffi.ffi_call(
        target,
        [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        output_layouts=[(0, 2, 1, 3) if x.ndim == 4 else (0, 1, 2) for x in results] + [(0,)],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )(*operands)
    return found


_FORWARD = {
    "bmm1": (3, 3, (0, 2), (0, 2)),
    "bmm2": (3, 1, (0, 1), (0, 2)),
}
_BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}
"""Matrix products of the two calls: the axes that are summed over (left and right), and the batch
axes (left and right), of queries and keys, [b, t, n, d], and of logits, [b, n, q, k]."""


def _config(q: Array, k: Array, runs: SampleRuns, products: dict[str, Any]) -> str:
    """XLA's CudnnfMHABackendConfig."""
    b, length, n, d = q.shape
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": d**-0.5,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[jnp.dtype(q.dtype).name],
            "dimensions": [str(size) for size in (b, n, length, k.shape[1])],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING",
        "max_seg_per_batch": runs.q_length.shape[1],
    }
    for name, (left, right, left_batch, right_batch) in products.items():
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(axis) for axis in left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in right_batch],
        }
    return json.dumps({"cudnn_fmha_backend_config": config})
