"""Running statistics are part of a training state: the same on any number of devices, under
accumulation, and after a resumption; frozen ones never move."""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.batch_norm import DECAY, BatchNorm, FrozenBatchNorm, advance, training
from models.layers.functional import Functional
from models.sharding import WHOLE
from parallel import checkpoint
from parallel.hosts.distributed import put_batch
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import OptimizerConfig
from parallel.step import (
    abstract_state,
    abstract_state_of,
    apply_gradients,
    init_state,
    make_train_step,
    state_from,
)
from rl.step import abstract_learner_state, learner_state
from tests.helpers.parallel.toy import LAYOUT, OPTIMIZER, Denoiser, batch

ONE, EIGHT = make_mesh(devices=jax.devices()[:1]), make_mesh(MeshConfig(data=4, fsdp=2))
CHUNK = LAYOUT.horizon * LAYOUT.action_dim
HEAVY = replace(OPTIMIZER, weight_decay=0.5, ema_decay=0.9, eps=1e-2)
"""With the usual eps, Adam would make steps of the rounding errors that a bias before a BatchNorm
has for a gradient."""


class Modules(nnx.Module):
    def __init__(self, frozen, rngs):
        norm = FrozenBatchNorm if frozen else BatchNorm
        self.seen, self.hidden = norm(LAYOUT.state_dim), norm(8)
        self.up = nnx.Linear(LAYOUT.state_dim, 8, rngs=rngs)
        self.down = nnx.Linear(8, CHUNK, rngs=rngs)

    def __call__(self, state, present):
        present = () if isinstance(self.seen, FrozenBatchNorm) else (present,)
        x = self.up(self.seen(state, *present))
        return self.down(jnp.tanh(self.hidden(x, *present)))


@dataclass(frozen=True)
class Normed:
    """Chunks from the state by layers with batch normalisation before and between them."""

    frozen: bool = False

    def init(self, key):
        return self.modules.init(key)

    def loss(self, params, batch, key):
        x = self.modules.bind(params)(batch.state, batch.weight > 0)
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum((x.reshape(weight.shape) - batch.actions) ** 2 * weight), jnp.sum(weight)

    @cached_property
    def modules(self):
        return Functional(partial(Modules, self.frozen))


def begun(model, mesh, optimizer=HEAVY):
    return init_state(model, optimizer, abstract_state(model, optimizer, WHOLE, mesh), 0)


def train(state, model, mesh, steps, accumulation=1, optimizer=HEAVY):
    abstract = abstract_state(model, optimizer, WHOLE, mesh)
    step = make_train_step(model, optimizer, mesh, abstract, accumulation)
    for i in steps:
        state, metrics = step(state, put_batch(shown(i), mesh), 3)
    return jax.device_get(state), jax.device_get(metrics)


def shown(step):
    """States far from 0, and what stands in empty slots."""
    made = batch(step)
    state = np.where(made.weight[..., None] > 0, 5 + 2 * made.state, 1e6)
    return replace(made, state=state.astype(np.float32))


def close(ours, other, **tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), ours, other)


def equal(ours, other):
    jax.tree.map(np.testing.assert_array_equal, ours, other)


@pytest.fixture(scope="module")
def alone():
    return train(begun(Normed(), ONE), Normed(), ONE, range(6))


def test_statistics_are_those_of_all_present_samples_of_each_step(alone):
    mean, variance = np.zeros(LAYOUT.state_dim), np.ones(LAYOUT.state_dim)
    for i in range(6):
        made = shown(i)
        states = made.state[made.weight > 0].astype(np.float64)
        mean = DECAY * mean + (1 - DECAY) * states.mean(0)
        variance = DECAY * variance + (1 - DECAY) * states.var(0, ddof=1)
    found = alone[0].params["seen"]["running"]
    close(found, {"mean": mean, "variance": variance, "batches": 6.0}, rtol=1e-5)
    equal(alone[0].params["hidden"]["running"]["batches"], 6.0)


def test_eight_devices_have_the_statistics_of_one(alone):
    state, metrics = train(begun(Normed(), EIGHT), Normed(), EIGHT, range(6))
    close(state.params, alone[0].params, rtol=1e-5, atol=1e-5)
    close(state.ema, alone[0].ema, rtol=1e-5, atol=1e-5)
    close(metrics, alone[1], rtol=1e-5)


@pytest.mark.parametrize("mesh", [ONE, EIGHT], ids=["one", "eight"])
def test_accumulation_leaves_the_statistics_of_unnormalised_inputs_as_they_are(alone, mesh):
    state, _ = train(begun(Normed(), mesh), Normed(), mesh, range(6), accumulation=2)
    ours, other = (s.params["seen"]["running"] for s in (state, alone[0]))
    close(ours, other, rtol=1e-5, atol=1e-5)
    equal(state.params["hidden"]["running"]["batches"], 6.0)


