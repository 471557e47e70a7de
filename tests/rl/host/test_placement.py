"""Split of devices into acting and learning, and learning from a policy that acts rounded."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_policy
from rl import flow_policy
from rl.config import ObjectiveConfig
from rl.host.placement import OnHost, split_devices
from tests.helpers.rl.points import HOST, POINTS, open_slots, save_policy

OBJECTIVE = ObjectiveConfig(name="decoupled", advantage="group")


def test_devices_that_act_are_the_last_and_do_not_learn():
    devices = jax.devices()
    assert split_devices(0) == (devices, devices[:1])
    assert split_devices(3) == (devices[:-3], devices[-3:])
    with pytest.raises(ValueError, match=f"inference_devices is {len(devices)}, .* has to learn"):
        split_devices(len(devices))


@pytest.mark.slow
def test_a_policy_that_acts_rounded_records_its_own_log_probabilities(tmp_path):
    """Rounding is, without staleness, all that parts the actor, on devices of its own, from the
    learner, so the importance weights are what it leaves."""
    policy = load_policy(save_policy(tmp_path), steps=2)
    rollout = replace(HOST.rollout, slots=2, inference_devices=4, snapshots="bfloat16")
    config = replace(HOST, steps=1, objective=OBJECTIVE, rollout=rollout)
    at = OnHost(policy, POINTS, ("points",), [open_slots(("points",), 2, 32)], config)
    exact = jax.tree.map(np.array, at._learner.state.params)
    learnt, metrics, batches = [], [], at._batches
    at._batches = lambda tickets: (learnt.append(part) or part for part in batches(tickets))
    at.run(metrics.append, lambda: False, config.steps)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    log_prob = jax.jit(partial(flow_policy.log_prob, policy.model, config=config.flow))
    experience = learnt[0].experience
    acted = np.asarray(experience.acted) & (experience.weight > 0)[:, None, None]

    def furthest(params):
        found, _, _ = log_prob(params, experience.batch, experience.drawn, None)
        return np.abs(np.asarray(found) - experience.drawn.log_prob)[acted].max()

    assert furthest(rounded) < 1e-3
    assert furthest(exact) > 10 * furthest(rounded)
    assert 0.5 < metrics[0]["ess"] < 0.99999
    assert np.isfinite(metrics[0]["loss"])
