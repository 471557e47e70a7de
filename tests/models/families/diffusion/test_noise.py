"""Noise schedules, and that neither a chunk nor its training depends on others of its batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.families.diffusion.model import cropped
from models.families.diffusion.noise import NoiseConfig, denoise, draw
from tests.helpers.models.policy_cases import arrays


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("ddpm", NoiseConfig(10)),
        ("ddim", NoiseConfig(20, sampler="ddim")),
        ("sample", NoiseConfig(12, "linear")),
    ],
)
def test_schedules_are_diffusers(case, config):
    wanted = arrays(f"diffusion_{case}")["alphas_cumprod"]
    np.testing.assert_allclose(config.kept, wanted, rtol=3e-7)


def test_schedules_with_ends_begin_and_end_at_them():
    for betas in ("linear", "scaled_linear", "sigmoid"):
        kept = NoiseConfig(1000, betas, 0.001, 0.01).kept.astype(np.float64)
        ends = 1 - kept[0], 1 - kept[-1] / kept[-2]
        near = (0.001 + 0.009 / (1 + np.exp(6)), 0.01 - 0.009 / (1 + np.exp(6)))
        np.testing.assert_allclose(ends, near if betas == "sigmoid" else (0.001, 0.01), rtol=1e-3)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_a_chunk_depends_on_its_own_noise_alone(sampler):
    config = NoiseConfig(12, sampler=sampler)
    start = np.random.default_rng(0).normal(size=(3, 2, 4, 2)).astype(np.float32)
    sample = jax.jit(lambda x: denoise(config, lambda x, t: jnp.tanh(x) * (t + 1) / 12, x, 6))
    whole = sample(start)
    np.testing.assert_array_equal(sample(start[::-1])[::-1], whole)
    np.testing.assert_allclose(sample(start[1:2]), whole[1:2], atol=1e-6)
    assert np.abs(whole).max() <= 1
    other = sample(start + np.float32(1e-6))
    assert (np.abs(other - whole).max() > 0.01) == (sampler == "ddpm"), "steps add other noise"


def test_a_denoiser_that_knows_the_chunk_finds_it():
    chunk = np.random.default_rng(1).uniform(-1, 1, (2, 4, 2)).astype(np.float32)
    for sampler in ("ddpm", "ddim"):
        config = NoiseConfig(12, sampler=sampler, predicts="sample")
        found = denoise(config, lambda x, t: jnp.asarray(chunk), np.ones_like(chunk), 4)
        np.testing.assert_allclose(found, chunk, atol=1e-6)


def test_draws_and_crops_are_a_samples_own():
    key, ids = jax.random.key(0), np.array([[3, 5], [7, 3]], np.int32)
    time, noise = draw(key, ids, 200, (4, 2), 10)
    np.testing.assert_array_equal(time[0, 0], time[1, 1])
    np.testing.assert_array_equal(noise[0, 0], noise[1, 1])
    assert set(np.unique(time)) == set(range(10))
    pictures = np.broadcast_to(
        np.arange(48.0, dtype=np.float32).reshape(6, 8, 1), (2, 2, 2, 2, 6, 8, 3)
    )
    parts = np.asarray(cropped(pictures, (4, 5), ids, key))
    np.testing.assert_array_equal(parts[0, 0], parts[1, 1])
    np.testing.assert_array_equal(parts[..., 0, :, :, :], parts[..., 1, :, :, :])
    corners = parts[:, :, :, 0, 0, 0, 0]
    assert len(np.unique(corners)) > 1
    np.testing.assert_array_equal(parts - corners[..., None, None, None, None], parts * 0 + (
        pictures[..., :4, :5, :]
    ))  # fmt: skip
    middle = cropped(pictures, (4, 5), ids, None)
    np.testing.assert_array_equal(middle, pictures[..., 1:5, 2:7, :])