def test_statistics_are_neither_decayed_nor_averaged_nor_in_the_gradients_norm(alone):
    state = alone[0]
    equal(state.ema["seen"]["running"], state.params["seen"]["running"])
    equal(state.ema["hidden"]["running"], state.params["hidden"]["running"])
    assert np.abs(state.ema["up"]["kernel"] - state.params["up"]["kernel"]).max() > 0
    paths = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert any("kernel" in path for path in paths)
    assert not any("running" in path for path in paths)
    fresh = begun(Normed(), ONE)
    _, first = train(fresh, Normed(), ONE, [0])
    params = begun(Normed(), ONE).params
    (_, count), slopes = jax.value_and_grad(
        lambda p: Normed().loss(training(p), shown(0), None), has_aux=True
    )(params)
    del slopes["seen"]["running"], slopes["hidden"]["running"]
    norm = np.sqrt(sum(np.sum(np.square(x / count)) for x in jax.tree.leaves(slopes)))
    np.testing.assert_allclose(first["grad_norm"], norm, rtol=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(alone, tmp_path):
    half, _ = train(begun(Normed(), ONE), Normed(), ONE, range(3))
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        writer.save(3, half, {})
    abstract = abstract_state(Normed(), HEAVY, WHOLE, ONE)
    state, _ = train(checkpoint.restore(tmp_path, abstract), Normed(), ONE, range(3, 6))
    equal(state, alone[0])


@pytest.mark.parametrize("name", ["adamw", "schedule_free", "muon", "adafactor", "adamw_fp8"])
def test_every_optimizer_leaves_statistics_to_the_step(name):
    optimizer = OptimizerConfig(
        name, weight_decay=0.5, warmup_steps=1, decay_steps=9, matrices="kernel",
        schedule="constant", rate_factors=(("up", 0.0), (".", 1.0)),
    )  # fmt: skip
    model = Normed()
    state, _ = train(begun(model, ONE, optimizer), model, ONE, [0], optimizer=optimizer)
    states = shown(0).state[shown(0).weight > 0]
    running = state.params["seen"]["running"]
    np.testing.assert_allclose(running["mean"], (1 - DECAY) * states.mean(0), rtol=1e-5)
    equal(state.ema["seen"]["running"], running)


def test_frozen_layers_keep_every_bit_and_need_no_rate():
    model = Normed(frozen=True)
    optimizer = replace(HEAVY, rate_factors=(("up|down", 1.0),))
    params = begun(model, ONE, optimizer).params
    params["seen"]["frozen"]["mean"] = params["seen"]["frozen"]["mean"] + 5
    params["hidden"]["frozen"]["scale"] = params["hidden"]["frozen"]["scale"] * 0.7
    before = jax.device_get(params)
    for mesh in (ONE, EIGHT):
        abstract = abstract_state(model, optimizer, WHOLE, mesh)
        placed = jax.device_put(before, jax.tree.map(lambda x: x.sharding, abstract.params))
        start = state_from(placed, optimizer, abstract)
        state, _ = train(start, model, mesh, range(3), 2, optimizer)
        for saved in (state.params, state.averaged):
            for name in ("seen", "hidden"):
                equal(saved[name]["frozen"], before[name]["frozen"])
            assert np.abs(saved["up"]["kernel"] - before["up"]["kernel"]).max() > 0
    whole = abstract_state_of(before, optimizer, WHOLE, ONE)  # as RL's learner averages: all
    state, _ = train(state_from(before, optimizer, whole), model, ONE, range(3), 1, optimizer)
    equal(state.ema["seen"]["frozen"], before["seen"]["frozen"])


@pytest.mark.parametrize("model", [Normed(), Normed(frozen=True)], ids=["running", "frozen"])
def test_outside_of_training_a_samples_loss_does_not_depend_on_its_neighbours(model, alone):
    """With frozen statistics, in training too."""
    params = alone[0].params
    if model.frozen:  # with statistics of these states, or tanh would saturate and round its slopes
        params = begun(model, ONE).params
        of_states = params["seen"]["frozen"]
        of_states |= {"mean": of_states["mean"] + 5, "variance": of_states["variance"] * 4}
    made = shown(0)
    other = replace(made, state=np.concatenate([made.state[:1], made.state[1:] * 3 - 7]))
    one = jax.tree.map(lambda x: x[:1], made)

    def first(params, batch):
        """Loss of the first row, and its slopes."""
        rows = np.arange(len(batch.weight))[:, None, None, None] < 1
        return model.loss(params, replace(batch, action_mask=batch.action_mask & rows), None)[0]

    for wrapped in (params, *([training(params)] if model.frozen else [])):
        values = [jax.value_and_grad(first)(wrapped, b) for b in (made, other, one)]
        close(values[1], values[0], rtol=1e-5, atol=1e-5)
        close(values[2], values[0], rtol=1e-5, atol=1e-5)
    if not model.frozen:
        learning = [first(training(params), b) for b in (made, one)]
        assert abs(learning[0] - learning[1]) > 1e-3


def test_rl_which_computes_without_training_keeps_statistics_as_they_are(alone):
    optimizer = replace(HEAVY, rate_factors=(("^policy/", 1.0),))
    params = {"policy": alone[0].params}
    abstract = abstract_learner_state(params, optimizer, WHOLE, ONE)
    state = learner_state(params, optimizer, abstract)
    slopes = jax.grad(lambda p: Normed().loss(p["policy"], shown(0), None)[0])(params)
    placed = jax.tree.map(lambda x: x.sharding, abstract.params)
    new, _ = apply_gradients(state, jnp.float32(1), jnp.float32(9), slopes, optimizer, placed)
    for saved in (new.params["policy"], new.ema["policy"]):
        equal(saved["seen"]["running"], alone[0].params["seen"]["running"])
        assert np.abs(saved["up"]["kernel"] - alone[0].params["up"]["kernel"]).max() > 0


def test_a_model_without_statistics_is_trained_by_the_same_program():
    params = Denoiser().init(jax.random.key(0))
    for found in (training(params), advance(params, params, params)):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
        assert all(a is b for a, b in pairs)
