"""Simulators and policies in processes of Ray's: what is learnt is the same, and whoever dies there
is replaced or ends the run. One Ray serves all tests, and workers serve several."""

import os
import signal
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

import tools.rl
from models.checkpoints import own
from rl.config import DisaggregatedConfig
from rl.host.loop import HostSystem, Inference, run_host
from rl.host.weights import Weights
from rl.remote.actor import RemoteActor, store
from rl.remote.cluster import cluster
from rl.remote.slots import RemoteSlots
from tests.helpers.rl.hosted import CONFIG, described, how_long, pauses
from tests.helpers.rl.points import HOST, POINTS, save_policy
from tests.helpers.rl.toy import Learner, Policy, Restless, starts
from tools.rl import RlPaths

pytestmark = pytest.mark.slow

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")


@pytest.fixture(scope="module")
def ray():
    with cluster(None, 16):
        yield


def simulators(*makes, patience=300.0):
    """Open slots, in workers that started at the same time."""
    made = [RemoteSlots(f"simulator {i}", m, patience=patience) for i, m in enumerate(makes)]
    for some in made:
        some.ready()
    return made


def policies(*makes):
    made = [RemoteActor(f"inference worker {i}") for i in range(len(makes))]
    for worker, make in zip(made, makes, strict=True):
        worker.start(make, Policy())
    for worker in made:
        worker.ready()
    return made


@pytest.fixture(scope="module")
def workers(ray):
    """One slot, three others, and two policies."""
    with ExitStack() as stack:
        slots = simulators(partial(Restless, 1), partial(Restless, 3, 1))
        acting = policies(Policy, Policy)
        for some in (*slots, *acting):
            stack.enter_context(closing(some))
        yield SimpleNamespace(slots=slots, policies=acting)


def run(slots, acting, config=CONFIG, *, steps=4, learner=None, **options):
    """Runs on the policies elsewhere, or on one here if there are none."""
    learner, done = learner or Learner(), []
    start = {"bias": learner.params["bias"].copy()}
    inference = [Inference(one, join=one.hold) for one in acting] or [Inference(Policy())]
    weights = Weights(start, **({"stage": store} if acting else {}))
    system = HostSystem(slots, inference, learner, weights, starts, iter)
    how = how_long(config, steps, options)
    run_host(system, how, on_step=options.pop("on_step", done.append), **options)
    return learner, done


def by_number(learner):
    return {t.number: described(t) for step in learner.tickets for t in step}


