"""Success of the scripted experts from random starts, blocks turned any way."""

import numpy as np
import pytest

from sim.environments.device_slots import DeviceSlots
from sim.environments.experts import expert
from sim.evaluate import evaluate_expert
from sim.protocol import EVAL_SEEDS, Start


def success(env, expert) -> float:
    """Success on 64 unseen starts."""
    starts = [Start(env.name, seed) for seed in EVAL_SEEDS[:64]]
    return evaluate_expert(DeviceSlots(env, len(starts), expert), starts).success.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "least"),
    [("reach", 1.0), ("lift", 0.98), ("push", 0.98), ("stack", 0.98), ("drawer", 1.0)],
)
def test_experts_reach_the_goal(envs, task, least):
    assert success(envs[task], expert) >= least


@pytest.mark.parametrize(
    ("task", "least"),
    [
        ("lift", 0.97),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("reach", 0.98), ("push", 0.92), ("stack", 0.95), ("drawer", 0.98))
        ),
    ],
)
def test_experts_recover_from_noise_of_six_millimetres(envs, task, least):
    rng = np.random.default_rng(0)

    def shaken(env, state):
        noise = rng.normal(size=(len(state.seed), 4)) * (0.006, 0.006, 0.006, 0)
        return np.asarray(expert(env, state)) + noise

    assert success(envs[task], shaken) >= least


def test_experts_have_no_memory(envs):
    state = envs["lift"].reset(np.arange(16))
    assert np.array_equal(expert(envs["lift"], state), expert(envs["lift"], state))
