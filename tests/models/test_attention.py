"""Every implementation of `attend` against a plain softmax, forward, residual and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.attention import MASKED, attend, merge

IMPLEMENTATIONS = ("dense", "blocked")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", 16)


def case(seed: int, queries: int = 40, keys: int = 56, heads: int = 4, groups: int = 2):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, queries, heads, 8))
    k, v = rng.normal(size=(2, 2, keys, groups, 8))
    q_segment = np.sort(rng.integers(0, 5, (2, queries)), axis=1)
    kv_segment = np.sort(rng.integers(0, 5, (2, keys)), axis=1)
    q_segment[0, 3], kv_segment[1, :2] = 9, 0  # a query that sees nothing, and padding
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    return *arrays, jnp.asarray(q_segment), jnp.asarray(kv_segment)


def reference(q, k, v, q_segment, kv_segment, causal=False):
    """Softmax written out per query in float64; no code shared with the implementations."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros_like(q), np.full(q.shape[:3], MASKED)
    for b, i, n in np.ndindex(q.shape[:3]):
        seen = (kv_segment[b] == q_segment[b, i]) & (q_segment[b, i] != 0)
        if causal:
            seen = seen & (np.arange(k.shape[1]) <= i)
        if not seen.any():
            continue
        g = n // (q.shape[2] // k.shape[2])
        logits = k[b, seen, g] @ q[b, i, n] / np.sqrt(q.shape[3])
        weights = np.exp(logits - logits.max())
        out[b, i, n] = weights @ v[b, seen, g] / weights.sum()
        lse[b, i, n] = logits.max() + np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_implementations_equal_a_softmax_over_the_visible_keys(implementation, causal):
    q, k, v, q_segment, kv_segment = case(0)
    positions = {
        "q_position": jnp.tile(jnp.arange(q.shape[1]), (2, 1)),
        "kv_position": jnp.tile(jnp.arange(k.shape[1]), (2, 1)),
    }
    got = attend(
        q, k, v, q_segment, kv_segment, causal=causal, implementation=implementation, **positions
    )
    out, lse = reference(q, k, v, np.asarray(q_segment), np.asarray(kv_segment), causal)
    np.testing.assert_allclose(got.out, out, atol=1e-5)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_blocked_has_the_gradients_of_dense_through_output_and_residual(causal):
    q, k, v, q_segment, kv_segment = case(1)
    mix = np.random.default_rng(2).normal(size=(*q.shape[:3], q.shape[3] + 1))
    positions = {
        "q_position": jnp.tile(jnp.arange(q.shape[1]), (2, 1)),
        "kv_position": jnp.tile(jnp.arange(k.shape[1]), (2, 1)),
    }

    def scalar(implementation, q, k, v):
        got = attend(
            q, k, v, q_segment, kv_segment,
            causal=causal, implementation=implementation, **positions,
        )  # fmt: skip
        lse = jnp.where(got.lse > MASKED / 2, got.lse, 0)
        return jnp.sum(got.out * mix[..., :-1]) + jnp.sum(lse * mix[..., -1])

    dense, blocked = (jax.grad(scalar, (1, 2, 3))(name, q, k, v) for name in IMPLEMENTATIONS)
    for a, b in zip(dense, blocked, strict=True):
        scale = float(np.abs(a).max())
        assert scale > 0.1
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_keep_an_f32_softmax(implementation):
    q, k, v, q_segment, kv_segment = case(5)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    got = attend(*low, q_segment, kv_segment, implementation=implementation)
    exact = [np.asarray(x, np.float32) for x in low]
    out, lse = reference(*exact, np.asarray(q_segment), np.asarray(kv_segment))
    assert got.out.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(got.out, np.float32), out, atol=2**-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_merged_parts_equal_attention_over_all_keys(implementation):
    q, k, v, q_segment, kv_segment = case(3)

    def part(s: slice):
        return attend(
            q, k[:, s], v[:, s], q_segment, kv_segment[:, s], implementation=implementation
        )

    whole = part(slice(None))
    joined = merge(part(slice(0, 20)), part(slice(20, 21)), part(slice(21, None)))
    np.testing.assert_allclose(joined.out, whole.out, atol=1e-6)
    np.testing.assert_allclose(joined.lse, whole.lse, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_leaks_between_segments(implementation):
    q, k, v, q_segment, kv_segment = case(4)
    changed = (kv_segment == 2)[..., None, None]
    before, after = (
        attend(q, keys, values, q_segment, kv_segment, implementation=implementation).out
        for keys, values in ((k, v), (jnp.where(changed, 50.0, k), jnp.where(changed, -50.0, v)))
    )
    other = np.asarray(q_segment != 2)
    np.testing.assert_array_equal(np.asarray(before)[other], np.asarray(after)[other])
    assert np.abs(np.asarray(before - after)[~other]).max() > 1


def test_blocked_computes_only_the_block_pairs_that_meet():
    segment = jnp.repeat(jnp.arange(1, 9), 16)[None]
    x = jnp.ones((1, 128, 1, 8))
    side = attention._Side.cut((x,), segment, jnp.zeros_like(segment))
    np.testing.assert_array_equal(attention._meets(side, side), np.eye(8, dtype=bool))


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match=r"'flash3'.*dense"):
        attend(*case(0), implementation="flash3")  # type: ignore[arg-type]