def gone(process):
    """True if a process has ended, or does so soon."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_without_staleness_one_slot_elsewhere_learns_the_same_bit_for_bit(workers):
    config = replace(CONFIG, staleness=0)
    there, _ = run(workers.slots[:1], workers.policies[:1], config, values=True)
    here, _ = run([Restless(1)], [], config, values=True)
    assert by_number(there) == by_number(here)
    np.testing.assert_array_equal(there.params["bias"], here.params["bias"])
    assert here.params["bias"].any()


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_decision_is_older_than_the_bound_whoever_answered_it(workers, staleness):
    config = replace(CONFIG, staleness=staleness)
    learner = Learner(pause=pauses(staleness))
    _, done = run(workers.slots, workers.policies, config, steps=6, learner=learner, values=True)
    for step, tickets in enumerate(learner.tickets[:-1]):
        lags = [step - d.version for t in tickets for e in t.trajectories for d in e.decisions]
        assert 0 <= min(lags) <= max(lags) <= staleness
        assert {t.number for t in tickets} == set(range(3 * step, 3 * step + 3))
    counts = done[-1].counts
    assert counts.begun == counts.finished == counts.learnt == 36
    assert all(batches.items > 0 for batches in done[-1].batches)


@pytest.mark.parametrize("victim", ["simulator", "policy"])
def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_learnt_twice(workers, victim):
    killed, done = workers.slots[1] if victim == "simulator" else workers.policies[0], []
    before, process = killed.restarts, killed.process

    def kill(learnt):
        done.append(learnt)
        if learnt.step == 1:
            os.kill(process, signal.SIGKILL)
            assert gone(process)

    options = {"steps": 6, "on_step": kill, "values": True}
    learner, _ = run(workers.slots, workers.policies, learner=Learner(rate=0), **options)
    alone, _ = run([Restless(1)], [], steps=6, learner=Learner(rate=0), values=True)
    assert by_number(learner) == by_number(alone)
    assert killed.restarts == before + 1
    assert killed.process != process
    counts = done[-1].counts
    assert counts.begun == counts.finished == counts.learnt == 36
    assert counts.dropped == 0
    assert counts.reruns <= (3 if victim == "simulator" else 0)


def test_workers_killed_while_nothing_is_asked_of_them_are_replaced(ray):
    (slots,), (policy,) = simulators(partial(Restless, 1), patience=200.0), policies(Policy)
    run([slots], [policy], steps=1, values=True)
    for worker in (slots, policy):
        os.kill(worker.process, signal.SIGKILL)
        assert gone(worker.process)
    time.sleep(45)  # by then Ray has made others
    begun = time.monotonic()
    _, done = run([slots], [policy], steps=1, values=True)
    assert time.monotonic() - begun < 150
    assert (slots.restarts, policy.restarts) == (1, 1)
    assert done[-1].counts.learnt == 6
    slots.close()
    policy.close()


class Hanging(Restless):
    """Does not come back from its second poll, unless a file says that it has been there."""

    def __init__(self, scar):
        super().__init__(2)
        self.scar, self.polls = scar, 0

    def poll(self, timeout=None):
        self.polls += 1
        if self.polls == 2 and not self.scar.exists():
            self.scar.touch()
            time.sleep(1000)
        return super().poll(timeout)


def test_a_simulator_that_hangs_is_replaced(ray, tmp_path):
    slots = simulators(partial(Hanging, tmp_path / "scar"), patience=3.0)
    _, done = run(slots, [], learner=Learner(rate=0))
    assert slots[0].restarts >= 1
    counts = done[-1].counts
    assert counts.reruns >= 1
    assert counts.begun == counts.finished == counts.learnt == 24
    assert counts.dropped == 0
    slots[0].close()


def not_a_number(start, outcome):
    if start.seed != 27 or not len(outcome.reward):
        return outcome
    return outcome._replace(reward=outcome.reward * np.nan)


def falls_over(start, outcome):
    if start.seed == 27:
        raise ArithmeticError("the physics exploded")
    return outcome


class Broken(Policy):
    def chunk(self, bias, request):
        if bias.any():
            raise ArithmeticError("out of memory")
        return super().chunk(bias, request)


NAN = r"seed 27, step 0: 'points in simulator 0 \(.+, process \d+\)' returned the reward \[nan"
FAILED = r"0 \(.+, process \d+\) failed: ArithmeticError: "


@pytest.mark.parametrize(
    ("spoil", "acting", "error", "says"),
    [
        (not_a_number, None, ValueError, NAN),
        (falls_over, None, RuntimeError, f"simulator {FAILED}the physics exploded"),
        (None, Broken, RuntimeError, f"inference worker {FAILED}out of memory"),
    ],
)
def test_an_error_elsewhere_ends_the_run_with_the_workers_name(ray, spoil, acting, error, says):
    there = simulators(partial(Restless, 2, spoil=spoil)) if spoil else []
    policy = policies(acting) if acting else []
    with ExitStack() as stack:
        for worker in policy:
            stack.enter_context(closing(worker))
        with pytest.raises(error, match=says) as raised:
            run(there or [Restless(2)], policy)
    assert not getattr(raised.value, "__notes__", [])  # all threads ended, all accounted for
    assert all(gone(worker.process) for worker in (*there, *policy))


def test_ctrl_c_ends_a_run_elsewhere_within_ten_seconds(ray):
    pressed = []

    def press(learnt):
        if learnt.step == 1:
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    (there,) = simulators(partial(Restless, 2))
    with pytest.raises(KeyboardInterrupt) as raised:
        run([there], [], steps=1_000_000, on_step=press)
    assert time.monotonic() - pressed[0] < 10
    assert not getattr(raised.value, "__notes__", [])  # all threads ended, all accounted for
    assert gone(there.process)


def test_a_whole_run_elsewhere_leaves_the_same_policy_bit_for_bit(ray, tmp_path, monkeypatch):
    """One slot without staleness; on one device, as elsewhere."""
    one = jax.devices()[:1]
    for module in ("tools.recipes.rl", "tools.recipes.closed_loop"):
        monkeypatch.setattr(f"{module}.load_suite", lambda name: POINTS)
    monkeypatch.setattr("rl.host.placement.split_devices", lambda acting: (one, one))
    begun, quiet = save_policy(tmp_path / "begun"), Console(quiet=True)
    config = replace(HOST, learner_steps=2, eval_every=0)
    spread = replace(config, placement="disaggregated", disaggregated=DisaggregatedConfig(1, 1))
    with pytest.raises(ValueError, match="--ray-address auto is for placement 'disaggregated'"):
        tools.rl.run(RlPaths(begun, tmp_path / "refused", ray_address="auto"), config, quiet)
    saved = []
    for placed in (config, spread):
        out = tmp_path / placed.placement
        tools.rl.run(RlPaths(begun, out), placed, quiet)
        saved.append(own.restore_params(out, "params"))
    assert jax.tree.all(jax.tree.map(np.array_equal, *saved))
    longer = replace(spread, learner_steps=3)
    assert tools.rl.run(RlPaths(begun, out, resume=True), longer, quiet).step == 3
    changed = jax.tree.map(np.array_equal, saved[0], own.restore_params(begun))
    assert not jax.tree.all(changed)


def missing():
    raise FileNotFoundError("metaworld is not installed.")


def test_slots_that_do_not_open_say_where(ray):
    with pytest.raises(FileNotFoundError, match="simulator 0 failed: metaworld is not installed"):
        simulators(missing)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"), cluster(None, 1):
        pass
