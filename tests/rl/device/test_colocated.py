"""Envs, policy and learner on the same devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models import Normalizer
from parallel.mesh import make_mesh
from parallel.optimizer import OptimizerConfig
from rl.advantages import gae, gae_on_device
from rl.checks import check_named
from rl.config import (
    ColocatedConfig,
    LearnerConfig,
    ObjectiveConfig,
    RlConfig,
    RolloutConfig,
)
from rl.device.colocated import Colocated, env_seeds
from rl.learner import begin_learner
from sim.protocol import TRAIN_SEEDS
from tests.helpers.models.tiny_policy import ARM, tiny_policy
from tests.helpers.rl.point import Point

ONE, FOUR = (make_mesh(devices=jax.devices()[:n]) for n in (1, 4))


def configured(rate=1e-3, micro=12, rate_factors=(), warmup=0, **own) -> RlConfig:
    optimizer = OptimizerConfig(
        learning_rate=rate,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        rate_factors=rate_factors,
        ema_decay=0.0,
    )
    return RlConfig(
        learner_steps=4,
        placement="colocated",
        rollout=RolloutConfig(replan_steps=3),
        learner=LearnerConfig(
            micro=micro, epochs=2, minibatches=2, warmup=warmup, optimizer=optimizer
        ),
        colocated=ColocatedConfig(**{"envs": 8, "unroll": 3, **own}),
    )


def made(config: RlConfig, mesh=ONE, policy=None, tasks=None):
    """Envs, what is in them, and a learner."""
    policy = policy or tiny_policy()
    program = Colocated(policy, tasks or [Point()], config, mesh)
    return program, program.begin(), begin_learner(policy, config, mesh)


def equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def near(one, other, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), one, other
    )


class Upwards(Point):
    """Up is right, whatever the prompt."""

    def _fresh(self, seed, episode):
        return super()._fresh(seed, episode)._replace(aim=jax.numpy.int32(0))


@pytest.mark.slow
def test_a_policy_that_hardly_ever_succeeds_learns_to():
    plain = replace(ARM, actions=Normalizer((0.0, 0.0), (1.0, 1.0)))
    processor = replace(tiny_policy().processor, embodiments=(plain,))
    chosen = configured(envs=64, micro=48, warmup=1)
    chosen = replace(
        chosen,
        objective=ObjectiveConfig(discount=0.8, gae_lambda=0.9),
        learner=replace(chosen.learner, minibatches=4),
    )
    policy = replace(tiny_policy(), processor=processor)
    program, envs, learner = made(chosen, FOUR, policy, [Upwards(max_steps=9, speed=0.25)])
    success = []
    for _ in range(25):
        envs, _, (outcomes,) = program.step(learner, envs)
        success.append(float(outcomes.successes / outcomes.episodes))
    assert success[0] < 0.3
    assert success[-1] > 0.8


@pytest.mark.slow
def test_envs_act_the_same_on_one_device_and_on_four():
    config = configured()
    (one, envs, learner), (four, spread, _) = made(config), made(config, FOUR)
    params = jax.device_get(learner.state.params)
    found, wanted = (x.act(params, y, 0) for x, y in ((four, spread), (one, envs)))
    near(*map(jax.device_get, (found, wanted)))
    assert int(wanted[2][0].episodes) > 0


@pytest.mark.slow
def test_the_same_decisions_give_the_same_update_on_any_devices_and_from_the_host():
    """The update that follows acting, from the same experience copied to a learner on the host's
    road and to learners on more devices."""
    config = configured(micro=16)  # the second of two is padded
    optimizer = replace(config.learner.optimizer, eps=1e-2)  # else roundings around 0 count fully
    config = replace(config, learner=replace(config.learner, minibatches=1, optimizer=optimizer))
    program, envs, learner = made(config)
    _, parts, _ = program.act(learner.state.params, envs, 0)
    parts = jax.device_get(parts)
    program.step(learner, envs)
    for count in (1, 2, 4, 8):
        other = begin_learner(tiny_policy(), config, make_mesh(devices=jax.devices()[:count]))
        for part in reversed(parts):
            other.add(part)
        other.update()
        near(*(jax.device_get(x.state.params) for x in (other, learner)))


@pytest.mark.slow
def test_tasks_share_a_step_and_the_policy_is_told_its_own():
    class Pulled(Point):
        name, prompts, goals = "pulled", (("pull", "pull the red block now"),), ("down",)

        def _fresh(self, seed, episode):
            return super()._fresh(seed, episode)._replace(aim=jax.numpy.int32(0))

    config = configured()
    program, envs, learner = made(config, FOUR, tasks=[Point(), Pulled()])
    alone, some, _ = made(configured(envs=4), FOUR)
    params = learner.state.params
    _, parts, outcomes = program.act(params, envs, 0)
    _, few, (only,) = alone.act(params, some, 0)
    assert [int(one.steps) > 0 for one in outcomes] == [True, True]
    assert jax.tree.map(int, outcomes[0]) == jax.tree.map(int, only)
    texts = {tuple(row) for part in parts for row in np.asarray(part.batch.text)}
    assert len(texts) > len({tuple(row) for part in few for row in np.asarray(part.batch.text)})
    with pytest.raises(ValueError, match="evenly over 3 tasks and 4 devices; choose a multiple of"):
        made(config, FOUR, tasks=[Point(), Pulled(), Point()])


@pytest.mark.slow
def test_without_learning_ratios_are_1_and_nothing_is_clipped():
    program, envs, learner = made(configured(rate=1e-30))
    begin = jax.device_get(learner.state.params["policy"])
    _, metrics, _ = program.step(learner, envs)
    assert np.allclose(metrics["weight_mean"], 1, atol=1e-5)
    assert metrics["clip_fraction"] == 0
    assert abs(metrics["behaviour_kl"]) < 1e-6
    assert metrics["advantage_rms"] > 0.01
    assert equal(learner.state.params["policy"], begin)


@pytest.mark.slow
def test_what_is_kept_of_observations_changes_nothing():
    plain = configured(rate_factors=(("^policy/(expert|action|time)|value", 1.0), (".", 0.0)))
    learner = replace(plain.learner, keep_observed=True)
    ended = []
    for config in (plain, replace(plain, learner=learner)):
        program, envs, mine = made(config)
        for _ in range(2):
            envs, metrics, _ = program.step(mine, envs)
        ended.append((jax.device_get(mine.state.params), metrics))
    (kept, found), (wanted, metrics) = ended
    # updates of up to 1e-3 were made, in each of which Adam blows up roundings around 0
    near(kept, wanted, 1e-4)
    assert found.pop("lags") == metrics.pop("lags") == [24]
    assert found == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_keeping_what_changes_is_refused():
    config = configured()
    config = replace(config, learner=replace(config.learner, keep_observed=True))
    with pytest.raises(ValueError, match=r"keep_observed is true, .* such as embedding"):
        begin_learner(tiny_policy(), config, ONE)


def test_advantages_are_those_of_whole_episodes():
    rng = np.random.default_rng(0)
    reward, value, following = rng.normal(size=(3, 6, 1)).astype(np.float32)
    terminated, truncated = np.zeros((2, 6, 1), bool)
    terminated[1], truncated[3] = True, True
    following[[0, 2, 4]] = value[[1, 3, 5]]
    following[1] = 0
    found = gae_on_device(reward, value, following, terminated | truncated, 0.9, 0.8)
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        final = float(following[part.stop - 1, 0])
        expected = gae(reward[part, 0], value[part, 0], final, 0.9, 0.8).advantage
        assert np.allclose(found[part, 0], expected, atol=1e-5)


def test_lanes_act_training_episodes_that_do_not_depend_on_their_number():
    few, many = (env_seeds(configured(envs=n)) for n in (8, 64))
    assert np.array_equal(few, many[:8])
    assert len(set(many)) == 64
    assert all(int(seed) in TRAIN_SEEDS for seed in many)
    assert not set(many) & set(env_seeds(replace(configured(envs=64), seed=1)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"objective": ObjectiveConfig(advantage="group")}, "no groups|placement 'host'"),
        ({"objective": ObjectiveConfig(name="vtrace")}, "newest policy"),
        (
            {"rollout": RolloutConfig(replan_steps=3, groups=8, snapshots="bfloat16")},
            "ignores rollout.groups = 8, rollout.snapshots = bfloat16",
        ),
    ],
)
def test_what_the_placement_has_not_is_refused(changed, says):
    with pytest.raises(ValueError, match=says):
        check_named(replace(configured(), **changed))
