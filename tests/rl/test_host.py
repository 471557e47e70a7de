"""The whole runtime with a toy policy: exact where it can be, bounded where it is not, and at an
end, whatever happens."""

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

from rl import host
from rl.admission import Place
from rl.arrivals import Arrivals
from rl.config import RolloutConfig
from rl.host import Inference, run_host
from rl.rollout import key_of
from rl.weights import Weights
from sim.lanes import Lanes
from sim.processes import Processes
from sim.protocol import Start
from tests.rl.toy import Blind, Learner, Policy, Restless, starts
from tests.sim import fragile
from tests.sim.point_world import PointWorld

CONFIG = RolloutConfig(tickets=3, group=2, staleness=1, execute=3, deadline=0.001)


@pytest.fixture(autouse=True)
def nothing_lives_on():
    """Whatever happened, no thread and no process of a run is left."""
    yield
    until = time.monotonic() + 30
    names = ("learner", "slots", "policy", "batcher")
    while left := [t for t in threading.enumerate() if t.name.startswith(names)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def run(slots, config=CONFIG, *, steps=4, actor=None, learner=None, **options):
    learner = learner or Learner()
    done = []
    run_host(
        slots,
        [Inference(actor or Policy())],
        learner,
        Weights({"bias": learner.params["bias"].copy()}),
        config,
        starts=options.pop("starts", starts),
        batches=options.pop("batches", iter),
        steps=steps,
        on_step=options.pop("on_step", done.append),
        **options,
    )
    return learner, done


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


def synchronous(config, steps):
    """What all else is measured by: one episode after another, then the update."""
    slots, actor, learner = Lanes(PointWorld(), 1), Policy(), Learner()
    spec, seen = slots.spec, []
    for step in range(steps):
        version = {"bias": learner.params["bias"].copy()}
        for number in range(step * config.tickets, (step + 1) * config.tickets):
            group = []
            for member in range(config.group):
                start, chunks, acted = starts(number), [], 0
                slots.begin(0, start)
                (out,) = slots.poll()
                while not out.ended:
                    prompt = spec.wording(out.goal, start.seed)
                    key = key_of(Place(number, member, start), acted)
                    request = actor.prepare(out.observation, prompt, key)
                    ((actions, drawn),) = actor.answer(version, [request])
                    slots.send(0, actions[: config.execute])
                    (out,) = slots.poll()
                    acted += len(out.reward)
                    chunks.append((drawn.actions.tolist(), out.reward.tolist()))
                    learner.total += (out.reward.sum() - 0.1) * drawn.actions[:, :2].mean(0)
                group.append(chunks)
            seen.append(group)
        learner.update()
    return learner.params["bias"], seen


def test_without_staleness_one_slot_is_the_synchronous_learner_bit_for_bit():
    bias, seen = synchronous(CONFIG, 4)
    learner, _ = run([Restless(1)], replace(CONFIG, staleness=0))
    tickets = list(itertools.chain(*learner.tickets))
    assert [t.number for t in tickets] == list(range(12))
    mine = [
        [[(d.drawn.actions.tolist(), d.reward.tolist()) for d in e.decisions] for e in group]
        for group in (ticket.trajectories for ticket in tickets)
    ]
    assert mine == seen
    np.testing.assert_array_equal(learner.params["bias"], bias)
    assert bias.any()


@pytest.mark.parametrize("seed", range(12))
def test_no_decision_is_older_than_the_bound_however_the_threads_are_scheduled(seed):
    rng = np.random.default_rng(seed)
    config = replace(
        CONFIG,
        tickets=int(rng.integers(1, 5)),
        group=int(rng.integers(1, 4)),
        staleness=int(rng.integers(0, 4)),
        deadline=float(rng.choice([0.0, 0.003])),
    )
    slots = [Restless(int(rng.integers(1, 5)), seed + 100 * i) for i in range(rng.integers(1, 4))]
    options = {"each": bool(rng.random() < 0.7), "stream": bool(rng.random() < 0.7)}
    learner = Learner(pause=pauses(seed))
    _, done = run(
        slots, config, steps=5, actor=Policy(pauses(seed + 1)), learner=learner, **options
    )
    for step, learnt in enumerate(done):
        tickets = learner.tickets[step]
        lags = [step - d.version for t in tickets for e in t.trajectories for d in e.decisions]
        assert 0 <= min(lags) <= max(lags) <= config.staleness
        assert sum(learnt.lags.values()) == len(lags)
        assert max(learnt.lags) == max(lags)
        first = step * config.tickets
        assert {t.number for t in tickets} == set(range(first, first + config.tickets))
        assert options["stream"] or [t.number for t in tickets] == sorted(t.number for t in tickets)
    counts = done[-1].counts
    assert counts.begun == counts.finished == counts.learnt == 5 * config.tickets * config.group
    assert counts.dropped == 0
    assert all(len(some.threads) <= 1 and not some.closed for some in slots)


def test_acting_does_run_ahead_and_as_far_as_it_may():
    config = replace(CONFIG, staleness=2, group=1)
    learner = Learner(pause=lambda: time.sleep(0.03))
    _, done = run([Restless(6, longest=0.0)], config, steps=6, learner=learner)
    assert max(max(learnt.lags) for learnt in done) == 2
    assert done[-1].waited > 0


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((1,), {}),
        ((5,), {}),
        ((2, 3, 1), {}),
        ((4,), {"each": False}),
        ((3, 3), {"each": False, "stream": False}),
    ],
)
def test_the_same_trajectories_whatever_the_slots_and_threads_while_nothing_is_learnt(
    counts, options
):
    slots = [Restless(count, seed) for seed, count in enumerate(counts)]
    learner, _ = run(slots, learner=Learner(rate=0), values=True, **options)
    alone, _ = run([Lanes(PointWorld(), 1)], learner=Learner(rate=0), values=True)
    for mine, other in zip(learner.tickets, alone.tickets, strict=True):
        numbered = {ticket.number: described(ticket) for ticket in mine}
        assert numbered == {ticket.number: described(ticket) for ticket in other}


