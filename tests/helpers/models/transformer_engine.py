"""Transformer Engine's attention of packed rows on the CPU.

Its calls of cuDNN are emulated: they read and write where their operands say, in f32. Where the
package is installed, its own code makes these operands; elsewhere, a stand-in with its names does.
"""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.attention import attention
from tests.helpers.models import cudnn


def emulate(monkeypatch: Any) -> None:
    """Replaces the calls of cuDNN, and lets them serve this CPU."""
    row = attention._TABLE["te"]._replace(cannot=lambda case: None)
    monkeypatch.setitem(attention._TABLE, "te", row)
    if find_spec("transformer_engine"):
        _replace_calls(monkeypatch)
    else:
        _stand_in(monkeypatch)


def forward(q, k, v, q_ends, k_ends, q_start, k_start):
    """Output [b, q, n, d] and log-sum-exp [b, q, n, 1], NaN outside of runs.

    Args:
      q_ends, k_ends: [b m + 1] running sums of the lengths of runs.
      q_start, k_start: [b, m + 1] first place of each run in all rows.
    """

    def run(q, k, v, *operands):
        runs = _runs(q, k, *operands)
        out, stats = cudnn.run_forward(q, k, v, *runs)
        lse = np.full((*q.shape[:3], 1), np.nan, np.float32)
        for i, mine, _ in cudnn.places(q, k, *runs):
            lse.reshape(-1, q.shape[2])[mine] = stats[i, :, : mine.stop - mine.start].T
        return out, lse

    shapes = q.shape, (*q.shape[:3], 1)
    arrays = (q, k, v, q_ends, k_ends, q_start, k_start)
    return cudnn.on_host(run, shapes, (q.dtype, jnp.float32), *arrays)


def backward(q, k, v, lse, d_out, out, *operands):
    """Gradients of q, k and v, NaN outside of runs; the last operands are those of `forward`."""

    def run(q, k, v, lse, d_out, out, *operands):
        runs = _runs(q, k, *operands)
        stats = np.zeros((runs[0].size, q.shape[2], q.shape[1]), np.float32)
        for i, mine, _ in cudnn.places(q, k, *runs):
            stats[i, :, : mine.stop - mine.start] = lse.reshape(-1, q.shape[2])[mine].T
        return cudnn.run_backward(q, k, v, stats, d_out, out, *runs)

    shapes = q.shape, k.shape, v.shape
    return cudnn.on_host(run, shapes, (q.dtype,) * 3, q, k, v, lse, d_out, out, *operands)


def _runs(q, k, q_ends, k_ends, q_start, k_start):
    """The same as XLA's call takes it: lengths, and offsets in numbers."""
    starts = (s * (x.shape[2] * x.shape[3]) for s, x in ((q_start, q), (k_start, k)))
    return *(np.diff(x) for x in (q_ends, k_ends)), *starts


def _replace_calls(monkeypatch: Any) -> None:
    from transformer_engine.jax.cpp_extensions import attention as te

    def call_forward(q, k, v, bias, offset, seed, *operands, config):
        assert (config.dropout_probability, config.scaling_factor) == (0, q.shape[3] ** -0.5)
        return *forward(q, k, v, *operands[:4]), None, jnp.zeros((2, 4), jnp.uint32), None

    def call_backward(q, k, v, bias, offset, lse, rng, out, d_out, *operands, config):
        return *backward(q, k, v, lse, d_out, out, *operands[:4]), None, None, None

    def inner(call: Any) -> Any:
        return SimpleNamespace(bind=call)

    for way, call in (("Fwd", call_forward), ("Bwd", call_backward)):
        plain = getattr(te, f"FusedAttn{way}Primitive")
        packed = getattr(te, f"FusedAttnCPStripedWithAllGather{way}Primitive")
        monkeypatch.setattr(plain, "inner_primitive", inner(call))
        monkeypatch.setattr(packed, "outer_primitive", inner(plain.impl))
    monkeypatch.setattr(te, "get_all_device_compute_capability", lambda: (90,))


def _stand_in(monkeypatch: Any) -> None:
    names = SimpleNamespace(
        AttnBiasType=SimpleNamespace(NO_BIAS=0),
        AttnMaskType=SimpleNamespace(PADDING_MASK=1),
        AttnSoftmaxType=SimpleNamespace(VANILLA_SOFTMAX=0),
        QKVLayout=SimpleNamespace(THD_THD_THD=2),
        SequenceDescriptor=SimpleNamespace(from_seqlens_and_offsets=lambda *both: both),
    )

    def fused_attn_fwd(qkv, sequence_descriptor, seed, **config):
        operands = _operands(*qkv[:2], *sequence_descriptor, **config)
        return *forward(*qkv, *operands), jnp.zeros((2, 4), jnp.uint32), None

    def fused_attn_bwd(qkv, sequence_descriptor, softmax_aux, output, doutput, rng_state, **config):
        operands = _operands(*qkv[:2], *sequence_descriptor, **config)
        return backward(*qkv, softmax_aux, doutput, output, *operands), None, None

    for name in ("transformer_engine", "transformer_engine.jax"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    jax_part: Any = sys.modules["transformer_engine.jax"]
    jax_part.attention = names
    jax_part.cpp_extensions = SimpleNamespace(
        fused_attn_fwd=fused_attn_fwd, fused_attn_bwd=fused_attn_bwd
    )


def _operands(q, k, lengths, starts, *, scaling_factor, max_segments_per_seq, **config):
    """Runs of all rows, the empty ones last, each side by itself."""
    assert scaling_factor == q.shape[3] ** -0.5
    assert lengths[0].shape[1] == max_segments_per_seq == starts[0].shape[1] - 1
    ends, places = [], []
    for x, length, start in zip((q, k), lengths, starts, strict=True):
        first = jnp.arange(len(x))[:, None] * x.shape[1]
        ends.append(jnp.cumulative_sum(_filled(length, length > 0, 0), include_initial=True))
        end = x.shape[0] * x.shape[1]
        places.append(_filled(start + first, start >= 0, end).reshape(start.shape))
    return *ends, *places


def _filled(x, wanted, rest):
    (at,) = jnp.nonzero(wanted.reshape(-1), size=x.size, fill_value=x.size)
    return x.reshape(-1).at[at].get(mode="fill", fill_value=rest)
