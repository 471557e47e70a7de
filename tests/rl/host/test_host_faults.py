"""The host runtime comes to an end, whatever happens: what fails begins again or ends the run with
the first error, and no episode is lost or learnt from twice."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl.host import loop as host
from rl.host.trajectory_buffer import TrajectoryBuffer
from sim.processes.processes import Processes
from sim.protocol import Start
from tests.helpers.rl.hosted import CONFIG, described, interrupt, nothing_lives_on, pauses, run
from tests.helpers.rl.toy import Blind, Learner, Policy, Restless
from tests.helpers.sim import fragile

ended = pytest.fixture(autouse=True)(nothing_lives_on)


def test_a_failed_simulator_costs_its_episode_a_new_beginning_and_nothing_else():
    slots = Restless(3, fails=lambda start, attempt: start.seed % 2 and attempt < 3)
    learner, done = run([slots], learner=Learner(rate=0))
    alone, _ = run([Restless(1)], learner=Learner(rate=0))
    assert [sorted(map(str, map(described, step))) for step in learner.tickets] == [
        sorted(map(str, map(described, step))) for step in alone.tickets
    ]
    counts = done[-1].counts
    assert counts.reruns > 0
    assert counts.begun == counts.learnt == 24


def test_a_simulator_that_always_fails_ends_the_run_with_what_it_said():
    slots = Restless(3, fails=lambda start, attempt: start.seed == 32)
    with pytest.raises(ValueError, match=r"seed 32, step \d.*4 times.*it fell over"):
        run([slots])
    assert slots.closed


def spoilt(field, seed=27):
    def spoil(start, outcome):
        if start.seed != seed or not len(outcome.reward):
            return outcome
        if field == "reward":
            return outcome._replace(reward=outcome.reward * np.nan)
        observation = outcome.observation._replace(state=outcome.observation.state * np.nan)
        return outcome._replace(observation=observation)

    return spoil


class Broken(Policy):
    def chunk(self, bias, request):
        actions, drawn = super().chunk(bias, request)
        return actions * np.where(bias.any(), np.nan, 1), drawn


def broken_learner(where, step):
    learner = Learner()
    method = getattr(learner, where)

    def fail(*given):
        if len(learner.tickets) > step:
            raise ArithmeticError(f"the gradient exploded in {where}")
        return method(*given)

    setattr(learner, where, fail)
    return learner


def broken_policy():
    def pause():
        raise ArithmeticError("out of memory")

    return Policy(pause)


@pytest.mark.parametrize(
    ("slots", "options", "error", "says"),
    [
        (
            {"spoil": spoilt("reward")},
            {},
            ValueError,
            r"points', seed 27, step 0: .* reward \[nan",
        ),
        ({"spoil": spoilt("state")}, {}, ValueError, r"seed 27, step 0: .* state \[nan"),
        (
            {},
            {"actor": Broken()},
            ValueError,
            r"seed \d+, step \d+: version [1-9] of the policy returned",
        ),
        ({}, {"actor": broken_policy()}, ArithmeticError, "out of memory"),
        ({}, {"learner": broken_learner("add", 2)}, ArithmeticError, "exploded in add"),
        ({}, {"learner": broken_learner("update", 1)}, ArithmeticError, "exploded in update"),
        ({}, {"on_step": lambda _: 1 / 0}, ZeroDivisionError, "division"),
        ({}, {"batches": lambda t: itertools.islice(t, 2)}, RuntimeError, "Not all tickets"),
    ],
)
def test_the_first_error_of_any_thread_ends_the_run(slots, options, error, says):
    places = [Restless(3, **slots), Restless(2, 1, **slots)]
    with pytest.raises(error, match=says) as raised:
        run(places, **options)
    assert not getattr(raised.value, "__notes__", [])  # all threads ended, all accounted for
    assert all(some.closed for some in places)


@pytest.mark.parametrize("at", ["prepare", "chunk"])
def test_what_fails_about_a_last_observation_ends_the_run_and_loses_no_episode(at):
    actor = Blind()
    method = getattr(actor, at)

    def fails(*given):
        key = given[-2] if at == "prepare" else given[-1].key
        if key[1] == 12:
            raise ArithmeticError("no value")
        return method(*given)

    setattr(actor, at, fails)
    with pytest.raises(ArithmeticError, match="no value") as raised:
        run([Restless(1)], actor=actor, values=True, steps=6)
    assert not getattr(raised.value, "__notes__", [])


def test_an_error_does_not_wait_for_a_learner_that_computes(monkeypatch):
    monkeypatch.setattr(host, "_ENDING", 0.5)
    computes, held = threading.Event(), threading.Event()

    def spoil(start, outcome):
        assert start.seed != 22 or computes.wait(60)
        return spoilt("reward", 22)(start, outcome)

    learner = Learner(pause=lambda: (computes.set(), held.wait(60)))
    slots = Restless(1, spoil=spoil)
    with pytest.raises(ValueError, match="seed 22") as raised:
        run([slots], learner=learner)
    assert raised.value.__notes__ == ["Still running, and no longer waited for: learner."]
    held.set()


@pytest.mark.parametrize("seed", range(8))
def test_an_interrupt_at_any_moment_ends_the_run(seed):
    assert threading.current_thread() is threading.main_thread()
    slots = [Restless(3, seed), Restless(1, seed)]
    delay = np.random.default_rng(seed).random() * 0.1
    timer = threading.Timer(delay, interrupt)
    learner = Learner(rate=0, pause=pauses(seed))
    begin, once = slots[0].begin, itertools.count()
    slots[0].begin = lambda *told: (timer.start() if next(once) == 0 else None, begin(*told))
    with pytest.raises(KeyboardInterrupt) as raised:
        run(slots, steps=10_000, learner=learner)
    timer.join()
    assert not getattr(raised.value, "__notes__", [])
    assert all(some.closed for some in slots)


SIMULATOR = Path(fragile.__file__)


def begin_anywhere(task):
    """The first two tickets misbehave, the others do not."""
    return lambda ticket, attempt: Start(task if ticket < 2 else "calm", ticket)


@pytest.mark.parametrize("task", ["crash", "hang", "garbage"])
def test_processes_that_die_or_hang_are_replaced_and_their_episodes_begin_again(tmp_path, task):
    config = replace(CONFIG, group=1)
    with Processes(SIMULATOR, 3, options={"scars": str(tmp_path)}, patience=1.5) as slots:
        learner, done = run(
            [slots], config, steps=2, actor=Blind(), starts=begin_anywhere(task), values=True
        )
        assert sum(slots.restarts) == done[-1].counts.reruns >= 2
    counts = done[-1].counts
    assert counts.begun == counts.finished == counts.learnt == 6
    lengths = [sum(len(d.reward) for d in t.trajectories[0].decisions) for t in learner.tickets[0]]
    assert max(lengths) == 12


def test_a_worker_killed_from_outside_costs_at_most_one_episode_a_new_beginning(tmp_path):
    config = replace(CONFIG, group=1)
    with Processes(SIMULATOR, 2, options={"scars": str(tmp_path), "slow": 0.005}) as slots:
        victim, done = slots._slots[0].process._child.pid, []

        def kill(learnt):
            done.append(learnt)
            if learnt.step == 1:
                os.kill(victim, signal.SIGKILL)

        run([slots], config, steps=8, actor=Blind(), starts=begin_anywhere("calm"), on_step=kill)
        assert slots.restarts == [1, 0]
    counts = done[-1].counts
    assert counts.reruns <= 1
    assert counts.begun == counts.learnt == 24


def test_an_error_with_processes_leaves_none_of_them(tmp_path):
    slots = Processes(SIMULATOR, 2, options={"scars": str(tmp_path)}, patience=60)
    pids = [slot.process._child.pid for slot in slots._slots]
    with pytest.raises(ArithmeticError, match="exploded"):
        run([slots], actor=Blind(explodes_late()), starts=begin_anywhere("hang"))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


INTERRUPTED = """
import sys, threading, time
from tests.rl.host.test_host_faults import *

