"""The tiny preset on an NVIDIA GPU computes what the CPU computes, in f32 and packed."""

import dataclasses

import jax
import numpy as np
import pytest

from models import Pi
from models.layers.layers import Compute
from tools.bench.data.packing import mixture, packed
from tools.recipes.presets import TINY


@pytest.fixture(scope="module")
def gpu() -> jax.Device:
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU here; run `pytest -m gpu` on a machine that has one")
    return jax.devices()[0]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "blocked"])
def test_loss_and_gradients_on_the_gpu_equal_the_cpus(gpu, attention):
    model = Pi(dataclasses.replace(TINY.model, compute=Compute("float32", attention)))
    batch = packed(mixture(16))
    results = []
    for device in (gpu, jax.devices("cpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            params = model.init(jax.random.key(0))
            key = jax.random.key(1)
            got = jax.jit(jax.value_and_grad(lambda p, k=key: model.loss(p, batch, k)[0]))(params)
            results.append(jax.tree.leaves(jax.device_get(got)))
    for a, b in zip(*results, strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-4)
