"""Random rows of queries and keys (numpy), and what attention makes of them."""

import jax
import jax.numpy as jnp
import numpy as np

from models.attention.attention import MASKED


def case(seed: int, queries: int = 40, keys: int = 56, heads: int = 4, groups: int = 2):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, queries, heads, 8))
    k, v = rng.normal(size=(2, 2, keys, groups, 8))
    q_segment = np.sort(rng.integers(0, 5, (2, queries)), axis=1)
    kv_segment = np.sort(rng.integers(0, 5, (2, keys)), axis=1)
    q_segment[0, 3], kv_segment[1, :2] = 9, 0  # a query that sees nothing, and padding
    arrays = (x.astype(np.float32) for x in (q, k, v))
    return *arrays, q_segment.astype(np.int32), kv_segment.astype(np.int32)


def positions(q, k):
    return {
        f"{of}_position": np.tile(np.arange(x.shape[1], dtype=np.int32), (len(x), 1))
        for of, x in (("q", q), ("kv", k))
    }


def outputs_and_gradients(run, q, k, v, *segments, mix, **options):
    """Output, log-sum-exp and the gradients of a mixture of both."""

    def scalar(q, k, v):
        got = run(q, k, v, *segments, **options)
        lse = jnp.where(got.lse > MASKED / 2, got.lse, 0)
        return jnp.sum(got.out * mix[..., :-1]) + jnp.sum(lse * mix[..., -1]), got

    gradients, got = jax.jit(jax.grad(scalar, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x) for x in (*got, *gradients)]


def assert_near(wanted, found, atol):
    """Each array within `atol` of its largest number, log-sum-exps of nothing left out of that."""
    for a, b in zip(wanted, found, strict=True):
        scale = np.abs(np.where(a > MASKED / 2, a, 0)).max()
        np.testing.assert_allclose(a / scale, b.astype(np.float32) / scale, atol=atol)


def mixture(q):
    return np.random.default_rng(2).normal(size=(*q.shape[:3], q.shape[3] + 1))
