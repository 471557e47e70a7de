"""Policies whose layers are kept apart act as those whose layers are stacked."""

import jax
import numpy as np
import pytest

from models import load_policy
from models.layers.stack import Apart
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD, close, observation
from tests.helpers.models.tiny_policy import KEYS, PROMPTS, recorded_groot, seen, tiny_policy
from tools.convert_checkpoint import convert
from tools.quantize import quantize

pytestmark = pytest.mark.slow


def acted(policy, name):
    with np.load(FIXTURES / name / "case.npz") as file:
        arrays = dict(file)
    given, dims = observation(arrays), len(policy.processor.embodiments[0].state.offset)
    given["state"] = given["state"][:, :dims]
    return policy.infer(given, arrays["sample_noise"])["actions"]


@pytest.mark.parametrize("name", TOLD)
def test_openpis_policies_act_alike(name):
    stacked, apart = (load_policy(FIXTURES / name, apart=a, **TOLD[name]) for a in (False, True))
    assert isinstance(apart.params["expert"]["layers"]["mlp"]["up"]["kernel"], Apart)
    close(acted(apart, name), acted(stacked, name), 1e-6)


@pytest.mark.parametrize("kind", ["nf4", "float8"])
def test_quantised_policies_act_alike(kind, tmp_path):
    convert(
        quantize(load_policy(FIXTURES / "pi05", **TOLD["pi05"]), kind=kind), tmp_path, "chiliad"
    )
    stacked, apart = (load_policy(tmp_path, apart=a) for a in (False, True))
    close(acted(apart, "pi05"), acted(stacked, "pi05"), 1e-6)
    untrained = apart.varied(params=jax.jit(apart.model.init)(jax.random.key(0)))
    assert np.isfinite(acted(untrained, "pi05")).all()


def test_groot_acts_alike(tmp_path):
    stacked, given = recorded_groot(tmp_path / "groot")
    apart = load_policy(tmp_path / "groot", euler_steps=1, apart=True)
    assert isinstance(apart.params["dit"]["cross_blocks"]["up"]["kernel"], Apart)
    close(apart.infer(given)["actions"], stacked.infer(given)["actions"], 1e-6)


def test_other_stacked_parameters_can_take_their_place(tmp_path):
    stacked = tiny_policy()
    convert(stacked, tmp_path, "chiliad")
    apart = load_policy(tmp_path, apart=True)
    other = jax.tree.map(lambda w: 0.9 * w, stacked.params)
    given = seen(), PROMPTS, KEYS
    found = apart.varied(params=other).act(*given)
    close(found, stacked.varied(params=other).act(*given), 1e-6)
    assert np.abs(found - apart.act(*given)).max() > 1e-3


def test_a_mesh_is_refused():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(ValueError, match="on one device only"):
        load_policy(FIXTURES / "pi05", mesh=mesh, apart=True, **TOLD["pi05"])