slots = Processes(SIMULATOR, 2, options={"scars": sys.argv[1]}, patience=600)
print(*[slot.process._child.pid for slot in slots._slots], flush=True)
hang = {"starts": begin_anywhere("hang"), "actor": Blind(lambda: print("acting", flush=True))}
try:
    run([slots], **hang)
except KeyboardInterrupt:
    time.sleep(0.1)
    print("interrupted", [t.name for t in threading.enumerate()], flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_process_whose_simulators_hang(tmp_path):
    script = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        while not list(tmp_path.glob("hang-*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.splitlines()[-1] == "interrupted ['MainThread']"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def explodes_late():
    calls = itertools.count()

    def pause():
        if next(calls) > 2:
            raise ArithmeticError("the policy exploded")

    return pause


def test_an_episode_lost_or_learnt_twice_is_noticed(monkeypatch):
    finish = TrajectoryBuffer.finish

    def twice(self, place, trajectory):
        finish(self, place, trajectory)
        finish(self, place, trajectory)

    monkeypatch.setattr(TrajectoryBuffer, "finish", twice)
    with pytest.raises(RuntimeError, match=r"ended, but was not running"):
        run([Restless(2)])
    monkeypatch.setattr(TrajectoryBuffer, "finish", finish)
    monkeypatch.setattr(TrajectoryBuffer, "drop", lambda self, place: None)
    with pytest.raises(ZeroDivisionError) as raised:
        run([Restless(3)], on_step=lambda _: 1 / 0)
    assert "were lost" in raised.value.__notes__[0]
