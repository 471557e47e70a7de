"""The loop that evaluation and recording share: which runs it begins, what it leaves of them."""

from collections import deque

import numpy as np
import pytest

from sim.acting import RERUNS, EpisodeRun, act, plan
from sim.environments.device_slots import DeviceSlots
from sim.protocol import Start
from tests.helpers.sim.point_world import PointWorld, Shuffled, expert, seeing_policy


def ended(slots, runs):
    """All runs, acted by the expert; `runs` may grow meanwhile."""

    def tell(waiting):
        for slot in waiting:
            slots.demonstrate(slot, slots.spec.max_steps)

    return act(slots, lambda: runs.popleft() if runs else None, tell)


def test_a_run_that_is_known_only_when_another_has_ended_is_begun_then():
    slots, runs, seeds = (
        DeviceSlots(PointWorld(), 3, expert),
        deque([EpisodeRun(Start("points", 0))]),
        [],
    )
    for run in ended(slots, runs):
        seeds.append(run.start.seed)
        if len(seeds) < 4:
            runs.append(EpisodeRun(Start("points", len(seeds))))
    assert seeds == [0, 1, 2, 3]


def test_a_run_that_was_begun_again_has_nothing_of_its_first_attempt():
    (sound,) = ended(Shuffled(1), deque([EpisodeRun(Start("points", 3))]))
    broken = Shuffled(2, fails=lambda start, attempt: attempt <= 2)
    (again,) = ended(broken, deque([EpisodeRun(Start("points", 3))]))
    assert (again.reruns, again.length, again.success) == (2, sound.length, True)
    np.testing.assert_array_equal(np.concatenate(again.actions), np.concatenate(sound.actions))


def test_a_run_that_always_fails_ends_without_success():
    slots = Shuffled(2, fails=lambda start, attempt: True)
    (lost,) = ended(slots, deque([EpisodeRun(Start("points", 3))]))
    assert (lost.error, lost.reruns, lost.success) == ("it fell over", RERUNS, False)


def test_a_policy_whose_chunks_are_too_short_is_refused():
    slots, run = DeviceSlots(PointWorld(), 1), EpisodeRun(Start("points", 0))
    slots.begin(0, run.start)
    run.add(slots.poll()[0], slots.spec)
    plan(seeing_policy, slots.spec, [run], 4)
    assert run.actions[0].shape == (4, 2)
    with pytest.raises(ValueError, match=r"shape \(1, 4, 2\), expected .* at least 5 steps"):
        plan(seeing_policy, slots.spec, [run], 5)
