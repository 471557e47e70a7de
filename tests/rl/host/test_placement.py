"""Split of devices into acting and learning, learning from a policy that acts rounded, and the end
of a run."""

import threading
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_policy
from parallel.optimizer import select
from rl import flow_policy
from rl.config import ObjectiveConfig
from rl.host import loop, placement
from rl.host.loop import StepResult
from rl.host.placement import OnHost, split_devices
from rl.host.timeline import Timeline
from rl.host.trajectory_buffer import Counts
from rl.records import TaskOutcome
from tests.helpers.rl.gaussian import OPTIMIZER
from tests.helpers.rl.hosted import CONFIG
from tests.helpers.rl.points import HOST, POINTS, open_slots, save_policy
from tests.helpers.rl.toy import Policy, Restless, starts

OBJECTIVE = ObjectiveConfig(name="decoupled", advantage="group")


def test_devices_that_act_are_the_last_and_do_not_learn():
    devices = jax.devices()
    assert split_devices(0) == (devices, devices[:1])
    assert split_devices(3) == (devices[:-3], devices[-3:])
    with pytest.raises(ValueError, match=f"inference_devices is {len(devices)}, .* left to learn"):
        split_devices(len(devices))


class Slow:
    """A learner whose last gradient of a step takes until it is let go on."""

    version = 0

    def __init__(self):
        self.state = SimpleNamespace(params={"bias": jnp.zeros(2)})
        self.added, self.updates, self.thread = 0, 0, None
        self.computes, self.released = threading.Event(), threading.Event()

    def add(self, experience, tickets):
        self.added += 1
        if self.added == CONFIG.groups:
            self.thread = threading.current_thread()
            self.computes.set()
            assert self.released.wait(60)

    def update(self):
        self.updates += 1
        return {"lags": []}


def hosted(learner):
    """An `OnHost` around toys."""
    at, one = object.__new__(OnHost), SimpleNamespace(experience=None, tickets=())
    at.__dict__ |= {
        "_learner": learner,
        "_config": replace(HOST, rollout=CONFIG),
        "_slots": [Restless(2)],
        "_elsewhere": None,
        "_actor": Policy(),
        "_acting_on": jax.devices()[:1],
        "_share": (0, 1),
        "_trained": select(OPTIMIZER, learner.state.params)[1],
        "_values": False,
        "_curriculum": SimpleNamespace(start=starts),
        "_tasks": ("points",),
        "_follows_signal": False,
        "_batches": lambda tickets: (one for _ in tickets),
        "_record": None,
        "timeline": Timeline(),
    }
    return at


def test_no_update_begins_once_a_run_was_told_to_stop_and_has_returned(monkeypatch):
    """State that is saved then must not change under the hand that saves it."""
    monkeypatch.setattr(loop, "_ENDING", 0.5)
    learner, steps = Slow(), []
    at = hosted(learner)
    at.run(steps.append, learner.computes.is_set, 4)
    learner.released.set()
    learner.thread.join(60)
    assert not learner.thread.is_alive()
    assert (learner.updates, steps) == (0, [])


def after(step, rows, items, reruns, waited):
    """A step's result, with sums over the run so far."""
    counts = Counts(reruns=reruns)
    return StepResult(
        step,
        metrics={"decisions": 2, "lags": [2]},
        lags={0: 2},
        outcomes={"points": TaskOutcome(1, 1, 2, 1.0)},
        seconds=1.0,
        counts=counts,
        waited=waited,
        latency=0.0,
        batches=(SimpleNamespace(rows=rows, items=items),),
        state={"admission": {"version": step + 1, "waited": waited}, "counts": asdict(counts)},
    )


def test_a_steps_metrics_are_its_own_and_no_sums_over_the_run(monkeypatch):
    """Also the first of a run that goes on, which begins with the sums of its checkpoint."""
    found = [after(0, 8, 2, 3, 5.0), after(1, 16, 10, 4, 7.0), after(2, 16, 10, 4, 7.0)]

    def run_host(*_, on_step, **__):
        for one in found:
            on_step(one)

    monkeypatch.setattr(placement, "run_host", run_host)
    at, lines, gone = hosted(Slow()), [], iter((1, 1, 3, 4))
    at._elsewhere = SimpleNamespace(workers=(), replaced=lambda: next(gone))
    at.run(lines.append, lambda: False, 3)
    assert [line.get("batch_fill") for line in lines] == [0.25, 1.0, None]
    assert [line["workers_replaced"] for line in lines] == [1, 0, 2]
    assert [line["reruns"] for line in lines] == [3, 1, 0]
    assert [line["slots_held_back_seconds"] for line in lines] == [5.0, 2.0, 0.0]

    found[:] = [after(3, 4, 3, 6, 7.5)]
    at.run(lines.append, lambda: False, 4)
    assert lines[-1]["batch_fill"] == 0.75
    assert (lines[-1]["reruns"], lines[-1]["slots_held_back_seconds"]) == (2, 0.5)


@pytest.mark.slow
def test_a_policy_that_acts_rounded_records_its_own_log_probabilities(tmp_path):
    """Rounding is, without staleness, all that parts the actor, on devices of its own, from the
    learner, so the importance weights are what it leaves."""
    policy = load_policy(save_policy(tmp_path), euler_steps=2)
    rollout = replace(HOST.rollout, slots=2, inference_devices=4, snapshots="bfloat16")
    config = replace(HOST, learner_steps=1, objective=OBJECTIVE, rollout=rollout)
    at = OnHost(policy, POINTS, ("points",), [open_slots(("points",), 2, 32)], config)
    exact = jax.tree.map(np.array, at._learner.state.params)
    learnt, metrics, batches = [], [], at._batches
    at._batches = lambda tickets: (learnt.append(part) or part for part in batches(tickets))
    at.run(metrics.append, lambda: False, config.learner_steps)
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
