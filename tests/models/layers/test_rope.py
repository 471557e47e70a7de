"""Angles of rotary embeddings apart from the places that a mask orders by."""

from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from models.layers.layers import Compute, rotary
from models.layers.qwen.qwen3 import Qwen, QwenConfig

CONFIG = QwenConfig(width=16, depth=2, hidden=24, heads=2, kv_heads=1, head_dim=8)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 10, 16)).astype(np.float32)
SEGMENT = np.array([[1] * 6 + [2] * 3 + [0], [1] * 10], np.int32)
PLACE = np.array([[*range(6), *range(3), 0], [*range(10)]], np.int32)


def read(place, rope=None):
    model = Qwen(CONFIG, Compute(dtype="float32"), nnx.Rngs(0))
    return np.asarray(model(X, SEGMENT, place, rope))


def test_pairs_of_one_place_turn_as_that_place_to_the_bit():
    heads = RNG.normal(size=(2, 10, 3, 8)).astype(np.float32)
    every = np.repeat(PLACE[..., None], 4, axis=-1)
    np.testing.assert_array_equal(rotary(heads, every), rotary(heads, PLACE))
    np.testing.assert_array_equal(read(PLACE, every), read(PLACE))


def test_each_pair_turns_by_its_own_place():
    """Interleaved M-RoPE (Qwen3-VL): pair j turns by time, row or column / theta^(2j/head)."""
    three = RNG.integers(0, 30, (2, 10, 3))
    axis, heads = np.array([0, 1, 2, 0]), RNG.normal(size=(2, 10, 3, 8)).astype(np.float32)
    turn = np.exp(1j * three[..., axis] * 1e6 ** (-np.arange(4) / 4))[:, :, None]
    wanted = (heads[..., :4] + 1j * heads[..., 4:]) * turn
    found = rotary(heads, three[..., axis].astype(np.int32), 1e6)
    np.testing.assert_allclose(found, np.concatenate([wanted.real, wanted.imag], -1), atol=1e-5)


def test_a_mask_orders_by_places_whatever_the_angles():
    """All angles of a picture's tokens may be one, and later tokens stay hidden from earlier."""
    still = np.zeros((2, 10, 4), np.int32)

    def first(x):
        model = Qwen(CONFIG, Compute(dtype="float32"), nnx.Rngs(0))
        return model(x, SEGMENT, PLACE, still)[1, 3].sum()

    moved = np.abs(np.asarray(jax.grad(first)(X)))[1].max(-1)
    assert (moved[:4] > 0).all()
    assert not moved[4:].any()


def test_adding_one_number_to_all_angles_of_a_sample_changes_nothing():
    model = replace(CONFIG, depth=1)
    read_by = Qwen(model, Compute(dtype="float32"), nnx.Rngs(0))
    rope = RNG.integers(0, 9, (2, 10, 4)).astype(np.int32)
    moved = read_by(X, SEGMENT, PLACE, rope + 5)
    np.testing.assert_allclose(moved, read_by(X, SEGMENT, PLACE, rope), atol=1e-5)
