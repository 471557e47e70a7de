"""Rollouts: names of draws, reports of slots, and refusals of what cannot be right."""

import itertools
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rl.host.loop import HostConfig, HostSystem, Inference, run_host
from rl.host.rollout import key_of
from rl.host.staleness import GroupMember
from rl.host.weights import Weights
from sim.protocol import Start
from tests.helpers.rl.hosted import CONFIG
from tests.helpers.rl.toy import Blind, Learner, Restless, starts


class Noted:
    """A timeline that lists what it is told."""

    def __init__(self):
        self.marks, self.lock = {}, threading.Lock()

    def mark(self, lane, what, cause=None):
        with self.lock:
            self.marks.setdefault(lane, []).append((what, cause))

    @contextmanager
    def span(self, lane, what, cause=None):
        self.mark(lane, what, cause)
        yield
        self.mark(lane, None)


def acted(slots, timeline=None, **options):
    """The learner, which has seen all."""
    learner = Learner(rate=0)
    weights = Weights({"bias": learner.params["bias"].copy()})
    system = HostSystem(slots, [Inference(Blind())], learner, weights, starts, iter)
    run_host(system, HostConfig(replace(CONFIG, **options), learner_steps=3), timeline=timeline)
    return learner


def test_keys_differ_between_tickets_members_and_steps_though_they_share_a_start():
    start = Start("points", 3)
    keys = {
        key_of(GroupMember(ticket, member, start), step)
        for ticket in range(40)
        for member in range(8)
        for step in range(5)
    }
    assert len(keys) == 40 * 8 * 5
    assert key_of(GroupMember(1, 2, start), 4) == key_of(GroupMember(1, 2, Start("points", 3)), 4)
    assert key_of(GroupMember(1, 2, start), 4) != key_of(GroupMember(1, 2, Start("points", 4)), 4)
    assert all(0 <= word < 2**32 for key in keys for word in key)


def test_the_timeline_is_told_what_each_slot_does_and_what_it_waits_for():
    timeline = Noted()
    acted([Restless(2), Restless(1)], timeline, staleness=0)
    assert set(timeline.marks) == {"slot 0", "slot 1", "slot 2", "inference", "learner"}
    for slot in range(3):
        marks = timeline.marks[f"slot {slot}"]
        assert set(marks) == {
            ("begin", None),
            ("act", None),
            ("wait for the slots", "environment"),
            ("wait for the policy", "inference"),
            ("wait for the learner", "staleness"),
            (None, None),
        }
        for (before, _), (after, _) in itertools.pairwise(marks):
            assert after != "act" or before == "wait for the policy"
        assert marks[-1][0] is None
    for lane in ("inference", "learner"):
        whats = [what for what, _ in timeline.marks[lane]]
        assert whats[1::2] == [None] * (len(whats) // 2)
    assert {what for what, _ in timeline.marks["learner"]} == {"add", "update", None}


def test_slots_for_which_no_episode_is_left_wait_for_nobody():
    timeline = Noted()
    acted([Restless(9)], timeline, staleness=0)
    waited = [
        marks for marks in timeline.marks.values() if ("wait for the learner", "staleness") in marks
    ]
    assert len(waited) >= 3
    assert all(marks[-1] == (None, None) for marks in waited)


@pytest.mark.parametrize("reward", ["success", "suite"])
def test_only_the_first_success_is_rewarded_unless_the_suites_own_reward_is_asked_for(reward):
    def richer(start, outcome):
        return outcome._replace(reward=outcome.reward + 5)

    learner = acted([Restless(3, spoil=richer)], reward=reward)
    episodes = [e for step in learner.tickets for t in step for e in t.trajectories]
    assert {e.success for e in episodes} == {True, False}
    for episode in episodes:
        rewards = [float(x) for d in episode.decisions for x in d.reward]
        wanted = [0.0] * (len(rewards) - 1) + [float(episode.success)]
        assert rewards == (wanted if reward == "success" else [x + 5 for x in wanted])


def test_an_episode_that_does_not_end_in_time_is_refused():
    slots = Restless(1)
    slots.spec = replace(slots.spec, max_steps=6)
    with pytest.raises(ValueError, match=r"seed \d+, step 6: 'points' did not end .* = 6"):
        acted([slots])


def test_a_policy_that_draws_too_few_steps_is_refused():
    with pytest.raises(
        ValueError, match=r"step 0: version 0 .*\(4, 2\).*fewer than replan_steps = 5"
    ):
        acted([Restless(1)], replan_steps=5)
