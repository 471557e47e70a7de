"""Dropout drops a share of numbers, keeps the mean, and draws by sample and site alone."""

import jax
import jax.numpy as jnp
import numpy as np

from models.layers.dropout import drop, folded, sample_keys


def test_a_share_is_dropped_and_the_mean_stays():
    keys = sample_keys(jax.random.key(0), jnp.arange(64).reshape(8, 8))
    out = np.asarray(drop(jnp.ones((8, 8, 500)), keys, 3, 0.2))
    assert set(np.unique(out)) == {np.float32(0), np.float32(1.25)}
    assert abs(out.mean() - 1) < 0.02


def test_draws_are_those_of_the_id_and_the_site():
    x = jnp.ones((3, 100))
    keys = sample_keys(jax.random.key(0), jnp.array([5, 7, 5]))
    out = np.asarray(drop(x, keys, 0, 0.5))
    np.testing.assert_array_equal(out[0], out[2])
    assert (out[0] != out[1]).any()
    assert (out != np.asarray(drop(x, keys, 1, 0.5))).any()
    other = folded(keys, jnp.array([0, 0, 1]))
    assert (np.asarray(drop(x, other, 0, 0.5))[0] != np.asarray(drop(x, other, 0, 0.5))[2]).any()
