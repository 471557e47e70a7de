import jax
import numpy as np
import pytest

from parallel.hosts.distributed import put_batch
from parallel.mesh import make_mesh
from parallel.step import abstract_state, init_state, make_train_step
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batch, together


@pytest.mark.slow
def test_two_processes_train_as_one_does():
    outputs = together("tests.helpers.parallel.host", 2, 2)
    printed = [
        [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]
        for output in outputs
    ]
    assert printed[0] == printed[1]
    np.testing.assert_allclose(printed[0], alone(), rtol=1e-5)


def alone():
    mesh = make_mesh(devices=jax.devices()[:1])
    abstract = abstract_state(Denoiser(), OPTIMIZER, RULES, mesh)
    state = init_state(Denoiser(), OPTIMIZER, abstract, 0)
    step = make_train_step(Denoiser(), OPTIMIZER, mesh, abstract)
    losses = []
    for i in range(5):
        state, metrics = step(state, put_batch(batch(i), mesh), 3)
        losses.append(float(metrics["loss"]))
    return losses


def test_rows_that_do_not_divide_over_the_devices_are_refused():
    with pytest.raises(ValueError, match="12 rows does not divide over 8 devices"):
        put_batch(batch(0, rows=12), make_mesh())
