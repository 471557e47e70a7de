"""Observations read before actions are drawn: the result depends on the parameters that the model
names alone, and a field that goes on from it is the field."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Pi
from models.families.groot.inputs import groot_batch
from models.sharding import path_name
from tests.helpers.models.tiny_policy import (
    CONFIG,
    KEYS,
    openpi,
    recorded_groot,
    tiny_policy,
)

PIS = {
    "token": CONFIG,
    "suffix": replace(CONFIG, state_input="suffix", time="input"),
    "film": replace(CONFIG, film=True, insulate=True),
}


@pytest.fixture(
    params=[
        "token",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*PIS, "groot")
            if name != "token"
        ),
    ]
)
def case(request, tmp_path):
    """A model, parameters and a batch."""
    if request.param == "groot":
        policy, inputs = recorded_groot(tmp_path / "groot")
        return policy.model, policy.params, groot_batch(inputs, policy.model.config)
    model, policy = Pi(PIS[request.param]), tiny_policy()
    requests = policy.prepare(openpi(5), KEYS)
    batch = replace(policy, model=model).rows([asked.sample for asked in requests])
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) for x in leaves]
    return model, tree.unflatten(drawn), batch


def test_what_is_observed_depends_on_the_parameters_that_are_named_alone(case):
    model, params, batch = case
    traced = jax.make_jaxpr(model.observe)(params, batch).jaxpr
    read = {id(x) for equation in traced.eqns for x in equation.invars}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    used = {path for path, x in zip(paths, traced.invars, strict=False) if id(x) in read}
    named = {path for path in paths if re.search(model.observing, path)}
    assert named - used <= {"language/norm/scale"}  # π reads keys and values, no output
    assert used <= named < set(paths)


def test_a_field_goes_on_from_what_was_observed(case):
    model, params, batch = case
    shape, rng = batch.actions.shape, np.random.default_rng(1)
    chunk = rng.normal(size=(*shape[:2], 1, *shape[2:])).astype(np.float32)
    time = rng.uniform(size=(*shape[:2], 1)).astype(np.float32)
    observed = jax.jit(model.observe)(params, batch)
    assert all(len(x) == len(batch.actions) for x in jax.tree.leaves(observed))

    @jax.jit
    def field(observed, batch):
        return model.field(params, batch, observed)(chunk, time)

    whole = field(None, batch)
    blind = replace(batch, images=np.zeros_like(batch.images), text=np.zeros_like(batch.text))
    for found, wanted in zip(field(observed, blind), whole, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(field(None, blind).velocity - whole.velocity).max() > 1e-3
