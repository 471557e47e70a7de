"""Runs of the host runtime with toys, and what is said of them."""

import signal
import threading
import time

import numpy as np

from rl.config import RolloutConfig
from rl.host.loop import HostConfig, HostSystem, Inference, run_host
from rl.host.weights import Weights
from tests.helpers.rl.toy import Learner, Policy, starts

CONFIG = RolloutConfig(groups=3, group=2, staleness=1, replan_steps=3, deadline=0.001)


def nothing_lives_on():
    """Asserts that no thread and no process of a run is left, whatever happened."""
    yield
    until = time.monotonic() + 30
    names = ("learner", "slots", "policy", "batcher")
    while left := [t for t in threading.enumerate() if t.name.startswith(names)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def run(slots, config=CONFIG, *, steps=4, actor=None, actors=(), learner=None, **options):
    learner = learner or Learner()
    done = []
    system = HostSystem(
        slots,
        [Inference(one) for one in actors or [actor or Policy()]],
        learner,
        Weights({"bias": learner.params["bias"].copy()}),
        options.pop("starts", starts),
        options.pop("batches", iter),
    )
    how = how_long(config, steps, options)
    run_host(system, how, on_step=options.pop("on_step", done.append), **options)
    return learner, done


def how_long(config, steps, options):
    """The run's config, with fields of its own taken out of the options."""
    names = [name for name in ("values", "each", "stream") if name in options]
    return HostConfig(config, steps, **{name: options.pop(name) for name in names})


def described(ticket):
    """All numbers of a ticket."""
    return [
        (
            trajectory.start,
            trajectory.member,
            trajectory.terminated,
            trajectory.success,
            trajectory.final_value,
            [
                (d.drawn.actions.tolist(), d.reward.tolist(), d.sample.action_mask.tolist())
                for d in trajectory.decisions
            ],
        )
        for trajectory in ticket.trajectories
    ]


def pauses(seed, longest=0.004):
    """Sleeps for random times, from any thread."""
    rng, lock = np.random.default_rng(seed), threading.Lock()

    def pause():
        with lock:
            seconds = rng.random() * longest * (rng.random() < 0.5)
        time.sleep(seconds)

    return pause


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
