"""Trajectories become tickets by number, and every episode is accounted for."""

import json
import threading

import numpy as np
import pytest

from rl.host.staleness import GroupMember
from rl.host.trajectory_buffer import Counts, TrajectoryBuffer
from rl.records import Trajectory
from sim.protocol import Start


def place(ticket, member=0):
    return GroupMember(ticket, member, Start("points", ticket))


def acted(trajectories, *places):
    for one in places:
        trajectories.begin(one)
        trajectories.finish(one, trajectory(one))


def trajectory(one, success=True):
    return Trajectory(one.start, one.member, (), True, 0.0, success)


def test_tickets_come_as_they_complete_with_their_members_in_order():
    trajectories = TrajectoryBuffer(2, 2)
    acted(trajectories, place(1, 1), place(0, 0), place(3, 0), place(1, 0))
    step = trajectories.step(0)
    first = next(step)
    assert (first.number, [t.member for t in first.trajectories]) == (1, [0, 1])
    acted(trajectories, place(0, 1))
    assert [ticket.number for ticket in step] == [0]
    acted(trajectories, place(2, 0), place(2, 1), place(3, 1))
    assert [ticket.number for ticket in trajectories.step(1)] == [2, 3]
    assert trajectories.counts() == Counts(begun=8, finished=8, learnt=8)
    trajectories.check(at_rest=True)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_order_each_is_learnt_from_once(seed):
    rng, trajectories = np.random.default_rng(seed), TrajectoryBuffer(7, 3)
    places = [place(i, m) for i in range(28) for m in range(3)]
    parts = [places[i::4] for i in range(4)]
    threads = [
        threading.Thread(target=acted, args=(trajectories, *[part[i] for i in rng.permutation(21)]))
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for step in range(4):
        numbers = sorted(ticket.number for ticket in trajectories.step(step))
        assert numbers == list(range(7 * step, 7 * step + 7))
    for thread in threads:
        thread.join(60)
    assert trajectories.counts().learnt == 84


def test_what_begins_or_ends_twice_or_is_learnt_from_twice_is_refused():
    trajectories = TrajectoryBuffer(1)
    trajectories.begin(place(0))
    for when in ("acted", "held", "learnt from", "past"):
        with pytest.raises(RuntimeError, match="ticket 0 began twice"):
            trajectories.begin(place(0))
        if when == "acted":
            trajectories.finish(place(0), trajectory(place(0)))
        with pytest.raises(RuntimeError, match="was not running"):
            trajectories.finish(place(0), trajectory(place(0)))
        if when == "held":
            step = trajectories.step(0)
            next(step)
        if when == "learnt from":
            with pytest.raises(RuntimeError, match="Step 0 was already learnt from"):
                next(trajectories.step(0))
            assert list(step) == []
    with pytest.raises(RuntimeError, match="Step 0 was already learnt from"):
        next(trajectories.step(0))


@pytest.mark.parametrize("field", ["begun", "finished", "learnt", "dropped", "redrawn"])
def test_a_count_that_is_off_by_one_is_noticed_at_the_end_of_a_step(field):
    trajectories = TrajectoryBuffer(1)
    acted(trajectories, place(0), place(1))
    trajectories.begin(place(2))
    assert len(list(trajectories.step(0))) == 1
    setattr(trajectories._counts, field, getattr(trajectories._counts, field) + 1)
    with pytest.raises(RuntimeError, match="lost or counted twice"):
        list(trajectories.step(1))


def test_at_rest_nothing_is_under_way():
    trajectories = TrajectoryBuffer(1)
    trajectories.begin(place(0))
    trajectories.check()
    with pytest.raises(RuntimeError, match="1 are still running"):
        trajectories.check(at_rest=True)
    trajectories.drop(place(0))
    trajectories.check(at_rest=True)


def test_what_a_run_had_begun_and_not_learnt_from_is_dropped_when_it_goes_on():
    trajectories = TrajectoryBuffer(1)
    acted(trajectories, place(0), place(1))
    trajectories.begin(place(2))
    trajectories.rerun(place(2))
    assert len(list(trajectories.step(0))) == 1
    other = TrajectoryBuffer(
        1, counts=Counts(**json.loads(json.dumps(vars(trajectories.counts()))))
    )
    assert other.counts() == Counts(begun=3, finished=1, learnt=1, dropped=2, reruns=1)
    acted(other, place(1))
    assert [ticket.number for ticket in other.step(1)] == [1]


def test_who_waits_is_told_the_first_error():
    trajectories, told = TrajectoryBuffer(1), []

    def wait():
        try:
            next(trajectories.step(0))
        except OSError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    trajectories.close(OSError("the first"))
    trajectories.close(ValueError("the second"))
    thread.join(60)
    assert told == ["the first"]


@pytest.mark.parametrize("redraws", [0, 1, 3])
def test_a_group_that_all_succeed_or_all_fail_is_drawn_again_as_often_as_may_be(redraws):
    again = []
    trajectories = TrajectoryBuffer(
        1, 2, redraws=redraws, redraw=lambda ticket, attempt: again.append((ticket, attempt))
    )

    def act(*successes, ticket=0):
        for member, success in enumerate(successes):
            one = place(ticket, member)
            trajectories.begin(one)
            trajectories.finish(one, trajectory(one, success))

    for attempt in range(redraws):
        act(*[attempt % 2 == 0] * 2)
        assert again == [(0, i + 1) for i in range(attempt + 1)]
    act(False, False)
    (ticket,) = trajectories.step(0)
    assert (ticket.redrawn, ticket.signal, len(again)) == (redraws, False, redraws)
    act(True, False, ticket=1)
    (ticket,) = trajectories.step(1)
    assert (ticket.redrawn, ticket.signal, len(again)) == (0, True, redraws)
    many = 2 * redraws
    assert trajectories.counts() == Counts(4 + many, 4 + many, learnt=4, redrawn=many)
    trajectories.begin(place(2))
    other = TrajectoryBuffer(1, 2, counts=trajectories.counts())
    assert other.counts() == Counts(5 + many, 4 + many, learnt=4, dropped=1, redrawn=many)
    other.check(at_rest=True)