def test_members_of_a_group_share_their_start_and_differ_in_what_they_draw():
    learner, _ = run([Restless(3)], steps=1)
    for ticket in learner.tickets[0]:
        one, two = ticket.trajectories
        assert one.start == two.start == starts(ticket.number)
        first, other = one.decisions[0], two.decisions[0]
        np.testing.assert_array_equal(first.sample.state, other.sample.state)
        assert (first.drawn.actions != other.drawn.actions).any()


def test_no_batch_waits_for_its_deadline_when_nobody_else_can_come():
    stuck = threading.Timer(120, interrupt)
    stuck.start()
    config = replace(CONFIG, deadline=1e6)
    run([Restless(3), Restless(2, 1)], config, steps=6, values=True, actor=Blind())
    stuck.cancel()


def test_a_run_can_be_told_to_stop():
    slots, done = Restless(3), []
    with pytest.raises(host.Stopped) as raised:
        run([slots], steps=10_000, on_step=done.append, told=lambda: len(done) > 3)
    assert not getattr(raised.value, "__notes__", [])
    assert len(done) > 3
    assert slots.closed


def test_lanes_that_move_in_lockstep_are_told_together():
    lanes = Lanes(PointWorld(), 4)
    polls, poll = [], lanes.poll
    lanes.poll = lambda timeout=None: polls.append(len(lanes._told)) or poll(timeout)
    run([lanes], replace(CONFIG, staleness=0, tickets=4, group=1), steps=1, actor=Blind())
    assert polls == [0, 4, 4, 4, 4]


def test_the_last_observation_is_valued_where_time_ran_out_and_only_there():
    learner, _ = run([Restless(4)], actor=Blind(), values=True, steps=6)
    ends = [e for step in learner.tickets for t in step for e in t.trajectories]
    assert {e.terminated for e in ends} == {True, False}
    for end in ends:
        assert (end.final_value == 0) == end.terminated
        assert end.terminated == end.success
        assert all(len(d.reward) == 3 for d in end.decisions[:-1])
        for decision in end.decisions:
            acted = np.zeros((4, 3), bool)
            acted[: len(decision.reward), :2] = True
            np.testing.assert_array_equal(decision.sample.action_mask, acted)


