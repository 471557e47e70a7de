"""The whole runtime with a toy policy: exact where it can be, bounded where it is not."""

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rl.host import loop as host
from rl.host.loop import HostConfig, HostSystem, Inference, check_state, run_host
from rl.host.rollout import key_of
from rl.host.staleness import GroupMember
from rl.host.trajectory_buffer import Counts
from rl.host.weights import Weights
from sim.environments.device_slots import DeviceSlots
from sim.protocol import Start
from tests.helpers.rl.hosted import CONFIG, described, interrupt, nothing_lives_on, pauses, run
from tests.helpers.rl.toy import Blind, Learner, Policy, Restless, starts
from tests.helpers.sim.point_world import PointWorld

ended = pytest.fixture(autouse=True)(nothing_lives_on)


def synchronous(config, steps):
    """Reference for all else: one episode after another, then the update."""
    slots, actor, learner = DeviceSlots(PointWorld(), 1), Policy(), Learner()
    spec, seen = slots.spec, []
    for step in range(steps):
        version = {"bias": learner.params["bias"].copy()}
        for number in range(step * config.groups, (step + 1) * config.groups):
            group = []
            for member in range(config.group):
                start, chunks, acted = starts(number), [], 0
                slots.begin(0, start)
                (out,) = slots.poll()
                while not out.ended:
                    prompt = spec.wording(out.goal, start.seed)
                    key = key_of(GroupMember(number, member, start), acted)
                    request = actor.prepare(out.observation, prompt, key)
                    ((actions, drawn),) = actor.answer(version, [request])
                    slots.send(0, actions[: config.replan_steps])
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
        groups=int(rng.integers(1, 5)),
        group=int(rng.integers(1, 4)),
        staleness=int(rng.integers(0, 4)),
        deadline=float(rng.choice([0.0, 0.003])),
    )
    if config.group > 1:
        config = replace(config, redraws=int(rng.integers(0, 4)))
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
        first = step * config.groups
        assert {t.number for t in tickets} == set(range(first, first + config.groups))
        assert options["stream"] or [t.number for t in tickets] == sorted(t.number for t in tickets)
    counts, learnt = done[-1].counts, 5 * config.groups * config.group
    redrawn = config.group * sum(t.redrawn for step in learner.tickets for t in step)
    assert counts == Counts(redrawn + learnt, redrawn + learnt, learnt, redrawn=redrawn)
    assert all(len(some.threads) <= 1 and not some.closed for some in slots)


class Counting(Policy):
    """Notes which parameters each of its answers had."""

    def __init__(self):
        super().__init__()
        self.versions = []

    def answer(self, params, requests):
        self.versions += [params["bias"].tolist()] * len(requests)
        return super().answer(params, requests)


@pytest.mark.parametrize("staleness", [0, 2])
def test_several_policies_share_the_slots_and_none_is_older_than_the_bound(staleness):
    config, actors = replace(CONFIG, staleness=staleness), [Counting(), Counting(), Counting()]
    learner = Learner(pause=pauses(3))
    slots = [Restless(2), Restless(3, 1)]
    _, done = run(slots, config, steps=6, actors=actors, learner=learner, values=True)
    for step, tickets in enumerate(learner.tickets[:-1]):
        lags = [step - d.version for t in tickets for e in t.trajectories for d in e.decisions]
        assert 0 <= min(lags) <= max(lags) <= staleness
    counts = done[-1].counts
    assert counts.begun == counts.finished == counts.learnt == 36
    answered = [len(actor.versions) for actor in actors]
    assert min(answered) > 0
    assert [batches.items for batches in done[-1].batches] == answered
    if staleness == 0:
        alone, _ = run([Restless(1)], config, steps=6, values=True)
        numbered = [{t.number: described(t) for t in step} for step in alone.tickets[:1]]
        assert numbered == [{t.number: described(t) for t in step} for step in learner.tickets[:1]]


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
    alone, _ = run([DeviceSlots(PointWorld(), 1)], learner=Learner(rate=0), values=True)
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
        run([slots], steps=10_000, on_step=done.append, should_stop=lambda: len(done) > 3)
    assert not getattr(raised.value, "__notes__", [])
    assert len(done) > 3
    assert slots.closed


def test_lanes_that_move_in_lockstep_are_told_together():
    lanes = DeviceSlots(PointWorld(), 4)
    polls, poll = [], lanes.poll
    lanes.poll = lambda timeout=None: polls.append(len(lanes._told)) or poll(timeout)
    run([lanes], replace(CONFIG, staleness=0, groups=4, group=1), steps=1, actor=Blind())
    assert polls == [0, 4, 4, 4, 4]


