"""Solvers of the flow: their order, what each costs, and Euler's steps as they always were."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Pi, load_policy
from models.config import model_config, to_json
from models.families.groot.model import GrootConfig
from models.families.pi.fast.model import Pi0FastConfig
from models.families.pi.model import PiConfig
from models.flow import flow
from models.flow.realtime_chunking import Given, Guidance
from parallel.checkpoint import CheckpointWriter
from parallel.planning.random_batch import random_batch
from tests.helpers.models.tiny_policy import CONFIG, KEYS, PROCESSOR, openpi, tiny_policy
from tests.own_smol import SmolConfig

START = np.random.default_rng(0).uniform(0.5, 2, (3, 5, 2)).astype(np.float32)
SOLVERS = ["euler", "ab2"]


def curved(x, t):
    """A velocity whose flow from x at t = 1 ends at 1 / (1 / x + 1 / 2)."""
    return t * x**2


def error(velocity, end, steps: int, solver: flow.Solver) -> float:
    found = jax.jit(lambda x: flow.integrate(velocity, x, steps, solver=solver))(START)
    return float(np.mean(np.asarray(found, np.float64) - end))


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("ab2", 2)])
def test_halving_the_step_divides_the_error_by_two_to_the_order(solver, order):
    end = 1 / (1 / START.astype(np.float64) + 0.5)
    errors = [error(curved, end, steps, solver) for steps in (16, 32, 64)]
    for coarse, fine in pairwise(errors):
        assert coarse / fine == pytest.approx(2**order, rel=0.15)


@pytest.mark.parametrize(("solver", "share"), [("euler", 1), ("ab2", 1 / 4)])
def test_of_a_velocity_linear_in_time_ab2_misses_its_first_step_alone(solver, share):
    """A step of Euler's misses slope · h² / 2, and Euler's solver takes 1 / h of them."""
    end = START - (0.3 - 0.7 / 2)
    missed = error(lambda x, t: 0.3 - 0.7 * t + 0 * x, end, 4, solver)
    assert missed == pytest.approx(share * 0.7 / (2 * 4), rel=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_constant_velocity_is_followed_exactly(solver):
    end = START - 0.75
    assert error(lambda x, t: jnp.full_like(x, 0.75), end, 4, solver) == pytest.approx(0, abs=1e-7)


def test_eulers_steps_are_what_they_were_before_there_was_a_choice():
    def velocity(x, t):
        return jnp.sin(3 * x + t) * x

    @jax.jit
    def before(x):
        def step(x, t):
            return x - velocity(x, t) * np.float32(1 / 7), None

        return jax.lax.scan(step, x, jnp.asarray(flow.times(7)))[0]

    now = jax.jit(lambda x: flow.integrate(velocity, x, 7))(START)
    np.testing.assert_array_equal(now, before(START))
    alone = jax.jit(lambda x: flow.integrate(velocity, x, 1, solver="ab2"))(START)
    np.testing.assert_allclose(alone, START - velocity(START, 1), rtol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_costs_one_evaluation_at_its_beginning(solver):
    seen = []

    def velocity(x, t):
        seen.append(float(t))
        return curved(x, t)

    with jax.disable_jit():
        flow.integrate(velocity, START, 5, solver=solver)
    np.testing.assert_array_equal(np.float32(seen), flow.times(5))


def test_actions_that_are_given_stay_and_the_others_are_of_the_second_order():
    given = np.arange(5) < 2
    actions = np.full((1, 3, 5, 2), 0.25, np.float32)

    def field(x, time):
        v = time[..., None] * x**2 * x[..., :1, :] * 4  # the first step's is given: 0.25
        return flow.Predicted(v, v)

    def end(steps: int):
        told = Given(jnp.asarray(actions), jnp.asarray(np.tile(given, (1, 3, 1))))
        return np.asarray(flow.sample(field, START[None], steps, told, solver="ab2"))[0]

    exact = 1 / (1 / START.astype(np.float64) + 0.5)
    errors = []
    for steps in (16, 32):
        found = end(steps)
        assert (found[:, given] == 0.25).all()
        errors.append(np.mean((found - exact)[:, ~given]))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


def test_guided_chunks_take_ab2_only_in_as_many_steps_as_guidance_draws_hard():
    wanted = Guidance(jnp.ones_like(START), jnp.ones_like(START), 5.0)
    with pytest.raises(ValueError, match=r"'ab2' with 4 steps, .* up to 5; use at least as many"):
        flow.integrate(curved, START, 4, wanted, "ab2")
    end = np.asarray(flow.integrate(curved, START, 2000, wanted))
    euler, ab2 = (
        np.abs(np.asarray(flow.integrate(curved, START, 20, wanted, solver)) - end).max()
        for solver in SOLVERS
    )
    assert ab2 < 0.5 * euler


@pytest.mark.parametrize("kind", [PiConfig, GrootConfig])
def test_a_config_of_before_there_was_a_choice_takes_eulers_steps(kind):
    told = to_json(kind(solver="ab2"))
    assert model_config(told).solver == "ab2"
    del told["solver"]
    assert model_config(told) == kind()
    assert kind().solver == "euler"


def test_a_solver_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"model.solver is 'heun'; expected .*'euler', 'ab2'"):
        replace(CONFIG, solver="heun")
    with pytest.raises(ValueError, match=r"model.solver is 'rk4', expected one of"):
        model_config(to_json(CONFIG) | {"solver": "rk4"})
    with pytest.raises(ValueError, match="'pi0_fast' have no solver to change"):
        Pi0FastConfig().changed(solver="ab2")


@pytest.mark.slow
def test_a_checkpoint_carries_its_solver_and_loading_may_choose_another(tmp_path):
    policy = tiny_policy()
    chosen = replace(CONFIG, euler_steps=3, solver="ab2")
    assets = {"processor": to_json(PROCESSOR)}
    saved = tmp_path / "checkpoints"
    with CheckpointWriter(saved, {"model": to_json(chosen)}, assets) as writer:
        writer.save(1, {"ema": policy.params}, {})
    loaded, other = load_policy(tmp_path), load_policy(tmp_path, solver="euler")
    assert [loaded.model.config.solver, other.model.config.solver] == ["ab2", "euler"]
    two = [p.infer(openpi(2), keys=KEYS[:2])["actions"] for p in (loaded, other)]
    assert np.abs(two[0] - two[1]).max() > 1e-3
    plain = replace(policy, model=Pi(replace(CONFIG, euler_steps=3)))
    np.testing.assert_allclose(two[1], plain.infer(openpi(2), keys=KEYS[:2])["actions"], atol=1e-6)


def test_a_users_family_takes_as_many_steps_as_its_config_says():
    config = SmolConfig(width=16, image_size=32, memory=(), euler_steps=1)
    model, batch = config.build(), random_batch(config, rows=1, samples=1)
    params, noise = model.init(jax.random.key(0)), np.ones_like(batch.actions)
    start = model.field(params, batch)(noise[:, :, None], np.ones((1, 1, 1), np.float32))
    expected = noise - start.velocity[:, :, 0]
    np.testing.assert_allclose(model.sample_actions(params, batch, noise), expected, atol=1e-6)
    longer = config.changed(euler_steps=4).build().sample_actions(params, batch, noise)
    assert np.abs(longer - expected).max() > 1e-4