def test_slots_of_several_suites_take_their_own_tasks_tickets():
    def other(count):
        slots = Restless(count)
        slots.spec = replace(slots.spec, name="others", tasks=("others",))
        begin = slots.begin
        slots.begin = lambda slot, start: begin(slot, start._replace(task="points"))
        return slots

    def mixed(ticket):
        return Start("others" if ticket % 4 == 0 else "points", ticket)

    learner, _ = run([Restless(2), other(1)], steps=3, starts=mixed)
    tickets = list(itertools.chain(*learner.tickets))
    assert {t.number: t.trajectories[0].start for t in tickets} == {i: mixed(i) for i in range(9)}


def test_a_task_that_no_slot_has_is_refused():
    with pytest.raises(ValueError, match=r"Ticket 0 starts in task 'storm'.*\['points'\]"):
        run([Restless(2)], starts=lambda ticket: Start("storm", 0))


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


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


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
        ({}, {"actor": Broken()}, ValueError, r"seed \d+, step \d+: version 1 of the policy drew"),
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


def test_an_error_does_not_wait_for_a_learner_that_computes(monkeypatch):
    monkeypatch.setattr(host, "_ENDING", 0.5)
    held = threading.Event()
    learner = Learner(pause=lambda: held.wait(60))
    slots = Restless(1, spoil=spoilt("reward", 22))
    with pytest.raises(ValueError, match="seed 22") as raised:
        run([slots], learner=learner)
    assert raised.value.__notes__ == ["Still computing, and left to themselves: learner."]
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


def test_a_run_that_goes_on_accounts_for_what_the_first_gave_up():
    saved = []

    def stop(learnt):
        saved.append((learnt.state, learner.params["bias"].copy()))
        if len(saved) == 2:
            raise InterruptedError

    learner = Learner(rate=0, pause=lambda: time.sleep(0.01))
    with pytest.raises(InterruptedError):
        run([Restless(4)], learner=learner, steps=4, on_step=stop)
    state, bias = saved[-1]
    done, second = [], Learner(rate=0, params={"bias": bias})
    options = {"starts": starts, "batches": iter, "steps": 4, "on_step": done.append}
    weights = Weights(second.params, version=2)
    run_host([Restless(4)], [Inference(Policy())], second, weights, CONFIG, resume=state, **options)
    whole, _ = run([Restless(2)], learner=Learner(rate=0))
    numbers = [sorted(t.number for t in step) for step in second.tickets]
    assert numbers == [[6, 7, 8], [9, 10, 11], []]
    for mine, other in zip(second.tickets, whole.tickets[2:], strict=True):
        assert {t.number: described(t) for t in mine} == {t.number: described(t) for t in other}
    counts = done[-1].counts
    assert counts.learnt == 24
    assert counts.begun == 24 + counts.dropped
    assert counts.dropped == state["counts"]["begun"] - 12
    with pytest.raises(ValueError, match="had had 2 updates, its weights 0"):
        run([Restless(1)], resume=state)


SIMULATOR = Path(fragile.__file__)


def begin_anywhere(task):
    """The first two tickets misbehave, the others do not."""
    return lambda ticket: Start(task if ticket < 2 else "calm", ticket)


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
from tests.rl.test_host import *

slots = Processes(SIMULATOR, 2, options={"scars": sys.argv[1]}, patience=600)
print(*[slot.process._child.pid for slot in slots._slots], flush=True)
hang = {"starts": begin_anywhere("hang"), "actor": Blind(lambda: print("acting", flush=True))}
try:
    run([slots], **hang)
except KeyboardInterrupt:
    time.sleep(0.1)
    print("interrupted", [t.name for t in threading.enumerate()], flush=True)
"""


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
    finish = Arrivals.finish

    def twice(self, place, trajectory):
        finish(self, place, trajectory)
        finish(self, place, trajectory)

    monkeypatch.setattr(Arrivals, "finish", twice)
    with pytest.raises(RuntimeError, match=r"ended, but was not under way"):
        run([Restless(2)])
    monkeypatch.setattr(Arrivals, "finish", finish)
    monkeypatch.setattr(Arrivals, "drop", lambda self, place: None)
    with pytest.raises(ZeroDivisionError) as raised:
        run([Restless(3)], on_step=lambda _: 1 / 0)
    assert "were lost" in raised.value.__notes__[0]
