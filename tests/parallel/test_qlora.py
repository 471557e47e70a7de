"""Adapters trained on a frozen base in few bits: their gradients, on one device and eight, saved
and resumed."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.checkpoints import own
from models.families.pi.model import SHARDING_RULES, Pi
from models.layers.adapters import in_f32, merge
from models.layers.functional import fill, only
from models.layers.quantized import Kind, is_quantized
from models.load import like_model
from models.model import QuantizedTrainable
from parallel import checkpoint
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import select
from parallel.step import abstract_state, make_train_step, state_from
from tests.helpers.parallel import small_pi
from tests.helpers.parallel.small_qlora import OPTIMIZER, adapted, parameters

KEY = jax.random.key(1)
ROWS = 3
"""Rows of the batch whose gradient is taken: of one, two and three samples."""
ERRORS = {"float8": 0.2, "int8": 0.05, "nf4": 0.4}
"""Bounds on the error of the adapters' gradient, relative to its norm, for a net of random numbers
(docs/results/qlora.md)."""
NF4 = adapted("nf4")
ONE = make_mesh(MeshConfig(), jax.devices()[:1])


def gradient(config, params):
    wanted = only(params, select(OPTIMIZER, params)[0])
    return compiled_gradient(config)(wanted, params)


@functools.cache
def compiled_gradient(config):
    model = Pi(config)
    batch = jax.tree.map(lambda x: jnp.asarray(x[:ROWS]), small_pi.batch(0))
    return jax.jit(jax.grad(lambda wanted, p: model.loss(fill(wanted, p), batch, KEY)[0]))


def difference(one, other) -> float:
    squares = [
        (float(np.sum((np.asarray(a) - b) ** 2)), float(np.sum(np.asarray(b) ** 2)))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    ]
    return float(np.sqrt(sum(s[0] for s in squares) / sum(s[1] for s in squares)))


@pytest.fixture(scope="module")
def of_f32():
    return gradient(adapted(), parameters(adapted()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Kind))
def test_gradients_of_adapters_on_a_rounded_base_are_near_those_on_f32(kind, of_f32):
    rounded = gradient(adapted(), jax.jit(in_f32)(parameters(adapted(kind))))
    assert ERRORS[kind] / 10 < difference(rounded, of_f32) < ERRORS[kind]


@pytest.mark.slow
def test_gradients_of_adapters_on_few_bits_are_those_on_the_same_numbers_in_f32():
    params = parameters(NF4)
    same = gradient(adapted(), jax.jit(in_f32)(params))
    assert difference(gradient(NF4, params), same) < 1e-5


def begun(config, mesh):
    abstract = abstract_state(QuantizedTrainable(Pi(config)), OPTIMIZER, SHARDING_RULES, mesh)
    params = jax.tree.map(
        lambda x, a: jax.device_put(jnp.asarray(x, a.dtype), a.sharding),
        parameters(config),
        abstract.params,
    )
    return state_from(params, OPTIMIZER, abstract, consume=True), abstract


def run(config, mesh, steps=20, accumulation=1):
    state, abstract = begun(config, mesh)
    step = make_train_step(QuantizedTrainable(Pi(config)), OPTIMIZER, mesh, abstract, accumulation)
    losses = []
    for i in range(steps):
        state, metrics = step(state, small_pi.placed(i, mesh), 3)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state, abstract, step


@pytest.fixture(scope="module")
def alone():
    return run(NF4, ONE)


@pytest.mark.slow
def test_the_loss_falls_while_the_base_stays_in_few_bits_and_has_no_second_copy(alone):
    losses, state, _, _ = alone
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()
    frozen = 0
    for (path, leaf), first, average in zip(
        jax.tree_util.tree_leaves_with_path(state.params),
        jax.tree.leaves(parameters(NF4)),
        jax.tree.leaves(state.ema, is_leaf=lambda x: x is None),
        strict=True,
    ):
        adapter = "lora_" in jax.tree_util.keystr(path)
        assert (average is None) != adapter
        assert np.array_equal(leaf, jnp.asarray(first, leaf.dtype)) != adapter
        frozen += not adapter
    assert frozen > 20
    assert jax.tree.structure(state.averaged) == jax.tree.structure(state.params)
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
    assert state.params["embedding"].dtype == jnp.bfloat16
    kernel = state.params["language"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.scale.dtype == jnp.float8_e4m3fn
    assert kernel.scale_mean.dtype == jnp.float32


@pytest.mark.slow
def test_eight_devices_train_as_one(alone):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    losses, state, abstract, _ = run(NF4, mesh, 5, accumulation=2)
    np.testing.assert_allclose(losses, alone[0][:5], rtol=1e-5)
    kernel = state.params["language"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.q.sharding.spec == PartitionSpec("stage", "fsdp", "tensor")
    factor = state.params["vision"]["blocks"]["q"]["lora_a"]
    assert factor.sharding.spec == PartitionSpec(None, "tensor")
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


@pytest.mark.slow
def test_a_run_resumes_exactly_and_its_checkpoint_acts_in_f32(alone, tmp_path):
    _, _, abstract, step = alone
    state, _ = step(begun(NF4, ONE)[0], small_pi.placed(0, ONE), 3)
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        writer.save(1, state, {})
    restored = checkpoint.restore(tmp_path / "1", abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    saved = own.restore_params(tmp_path, "ema", like_model(Pi(NF4)))
    assert is_quantized(saved["language"]["layers"]["mlp"]["up"]["kernel"])
    assert saved["embedding"].dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, saved, state.averaged)
    again, _ = step(restored, small_pi.placed(1, ONE), 3)
    further, _ = step(state, small_pi.placed(1, ONE), 3)
    jax.tree.map(np.testing.assert_array_equal, again, further)


@pytest.mark.slow
def test_merged_adapters_of_every_stack_compute_the_same():
    params = parameters(NF4)
    merged = merge(NF4, params)[0]
    folded = jax.jit(lambda p: merge(NF4, p)[1])(params)
    assert not merged.adapted
    assert not merged.compute.quantized
    leaves = jax.tree_util.tree_leaves_with_path(folded, is_leaf=is_quantized)
    assert not any("lora" in jax.tree_util.keystr(path) or is_quantized(x) for path, x in leaves)
    batch = jax.tree.map(lambda x: jnp.asarray(x[:ROWS]), small_pi.batch(0))
    losses = [
        float(jax.jit(Pi(c).loss)(p, batch, KEY)[0]) for c, p in ((NF4, params), (merged, folded))
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)
