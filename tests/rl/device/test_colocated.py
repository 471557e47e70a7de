"""One device program that acts and learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Normalizer
from parallel import checkpoint
from parallel.optimizer import OptimizerConfig
from rl import flow_policy
from rl.advantages import gae, gae_on_device
from rl.config import (
    ColocatedConfig,
    FlowConfig,
    LearnerConfig,
    ObjectiveConfig,
    RlConfig,
    RolloutConfig,
)
from rl.device.colocated import Colocated, env_seeds
from sim.protocol import TRAIN_SEEDS
from tests.helpers.models.tiny_policy import ARM, tiny_policy
from tests.helpers.rl.point import Point


def configured(rate=1e-3, minibatches=2, rate_factors=(), **own) -> RlConfig:
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
        learner=LearnerConfig(epochs=2, minibatches=minibatches, optimizer=optimizer),
        colocated=ColocatedConfig(**{"envs": 8, "unroll": 3, **own}),
    )


def program(config: RlConfig) -> Colocated:
    return Colocated(tiny_policy(), Point(), config)


def beginning(made: Colocated):
    key = jax.random.key(0)
    return made.init(
        flow_policy.init(tiny_policy().model, tiny_policy().params, key, configured().flow)
    )


def equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


class Upwards(Point):
    """Up is right, whatever the prompt."""

    def _fresh(self, seed, episode):
        return super()._fresh(seed, episode)._replace(aim=jnp.int32(0))


@pytest.fixture(scope="module")
def made() -> Colocated:
    plain = replace(ARM, actions=Normalizer((0.0, 0.0), (1.0, 1.0)))
    processor = replace(tiny_policy().processor, embodiments=(plain,))
    chosen = replace(
        configured(envs=64, minibatches=4, warmup=1),
        objective=ObjectiveConfig(discount=0.8, gae_lambda=0.9),
    )
    env = Upwards(max_steps=9, speed=0.25)
    return Colocated(replace(tiny_policy(), processor=processor), env, chosen)


@pytest.mark.slow
def test_a_policy_that_hardly_ever_succeeds_learns_to(made):
    state, success = beginning(made), []
    for _ in range(25):
        state, metrics = made.whole(state)
        success.append(float(metrics["successes"] / metrics["episodes"]))
    assert success[0] < 0.3
    assert success[-1] > 0.8


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(made, tmp_path):
    state = beginning(made)
    for step in range(4):
        if step == 2:
            with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
                writer.save(2, {"rl": state}, {})
        state, metrics = made.whole(state)
    again = checkpoint.restore(tmp_path / "2", {"rl": beginning(made)})["rl"]
    for _ in range(2):
        again, repeated = made.whole(again)
    assert int(again.step) == 4
    assert equal((again, repeated), (state, metrics))


@pytest.mark.slow
def test_only_the_value_head_learns_at_first_whatever_decays_or_is_paid_for_entropy():
    plain = configured(envs=4, unroll=2, minibatches=1, warmup=1)
    optimizer = replace(plain.learner.optimizer, weight_decay=0.1)
    made = program(
        replace(
            plain,
            flow=FlowConfig(noise="learned", euler_steps=2),
            objective=ObjectiveConfig(entropy_weight=0.1),
            learner=replace(plain.learner, optimizer=optimizer),
        )
    )
    policy, key = tiny_policy(), jax.random.key(0)
    state = made.init(flow_policy.init(policy.model, policy.params, key, made._config.flow))
    begin = jax.device_get(state.params)
    state, _ = made.stepwise(state)
    after = jax.device_get(state.params)
    for name in ("policy", "noise"):
        assert equal(after[name], begin[name])
    assert not equal(after["value"], begin["value"])
    state, metrics = made.stepwise(state)
    for name in ("policy", "noise"):
        assert not equal(state.params[name], begin[name])
    assert metrics["behaviour_kl"] > 1e-6


@pytest.mark.slow
def test_without_learning_ratios_are_1_and_nothing_is_clipped():
    still = program(configured(rate=1e-30))
    state, metrics = still.stepwise(beginning(still))
    assert np.allclose(metrics["weight_mean"], 1, atol=1e-5)
    assert metrics["clip_fraction"] == 0
    assert abs(metrics["behaviour_kl"]) < 1e-6
    assert metrics["advantage_rms"] > 0.01
    assert equal(state.params["policy"], beginning(still).params["policy"])


@pytest.mark.slow
def test_what_is_kept_of_observations_changes_nothing():
    plain = configured(rate_factors=(("^policy/(expert|action|time)|value", 1.0), (".", 0.0)))
    learner = replace(plain.learner, keep_observed=True)
    ended = []
    for config in (plain, replace(plain, learner=learner)):
        made = program(config)
        state = beginning(made)
        for step in (made.whole, made.stepwise):
            state, metrics = step(state)
        ended.append((state.params, {name: float(x) for name, x in metrics.items()}))
    (mine, found), (wanted, metrics) = ended
    # eight updates of up to 1e-3 were made, in each of which Adam blows up roundings around 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), mine, wanted)
    assert found == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_keeping_what_changes_is_refused():
    config = configured()
    config = replace(config, learner=replace(config.learner, keep_observed=True))
    with pytest.raises(ValueError, match=r"keep_observed is true, .* such as embedding"):
        beginning(program(config))


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
        ({"colocated": ColocatedConfig(envs=7, unroll=3)}, "21 decisions"),
        (
            {"rollout": RolloutConfig(replan_steps=3, groups=8, snapshots="bfloat16")},
            "ignores rollout.groups = 8, rollout.snapshots = bfloat16",
        ),
        ({"learner": LearnerConfig(micro=8)}, "ignores learner.micro = 8"),
        (
            {"learner": LearnerConfig(optimizer=OptimizerConfig(ema_decay=0.5))},
            "ignores learner.optimizer.ema_decay = 0.5",
        ),
    ],
)
def test_what_the_placement_has_not_is_refused(changed, says):
    with pytest.raises(ValueError, match=says):
        program(replace(configured(), **changed))
