"""DeviceSlots on the device: one by one, to each episode's end, and what follows it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.robot_policy import RobotPolicy
from rl import flow_policy
from rl.config import ColocatedConfig, RlConfig, RolloutConfig
from rl.device.unroll import PolicyEnvs, Unroll
from sim.environments.device_slots import spec_of
from sim.protocol import Observation
from tests.helpers.models.tiny_policy import tiny_policy
from tests.helpers.rl.point import Point

CONFIG = RlConfig(
    seed=3,
    placement="colocated",
    rollout=RolloutConfig(replan_steps=3),
    colocated=ColocatedConfig(envs=12, unroll=4),
)
POINT = Point(max_steps=10, speed=0.25)
SEEDS = np.arange(40, 52, dtype=np.uint32)


@cache
def params():
    made = flow_policy.init(
        tiny_policy().model, tiny_policy().params, jax.random.key(0), CONFIG.flow
    )
    rng = np.random.default_rng(1)
    heads = jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32), made["value"]
    )
    return jax.tree.map(jnp.asarray, {**made, "value": heads})


LANES = PolicyEnvs(POINT, tiny_policy(), CONFIG)
ACT = jax.jit(LANES.act)
STEP = jax.jit(POINT.pure_step)


@cache
def begun():
    """DeviceSlots that stand at different steps of their episodes."""
    return jax.device_get(ACT(params(), POINT.pure_reset(SEEDS))[0])


@cache
def unroll() -> Unroll:
    return jax.device_get(ACT(params(), begun())[1])


@cache
def by_hand() -> list[list[dict]]:
    """Chunks of each lane, from the actions that were drawn and steps one by one."""
    drawn = unroll().drawn.actions[:, :, : CONFIG.rollout.replan_steps, :2]
    envs = []
    for lane in range(len(SEEDS)):
        state = jax.tree.map(lambda x, lane=lane: x[lane : lane + 1], begun())
        chunks = []
        for chunk in drawn[:, lane]:
            before, rewards = state, []
            for action in chunk:
                robot = tiny_policy().processor.actions(action[None])
                state, happened = jax.device_get(STEP(state, robot[None]))
                rewards.append(happened.reward[0, 0])
                if happened.terminated[0, 0] or happened.truncated[0, 0]:
                    break
            chunks.append({"before": before, "rewards": rewards, "last": happened})
        envs.append(chunks)
    return envs


def test_a_chunk_is_acted_to_the_episodes_end_and_the_next_begins_a_fresh_one():
    found, cut = unroll(), 0
    for lane, chunks in enumerate(by_hand()):
        for t, chunk in enumerate(chunks):
            mask, steps = found.batch.action_mask[t, lane, 0], len(chunk["rewards"])
            assert mask.sum() == 2 * steps, "real dims of acted steps"
            assert mask[:steps, :2].all()
            seen = POINT.pure_observe(chunk["before"]).state[0]
            assert np.allclose(found.batch.state[t, lane, 0], seen, atol=1e-5)
            assert found.reward[t, lane] == sum(chunk["rewards"])
            assert found.terminated[t, lane] == chunk["last"].terminated[0, 0]
            assert found.truncated[t, lane] == chunk["last"].truncated[0, 0]
            cut += steps < CONFIG.rollout.replan_steps
    assert cut > 2, "episodes end within chunks, too"
    assert found.terminated.any()
    assert found.truncated[:-1].any()


def test_values_that_follow_are_none_at_the_end_and_the_last_sights_where_time_ran_out():
    found, robot = unroll(), RobotPolicy.in_suite(tiny_policy(), spec_of(POINT, (8, 8)))
    ended, late = found.terminated[:-1], found.truncated[:-1]
    assert np.all(found.following[:-1][ended] == 0)
    goes_on = ~ended & ~late
    assert np.array_equal(found.following[:-1][goes_on], found.drawn.value[1:][goes_on])
    value = jax.jit(lambda batch: flow_policy.value(tiny_policy().model, params(), batch))
    for t, lane in np.argwhere(late):
        chunk = by_hand()[lane][t]
        scene, felt = chunk["last"].scene[:, 0], chunk["last"].state[:, 0]
        rows = robot.batch(
            Observation(POINT.pure_pictures(scene), felt), chunk["before"].aim, jnp.zeros(1)
        )
        # the prompt is the episode's, whichever its wording
        own = jax.tree.map(lambda x, at=(t, lane): x[at][None], found.batch)
        expected = value(replace(own, images=rows.images, state=rows.state))[0]
        assert abs(found.following[t, lane] - expected) < 1e-5
        assert abs(expected - found.drawn.value[t + 1, lane]) > 1e-4, "not the fresh episode's"


@pytest.mark.slow
def test_a_lane_does_the_same_beside_any_others():
    some = [7, 2, 11]
    begin = jax.tree.map(lambda x: x[np.array(some)], begun())
    state, alone = ACT(params(), begin)
    for name in ("reward", "terminated", "truncated"):
        assert np.array_equal(getattr(alone, name), getattr(unroll(), name)[:, some]), name
    pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(unroll()), strict=True)
    assert all(np.allclose(a, b[:, some], atol=1e-5) for a, b in pairs)
    assert np.array_equal(state.seed, SEEDS[some])


@pytest.mark.slow
def test_step_by_step_is_the_same_as_traced():
    state, stepped = LANES.act_stepwise(params(), begun())
    traced = ACT(params(), begun())
    pairs = zip(jax.tree.leaves((state, stepped)), jax.tree.leaves(traced), strict=True)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize(("replan_steps", "chunks"), [(3, 5), (7, 1)])
def test_unrolls_in_which_time_could_run_out_twice_are_refused(replan_steps, chunks):
    config = replace(
        CONFIG,
        rollout=RolloutConfig(replan_steps=replan_steps),
        colocated=ColocatedConfig(envs=2, unroll=chunks),
    )
    with pytest.raises(ValueError, match="give 1 to"):
        PolicyEnvs(POINT, tiny_policy(), config)