def test_the_last_observation_is_valued_where_time_ran_out_and_only_there():
    learner, _ = run([Restless(4)], actor=Blind(), values=True, steps=6)
    ends = [e for step in learner.tickets for t in step for e in t.trajectories]
    assert {e.terminated for e in ends} == {True, False}
    for end in ends:
        assert (end.final_value == 0) == end.terminated
        assert (end.last is None) == end.terminated
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

    def mixed(ticket, attempt=0):
        return Start("others" if ticket % 4 == 0 else "points", ticket)

    learner, _ = run([Restless(2), other(1)], steps=3, starts=mixed)
    tickets = list(itertools.chain(*learner.tickets))
    assert {t.number: t.trajectories[0].start for t in tickets} == {i: mixed(i) for i in range(9)}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_without_signal_is_followed_by_one_from_another_start(staleness):
    """In the same step; what had no signal is not learnt from, but counted."""
    config = replace(CONFIG, staleness=staleness, redraws=2)
    learner, done = run([Restless(3), Restless(2, 1)], config, steps=5, learner=Learner(rate=0))
    whole, _ = run([Restless(2)], steps=5, learner=Learner(rate=0))
    first = {t.number: t for step in whole.tickets for t in step}
    redrawn = 0
    for step, tickets in enumerate(learner.tickets[:-1]):
        assert {t.number for t in tickets} == {3 * step + i for i in range(3)}
        for ticket in tickets:
            expected = [starts(ticket.number, attempt) for attempt in range(3)]
            assert ticket.trajectories[0].start == expected[ticket.redrawn]
            assert (ticket.redrawn == 0) == first[ticket.number].signal
            assert ticket.signal or ticket.redrawn == 2
            redrawn += ticket.redrawn
        (outcome,) = done[step].outcomes.values()
        assert outcome.groups == 3 + sum(t.redrawn for t in tickets)
        assert outcome.signal == sum(t.signal for t in tickets)
    assert redrawn > 0
    assert done[-1].counts == Counts(30 + 2 * redrawn, 30 + 2 * redrawn, 30, redrawn=2 * redrawn)


def test_a_task_that_no_slot_has_is_refused():
    with pytest.raises(ValueError, match=r"Ticket 0 starts in task 'storm'.*\['points'\]"):
        run([Restless(2)], starts=lambda ticket, attempt: Start("storm", 0))


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
    weights = Weights(second.params, version=2)
    system = HostSystem([Restless(4)], [Inference(Policy())], second, weights, starts, iter)
    run_host(system, HostConfig(CONFIG, learner_steps=4), resume=state, on_step=done.append)
    whole, _ = run([Restless(2)], learner=Learner(rate=0))
    numbers = [sorted(t.number for t in step) for step in second.tickets]
    assert numbers == [[6, 7, 8], [9, 10, 11], []]
    for mine, other in zip(second.tickets, whole.tickets[2:], strict=True):
        assert {t.number: described(t) for t in mine} == {t.number: described(t) for t in other}
    counts = done[-1].counts
    assert counts.learnt == 24
    assert counts.begun == 24 + counts.dropped
    assert counts.dropped == state["counts"]["begun"] - 12
    with pytest.raises(ValueError, match="had made 2 updates, but its weights have had 0"):
        run([Restless(1)], resume=state)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (None, "admission is missing"),
        ({"admission": {"version": 2, "waited": 0.0}}, "counts is missing"),
        ({"admission": {"version": 3}}, "version is 3, but the learner has made 2"),
        *(({"admission": {"version": x}}, "version is ") for x in ("2", -1, 2.0, 10**30, None)),
        *(({"admission": {"waited": x}}, "waited is ") for x in ("2", -1, float("nan"), None, [])),
        *(({"counts": {"begun": x}}, "begun is ") for x in ("2", -1, 2.0, 10**30, None)),
        ({"counts": {"learnt": 9}}, "counts is .* do not add up"),
        ({"counts": {"dropped": 9}}, "counts is .* do not add up"),
        ({"counts": {"redrawn": 1}}, "counts is .* do not add up"),
        ({"counts": 7}, "begun is missing from 7"),
    ],
)
def test_a_state_that_no_run_left_is_refused_by_its_field(found, name):
    counts = {"begun": 8, "finished": 6, "learnt": 6, "dropped": 1, "reruns": 0}
    sound = {"admission": {"version": 2, "waited": 0.5}, "counts": counts}
    check_state(sound, 2)
    check_state(sound | {"counts": counts | {"redrawn": 0}}, 2)
    if found and isinstance(found.get("counts", {}), dict) and name != "counts is missing":
        found = {k: sound[k] | found.get(k, {}) for k in sound}
    elif found and "counts" in found:
        found = sound | found
    with pytest.raises(ValueError, match=name):
        check_state(found, 2)
