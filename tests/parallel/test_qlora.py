"""Adapters trained on a frozen base in few bits: their gradients, on one device and eight, saved
and resumed."""

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.checkpoints import own
from models.layers.adapters import in_f32
from models.layers.functional import fill, only
from models.layers.quantized import Kind, is_quantized
from models.load import like_model
from models.pi import lora
from models.pi.model import SHARDING_RULES, Pi
from parallel import checkpoint
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import select
from parallel.step import abstract_state, make_train_step, state_from
from tests.helpers.parallel import small_pi
from tests.helpers.parallel.small_qlora import OPTIMIZER, Kept, adapted, parameters

KEY = jax.random.key(1)
ERRORS = {"float8": 0.2, "int8": 0.05, "nf4": 0.4}
"""Bounds on the error of the adapters' gradient, relative to its norm, for a net of random numbers
(docs/results/qlora.md)."""
ONE = make_mesh(MeshConfig(), jax.devices()[:1])


def gradient(config, params):
    wanted = only(params, select(OPTIMIZER, params)[0])
    model, batch = Pi(config), jax.tree.map(jnp.asarray, small_pi.batch(0))
    return jax.jit(jax.grad(lambda w: model.loss(fill(w, params), batch, KEY)[0]))(wanted)


def difference(one, other) -> float:
    squares = [
        (float(np.sum((np.asarray(a) - b) ** 2)), float(np.sum(np.asarray(b) ** 2)))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    ]
    return float(np.sqrt(sum(s[0] for s in squares) / sum(s[1] for s in squares)))


@pytest.fixture(scope="module")
def of_f32():
    return gradient(adapted(), parameters(adapted()))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_gradients_of_adapters_are_those_on_the_rounded_base_and_near_those_on_f32(kind, of_f32):
    config = adapted(kind)
    params = parameters(config)
    found = gradient(config, params)
    assert difference(found, gradient(adapted(), in_f32(params))) < 1e-5
    assert ERRORS[kind] / 10 < difference(found, of_f32) < ERRORS[kind]


def run(config, mesh, steps=20, optimizer=OPTIMIZER, accumulation=1):
    model = Kept(config)
    abstract = abstract_state(model, optimizer, SHARDING_RULES, mesh)
    params = jax.tree.map(
        lambda x, a: jax.device_put(jnp.asarray(x, a.dtype), a.sharding),
        parameters(config),
        abstract.params,
    )
    state = state_from(params, optimizer, abstract, consume=True)
    step = make_train_step(model, optimizer, mesh, abstract, accumulation)
    losses = []
    for i in range(steps):
        state, metrics = step(state, small_pi.placed(i, mesh), 3)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state, abstract, step


@pytest.fixture(scope="module")
def alone():
    return run(adapted("nf4"), ONE)


def test_the_loss_falls_while_the_base_stays_and_has_no_second_copy(alone):
    losses, state, _, _ = alone
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()
    begun = parameters(adapted("nf4"))
    frozen = 0
    for (path, leaf), first, average in zip(
        jax.tree_util.tree_leaves_with_path(state.params),
        jax.tree.leaves(begun),
        jax.tree.leaves(state.ema, is_leaf=lambda x: x is None),
        strict=True,
    ):
        adapter = "lora_" in jax.tree_util.keystr(path)
        assert (average is None) != adapter
        assert np.array_equal(leaf, first) != adapter
        frozen += not adapter
    assert frozen > 20
    assert jax.tree.structure(state.averaged) == jax.tree.structure(state.params)


def test_eight_devices_train_as_one(alone):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    losses, state, abstract, _ = run(adapted("nf4"), mesh, 5, accumulation=2)
    np.testing.assert_allclose(losses, alone[0][:5], rtol=1e-5)
    kernel = state.params["language"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.q.sharding.spec == PartitionSpec("stage", "fsdp", "tensor")
    factor = state.params["vision"]["blocks"]["q"]["lora_a"]
    assert factor.sharding.spec == PartitionSpec(None, "tensor")
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


def test_a_run_resumes_exactly_and_its_checkpoint_acts(alone, tmp_path):
    _, _, abstract, step = alone
    config, mesh = adapted("nf4"), ONE
    _, state, _, _ = run(config, mesh, 3)
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        writer.save(3, state, {})
    restored = checkpoint.restore(tmp_path / "3", abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    again, _ = step(restored, small_pi.placed(3, mesh), 3)
    further, _ = step(state, small_pi.placed(3, mesh), 3)
    jax.tree.map(np.testing.assert_array_equal, again, further)
    saved = own.restore_params(tmp_path, "ema", like_model(Pi(config)))
    kernel = saved["language"]["layers"]["mlp"]["up"]["kernel"]
    assert is_quantized(kernel)
    np.testing.assert_array_equal(
        kernel.q, further.params["language"]["layers"]["mlp"]["up"]["kernel"].q
    )


def test_a_frozen_rest_in_bfloat16_trains_and_is_read_back_in_f32(tmp_path):
    optimizer = replace(OPTIMIZER, frozen_dtype="bfloat16")
    losses, state, _, _ = run(adapted("int8"), ONE, 2, optimizer)
    assert np.isfinite(losses).all()
    assert state.params["embedding"].dtype == jnp.bfloat16
    assert state.params["language"]["layers"]["mlp"]["up"]["kernel"].scale.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        writer.save(2, state, {})
    params = own.restore_params(tmp_path, "ema", like_model(Pi(adapted("int8"))))
    assert params["embedding"].dtype == jnp.float32
    np.testing.assert_array_equal(params["embedding"], state.params["embedding"])


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_merged_adapters_of_every_stack_compute_the_same(kind):
    config = adapted(kind)
    params = parameters(config)
    merged, folded = lora.merge(config, params)
    assert not merged.adapted
    assert not merged.compute.quantized
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(folded)}
    assert not any("lora" in name or "'q'" in name.rpartition("kernel")[2] for name in names)
    batch = jax.tree.map(jnp.asarray, small_pi.batch(0))
    losses = [
        float(jax.jit(Pi(c).loss)(p, batch, KEY)[0])
        for c, p in ((config, params), (merged, folded))
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)
