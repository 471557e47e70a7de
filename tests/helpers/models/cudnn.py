"""cuDNN's flash attention of variable lengths, emulated on the CPU: what reads and writes where its
operands say, in f32, and leaves NaN everywhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import attention, cudnn


def emulate(monkeypatch) -> None:
    """Replaces the two custom calls, and lets them serve this CPU."""
    monkeypatch.setattr(cudnn, "call_forward", forward)
    monkeypatch.setattr(cudnn, "call_backward", backward)
    row = attention._TABLE["cudnn"]._replace(cannot=lambda case: None)
    monkeypatch.setitem(attention._TABLE, "cudnn", row)


def forward(q, k, v, runs):
    shapes = (q.shape, (runs.q_length.size, q.shape[2], q.shape[1]))
    return on_host(run_forward, shapes, (q.dtype, jnp.float32), q, k, v, *runs)


def backward(q, k, v, stats, d_out, out, runs):
    shapes = (q.shape, k.shape, v.shape)
    return on_host(run_backward, shapes, (q.dtype,) * 3, q, k, v, stats, d_out, out, *runs)


def on_host(run: Any, shapes: Any, dtypes: Any, *arrays: Any) -> Any:
    results = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True)]

    def numpy(*arrays: Any) -> Any:  # an operation of JAX's in a callback can wait for ever
        return run(*map(np.asarray, arrays))

    return jax.pure_callback(numpy, results, *arrays)


def run_forward(q, k, v, *runs):
    out, stats = _nothing(q.shape), _nothing((runs[0].size, q.shape[2], q.shape[1]))
    for run, mine, theirs in places(q, k, *runs):
        logits = _logits(_flat(q)[mine], _flat(k)[theirs])
        lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        weights = np.exp(logits - lse[..., None])
        _flat(out)[mine] = np.einsum("nqk,knd->qnd", weights, _shared(_flat(v)[theirs], q))
        stats[run, :, : len(lse[0])] = lse
    return out.astype(q.dtype), stats


def run_backward(q, k, v, stats, d_out, out, *runs):
    d_q, d_k, d_v = (_nothing(x.shape) for x in (q, k, v))
    for run, mine, theirs in places(q, k, *runs):
        own, keys, values = _flat(q)[mine], _flat(k)[theirs], _flat(v)[theirs]
        d, o = _flat(d_out)[mine], _flat(out)[mine]
        weights = np.exp(_logits(own, keys) - stats[run, :, : len(own), None])
        shift = np.einsum("qnd,qnd->nq", d, o)[..., None]
        d_weights = np.einsum("qnd,knd->nqk", d, _shared(values, q))
        d_logits = weights * (d_weights - shift) * q.shape[3] ** -0.5
        _flat(d_q)[mine] = np.einsum("nqk,knd->qnd", d_logits, _shared(keys, q))
        _flat(d_k)[theirs] = _summed(np.einsum("nqk,qnd->knd", d_logits, own), k)
        _flat(d_v)[theirs] = _summed(np.einsum("nqk,qnd->knd", weights, d), k)
    return tuple(x.astype(q.dtype) for x in (d_q, d_k, d_v))


def places(q, k, q_length, k_length, q_offset, k_offset):
    """Number of each run that has places, and its places of queries and of keys in all rows."""
    lengths = zip(q_length.reshape(-1), k_length.reshape(-1), strict=True)
    for run, (queries, keys) in enumerate(lengths):
        if queries and keys:
            starts = []
            for x, offset in ((q, q_offset), (k, k_offset)):
                start, rest = divmod(int(offset.reshape(-1)[run]), x.shape[2] * x.shape[3])
                assert rest == 0
                starts.append(start)
            yield run, slice(starts[0], starts[0] + queries), slice(starts[1], starts[1] + keys)


def _nothing(shape):
    return np.full(shape, np.nan, np.float32)


def _flat(x):
    return x.reshape(-1, *x.shape[2:]).astype(np.float32, copy=False)


def _logits(q, k):
    return np.einsum("qnd,knd->nqk", q, _shared(k, q[None])) * q.shape[-1] ** -0.5


def _shared(k, q):
    """Each key head for all query heads of its group."""
    return np.repeat(k, q.shape[2] // k.shape[1], axis=1)


def _summed(d, k):
    return d.reshape(len(d), k.shape[2], -1, d.shape[-1]).sum(2)
