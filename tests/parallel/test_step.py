from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.layers.float8 import fp8
from parallel.hosts.distributed import put_batch
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import OptimizerConfig, make_optimizer, make_schedule
from parallel.step import abstract_state, init_state, make_train_step, state_from
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batch

MODEL = Denoiser()


def train(mesh, steps, accumulation=1):
    abstract = abstract_state(MODEL, OPTIMIZER, RULES, mesh)
    state = init_state(MODEL, OPTIMIZER, abstract, 0)
    step = make_train_step(MODEL, OPTIMIZER, mesh, abstract, accumulation)
    history = []
    for i in range(steps):
        state, metrics = step(state, put_batch(batch(i), mesh), 3)
        history.append(jax.device_get(metrics))
    return state, history


def losses(history):
    return np.array([m["loss"] for m in history])


@pytest.fixture(scope="module")
def one_device():
    return train(make_mesh(devices=jax.devices()[:1]), 20)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_eight_devices_train_as_one_does(one_device, accumulation):
    state, history = train(make_mesh(MeshConfig(data=4, fsdp=2)), 20, accumulation)
    np.testing.assert_allclose(losses(history), losses(one_device[1]), rtol=1e-5)
    for ours, other in zip(
        jax.tree.leaves(state.ema), jax.tree.leaves(one_device[0].ema), strict=True
    ):
        np.testing.assert_allclose(ours, other, atol=1e-5)


def test_accumulated_gradients_are_those_of_the_whole_batch(one_device):
    """Micro-batches hold different counts of valid actions, so a mean of means would differ."""
    _, history = train(make_mesh(devices=jax.devices()[:1]), 20, accumulation=4)
    for name in ("loss", "grad_norm", "count"):
        ours, other = ([m[name] for m in h] for h in (history, one_device[1]))
        np.testing.assert_allclose(ours, other, rtol=1e-5)


def test_training_lowers_the_loss_and_follows_the_schedule(one_device):
    history, schedule = one_device[1], make_schedule(OPTIMIZER)
    assert losses(history)[-5:].mean() < 0.8 * losses(history)[:3].mean()
    np.testing.assert_allclose(
        [m["learning_rate"] for m in history], [schedule(i) for i in range(20)], rtol=1e-6
    )


def test_a_batch_that_does_not_split_into_micro_batches_is_refused():
    with pytest.raises(ValueError, match="16 rows does not divide over 8 devices × 4"):
        train(make_mesh(), 1, accumulation=4)


@pytest.mark.parametrize(
    "change",
    [
        {"decay_steps": None},
        {"warmup_steps": 400},
        {"learning_rate": 0.0},
        {"clip_norm": 0.0},
        {"ema_decay": 1.0},
    ],
)
def test_impossible_optimizers_are_refused(change):
    with pytest.raises(ValueError, match=f"optimizer.*{next(iter(change))}"):
        make_optimizer(OptimizerConfig(**{"decay_steps": 400, **change}))


def test_frozen_parameters_stay_and_cost_no_moments():
    optimizer = replace(OPTIMIZER, rate_factors=((r"^up/", 0), (".", 1)))
    mesh = make_mesh(devices=jax.devices()[:1])
    abstract = abstract_state(MODEL, optimizer, RULES, mesh)
    first = init_state(MODEL, optimizer, abstract, 0)
    before = jax.device_get(first.params)
    step = make_train_step(MODEL, optimizer, mesh, abstract, 2)
    state, _ = step(first, put_batch(batch(0), mesh), 3)
    jax.tree.map(np.testing.assert_array_equal, before["up"], jax.device_get(state.params["up"]))
    assert np.abs(before["down"]["kernel"] - np.asarray(state.params["down"]["kernel"])).max() > 0
    moments = [x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim == 2]
    assert set(moments) == {before["down"]["kernel"].shape}


def test_a_state_begins_from_given_parameters():
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    abstract = abstract_state(MODEL, OPTIMIZER, RULES, mesh)
    params = init_state(MODEL, OPTIMIZER, abstract, 5).params
    state = state_from(params, OPTIMIZER, abstract)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert int(state.step) == 0
    assert state.params["up"]["kernel"].sharding == abstract.params["up"]["kernel"].sharding


@dataclass(frozen=True)
class Float8(Denoiser):
    """The toy with one product in float8, scaled by what earlier steps saw."""

    def init(self, key):
        params = super().init(key)
        return params | {"down": params["down"] | {"fp8_history": np.zeros((3, 4), np.float32)}}

    def loss(self, params, batch, key):
        down = params["down"]
        product = fp8.dot(jnp.ones((2, 32)), down["kernel"], "delayed", down["fp8_history"])
        total, count = super().loss(params, batch, key)
        return total + 0 * product.sum(), count


@pytest.mark.parametrize("accumulation", [1, 2])
def test_histories_of_float8_scales_advance_and_are_never_optimised(accumulation):
    mesh, model = make_mesh(devices=jax.devices()[:1]), Float8()
    rules = (*RULES, (r"fp8_history$", PartitionSpec()))
    abstract = abstract_state(model, OPTIMIZER, rules, mesh)
    state = init_state(model, OPTIMIZER, abstract, 0)
    kernel = float(np.abs(state.params["down"]["kernel"]).max())
    step = make_train_step(model, OPTIMIZER, mesh, abstract, accumulation)
    for i in range(2):
        state, _ = step(state, put_batch(batch(i), mesh), 3)
    history = np.asarray(state.params["down"]["fp8_history"])
    assert (history[0, :2] == 1).all()
    assert history[1, 1] == pytest.approx(kernel)
    assert (history[:, 2:] == 0).all()
    np.testing.assert_array_equal(history, state.ema["down"]["fp8_history"])
