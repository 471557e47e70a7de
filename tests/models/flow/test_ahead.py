"""Modulations that are computed ahead, for all flow times at once, change no chunk."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.flow import flow
from models.flow.realtime_chunking import Guidance
from models.load import load_policy
from models.sharding import path_name
from parallel.planning.random_batch import random_batch
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD, close
from tests.helpers.models.tiny_policy import recorded_groot

pytestmark = pytest.mark.slow

STEPS = 5


@pytest.fixture(scope="module", params=["pi05", "groot"])
def case(request, tmp_path_factory):
    """A model, its recorded parameters, and a batch of it."""
    if request.param == "groot":
        policy, _ = recorded_groot(tmp_path_factory.mktemp("groot") / "groot")
    else:
        policy = load_policy(FIXTURES / "pi05", **TOLD["pi05"])
    batch = random_batch(policy.model.config, rows=2, samples=2)
    return policy.model, policy.params, batch


def sampled(case, solver, guidance=None, ahead=True):
    model, params, batch = case
    noise = jax.random.normal(jax.random.key(0), batch.actions.shape)
    field = model.field(params, batch)
    known = model._modules.bind(params).ahead if ahead else None
    return jax.jit(partial(flow.sample, field, steps=STEPS, solver=solver, ahead=known))(
        noise, guidance=guidance
    )


@pytest.mark.parametrize("solver", ["euler", "ab2"])
def test_a_chunk_is_that_of_modulations_computed_step_by_step(case, solver):
    close(sampled(case, solver), sampled(case, solver, ahead=False), 1e-5)


def test_a_guided_chunk_too(case):
    """Pulled gently: a full pull magnifies a difference of 3e-7 in the noise a thousandfold."""
    ones = jnp.ones_like(case[2].actions)
    guidance = Guidance(0.1 * ones, 0.1 * ones)
    found, other = (sampled(case, "euler", guidance, ahead) for ahead in (True, False))
    close(found, other, 1e-5)
    assert np.abs(found - sampled(case, "euler")).max() > 1e-3


def test_models_sample_so(case, monkeypatch):
    model, params, batch = case
    noise = jax.random.normal(jax.random.key(0), batch.actions.shape)
    sample = jax.jit(model.config.changed(euler_steps=STEPS).build().sample_actions)
    close(sample(params, batch, noise), sampled(case, model.config.solver, ahead=False), 1e-5)
    modules = type(model._modules.bind(params))

    def refuse(self, time):
        raise InterruptedError

    monkeypatch.setattr(modules, "ahead", refuse)
    with pytest.raises(InterruptedError):
        model.sample_actions(params, batch, noise)


def test_the_field_then_reads_no_weights_of_modulations(case):
    model, params, batch = case
    time = jnp.full(1, 0.4)
    known = jax.tree.map(lambda x: x[0], model._modules.bind(params).ahead(time))
    noised = jax.random.normal(jax.random.key(0), batch.actions.shape)[:, :, None]
    at = jnp.full(noised.shape[:3], 0.4)

    def without(path, x):
        return x * 0 if "modulation" in path_name(path) else x

    bare = jax.tree_util.tree_map_with_path(without, params)
    found = model.field(bare, batch)(noised, at, known).velocity
    close(found, model.field(params, batch)(noised, at).velocity, 1e-5)
    assert np.abs(found - model.field(bare, batch)(noised, at).velocity).max() > 1e-3
