from dataclasses import replace

import jax
import numpy as np
import pytest

from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.parallel import small_pi

STEPS = 4


def losses(mesh, chunk):
    compute = replace(small_pi.CONFIG.compute, chunk=chunk)
    config = replace(small_pi.CONFIG, compute=compute)
    return small_pi.train(mesh, steps=STEPS, config=config).losses


@pytest.fixture(scope="module")
def one_device():
    return losses(make_mesh(devices=jax.devices()[:1]), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [MeshConfig(2, 2, 1, 2, 1), MeshConfig(1, 2, 2, 1, 2)], ids=["context", "stage"]
)
def test_chunks_of_what_devices_hold_train_as_one_device_does_without(one_device, sizes):
    np.testing.assert_allclose(losses(make_mesh(sizes), 7), one_device, rtol=1e-5)
