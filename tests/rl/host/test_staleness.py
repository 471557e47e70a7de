"""Admission of episodes: in order, each once, and never further ahead than the bound."""

import json
import threading
from collections import Counter

import pytest

from rl.host.staleness import GroupMember, StalenessControl
from sim.protocol import Start


def starts(ticket, attempt=0):
    return Start("odd" if ticket % 2 else "even", ticket + 1000 * attempt)


def all_of(staleness_control, tasks=None):
    return list(iter(lambda: staleness_control.take("me", tasks), None))


def made(clock=lambda: 0.0, **options):
    options = {"tickets": 3, "group": 2, "staleness": 1, "steps": 5} | options
    return StalenessControl(starts, clock=clock, **options)


@pytest.mark.parametrize("staleness", [0, 1, 3, 9])
def test_a_ticket_begins_once_the_policy_has_had_its_steps_updates_but_for_the_bound(staleness):
    staleness_control, taken = made(staleness=staleness), []
    for version in range(5):
        if version:
            staleness_control.advance(version)
        admission_open = [GroupMember(*place) for place in all_of(staleness_control)]
        assert all(place.ticket // 3 - staleness <= version for place in admission_open)
        taken += admission_open
        assert len(taken) == min(version + staleness + 1, 5) * 3 * 2
        assert staleness_control.ended == (version + staleness + 1 >= 5)
    assert taken == [GroupMember(i, m, starts(i)) for i in range(15) for m in range(2)]
    assert [staleness_control.oldest(ticket) for ticket in (0, 3, 14)] == [
        0,
        max(1 - staleness, 0),
        max(4 - staleness, 0),
    ]


def test_hosts_share_out_each_steps_tickets():
    """In their order; each host has some in every step, also where they do not divide evenly."""
    taken = []
    for index in range(2):
        staleness_control = made(share=(index, 2), staleness=0, group=1)
        mine = [place.ticket for place in all_of(staleness_control)]
        for version in range(1, 5):
            staleness_control.advance(version)
            mine += [place.ticket for place in all_of(staleness_control)]
        assert mine == list(range(index, 15, 2))
        taken += mine
    assert sorted(taken) == list(range(15))


def test_each_is_handed_out_once_whoever_asks_at_the_same_time():
    staleness_control = made(tickets=50, steps=10)
    taken, barrier = [], threading.Barrier(8)

    def ask(who):
        barrier.wait()
        ended = False
        while not ended:
            ended = staleness_control.ended
            while place := staleness_control.take(who):
                taken.append(place)

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for version in range(1, 10):
        staleness_control.advance(version)
    for thread in threads:
        thread.join(60)
    counts = Counter((place.ticket, place.member) for place in taken)
    assert counts == Counter((i, m) for i in range(500) for m in range(2))


def test_who_acts_other_tasks_takes_their_tickets_and_leaves_the_others():
    staleness_control = made(group=1)
    assert [place.ticket for place in all_of(staleness_control, {"odd"})] == [1, 3, 5]
    assert [place.ticket for place in all_of(staleness_control)] == [0, 2, 4]


def test_time_spent_waiting_is_counted_for_each_who_asked():
    now = [0.0]
    staleness_control = made(lambda: now[0], group=1, staleness=0)
    all_of(staleness_control)
    now[0] = 1.0
    assert staleness_control.take("other") is None
    now[0] = 4.0
    assert staleness_control.waited == 4.0 + 3.0
    staleness_control.advance(1)
    assert staleness_control.take("other") is not None
    now[0] = 5.0
    assert staleness_control.waited == 5.0 + 3.0
    for version in (2, 3, 4):
        staleness_control.advance(version)
    all_of(staleness_control)
    now[0] = 9.0
    assert staleness_control.waited == 5.0 + 3.0  # at the end nobody is held back


def test_its_state_is_json_and_goes_on_with_the_tickets_that_are_not_learnt_from():
    staleness_control = made(lambda: 0.0)
    all_of(staleness_control)
    staleness_control.advance(2)
    other = made(**json.loads(json.dumps(staleness_control.state())))
    assert [place.ticket for place in all_of(other)][::2] == list(range(6, 12))


def test_when_closed_it_tells_the_first_error_to_all():
    staleness_control = made()
    staleness_control.close(OSError("the disk is full"))
    staleness_control.close(ValueError("the second"))
    for _ in range(2):
        with pytest.raises(OSError, match="disk is full"):
            staleness_control.take("me")


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="at least one ticket"):
        made(tickets=0)
    with pytest.raises(ValueError, match="group = 0"):
        made(group=0)
    with pytest.raises(ValueError, match="staleness = -1"):
        made(staleness=-1)
    staleness_control = made(version=3)
    for version in (2, 3):
        with pytest.raises(ValueError, match=f"Version {version} is not newer than version 3"):
            staleness_control.advance(version)


def test_a_ticket_is_one_episode_and_a_step_may_be_one_ticket():
    staleness_control = StalenessControl(starts, tickets=1, staleness=0, steps=2)
    assert all_of(staleness_control) == [GroupMember(0, 0, starts(0))]


def test_a_run_that_has_had_more_steps_than_it_is_to_have_begins_nothing():
    staleness_control = made(version=6, steps=4)
    assert staleness_control.take("me") is None
    assert staleness_control.ended


def test_a_ticket_that_is_drawn_again_comes_first_from_another_start():
    """Episodes may follow until the last update, so the end is not told before it."""
    staleness_control = made(redraws=True)
    assert [staleness_control.take("me").ticket for _ in range(4)] == [0, 0, 1, 1]
    staleness_control.redraw(0, 1)
    found = all_of(staleness_control)
    assert found[:2] == [GroupMember(0, member, starts(0, 1)) for member in range(2)]
    assert [place.ticket for place in found[2:]] == [2, 2, 3, 3, 4, 4, 5, 5]
    for version in range(1, 5):
        staleness_control.advance(version)
        all_of(staleness_control)
        assert not staleness_control.ended
    staleness_control.redraw(14, 3)
    assert {place.start for place in all_of(staleness_control)} == {starts(14, 3)}
    staleness_control.advance(5)
    assert staleness_control.ended
