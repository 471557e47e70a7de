"""Slots whose environments only wait: outcomes come when their time has come, on a clock that the
tests set, and derive from seeds."""

import threading

import numpy as np
import pytest

from rl.simulated.latency import Constant, Latencies, LogNormal, Stragglers
from rl.simulated.points import Points
from rl.simulated.synthetic import Synthetic
from sim.evaluate import evaluate, evaluate_expert
from sim.protocol import Start
from tests.helpers.rl.ticking import Ticking

FIXED = Latencies(Constant(0.5), Constant(2.0))
VARIED = Latencies(Stragglers(LogNormal(0.1, 0.5), 0.1, 20), LogNormal(1.0, 0.5))
NONE = Latencies(Constant(0), Constant(0))
STARTS = [Start("reach", seed) for seed in range(24)]


@pytest.fixture
def clock():
    return Ticking()


def still(steps=4):
    return np.zeros((steps, 2), np.float32)


def test_outcomes_come_when_their_time_has_come(clock):
    slots = Synthetic(FIXED, 3, clock=clock)
    slots.begin(0, STARTS[0])
    clock.time += 1
    slots.begin(1, STARTS[1])
    assert slots.poll(timeout=0.5) == []
    assert clock.time == 5 + 1.5
    assert [o.slot for o in slots.poll()] == [0]
    assert clock.time == 5 + 2
    slots.send(0, still())
    assert [o.slot for o in slots.poll()] == [0]
    assert clock.time == 5 + 2.5
    assert [o.slot for o in slots.poll()] == [1]
    assert clock.time == 5 + 3
    assert slots.poll() == []
    assert clock.time == 5 + 3


def test_a_late_poll_gets_all_that_is_due(clock):
    slots = Synthetic(FIXED, 3, clock=clock)
    for slot in range(3):
        slots.begin(slot, STARTS[slot])
        clock.time += 0.1
    clock.time += 9
    assert [o.slot for o in slots.poll()] == [0, 1, 2]
    assert clock.time == pytest.approx(5 + 9.3)


def test_waking_ends_a_poll_that_waits():
    slots = Synthetic(Latencies(Constant(0), Constant(1e6)), 1)
    slots.begin(0, STARTS[0])
    found = []
    thread = threading.Thread(target=lambda: found.append(slots.poll()))
    thread.start()
    slots.wake()
    thread.join(60)
    assert found == [[]]


def test_an_episode_that_is_given_up_does_not_report(clock):
    slots = Synthetic(FIXED, 1, clock=clock)
    slots.begin(0, STARTS[0])
    clock.time += 1
    slots.begin(0, STARTS[1])
    (outcome,) = slots.poll()
    assert clock.time == 5 + 3
    assert outcome.goal == Points().begin(1).goal


def noisy(observation, prompts, keys):
    """Random walks that only the keys decide."""
    return np.array([np.random.default_rng(k).normal(size=(4, 2)) for k in keys.tolist()])


def test_episodes_are_the_same_in_any_slot_and_order(clock):
    alone = evaluate(Synthetic(NONE, 1, clock=clock), noisy, STARTS, clips=0)
    beside = evaluate(Synthetic(VARIED, 7, clock=clock), noisy, STARTS, clips=0)
    assert {episode.success for episode in alone.episodes} == {True, False}
    for one, other in zip(alone.episodes, beside.episodes, strict=True):
        assert (one.success, one.length, one.goal) == (other.success, other.length, other.goal)
        np.testing.assert_array_equal(one.actions, other.actions)


def test_latencies_derive_from_the_seed_and_the_start():
    def took(seed, order):
        clock, found = Ticking(), {}
        slots = Synthetic(VARIED, 1, seed=seed, clock=clock)
        for start in order:
            since = clock.time
            slots.begin(0, start)
            slots.poll()
            slots.send(0, still())
            slots.poll()
            found[start] = round(clock.time - since, 6)
        return found

    first = took(0, STARTS)
    assert first == took(0, STARTS[::-1])
    assert first != took(1, STARTS)
    assert len(set(first.values())) == len(STARTS)


def test_members_of_a_group_have_latencies_of_their_own(clock):
    slots = Synthetic(VARIED, 4, clock=clock)
    for slot in range(4):
        slots.begin(slot, STARTS[0])
    times = []
    while len(times) < 4:
        times += [clock.time] * len(slots.poll())
    assert len(set(times)) == 4


def test_the_expert_reaches_what_the_prompt_names():
    found = evaluate_expert(Synthetic(NONE, 4), STARTS)
    assert all(episode.success for episode in found.episodes)
    lengths = [episode.length for episode in found.episodes]
    assert min(lengths) > 3
    assert len(set(lengths)) <= 2


def test_the_picture_shows_where_to_go():
    world = Points(picture=32)
    colours = np.array([[230, 60, 60], [60, 200, 80], [70, 90, 235]])
    for start in STARTS:
        point = world.begin(start.seed)
        (image,) = world.observe(point).images
        rows, columns = np.nonzero((image == colours[point.goal]).all(-1))
        seen = np.array([columns.mean(), rows.mean()]) + 0.5
        seen = seen / 32 * 2.8 - 1.4
        towards = world.expert(point)
        assert seen @ towards / np.linalg.norm(seen) > 0.98


def test_observations_and_actions_have_the_sizes_that_are_asked_for(clock):
    world = Points(("a", "b"), picture=20, state_dims=4, action_dims=7, max_steps=6)
    slots = Synthetic(FIXED, 1, world=world, clock=clock)
    assert (len(slots.spec.state_names), len(slots.spec.action_names)) == (4, 7)
    slots.begin(0, STARTS[0])
    (seen,) = slots.poll()
    assert seen.observation.images.shape == (2, 20, 20, 3)
    assert seen.observation.images.dtype == np.uint8
    assert seen.observation.state.shape == (4,)
    slots.send(0, np.zeros((4, 7)), film=True)
    (first,) = slots.poll()
    assert (len(first.reward), first.truncated, first.film.shape[0]) == (4, False, 4)
    slots.send(0, np.zeros((4, 7)))
    (last,) = slots.poll()
    assert (len(last.reward), last.truncated, last.terminated) == (2, True, False)
    assert last.ended


def test_what_does_not_fit_is_refused(clock):
    slots = Synthetic(FIXED, 2, clock=clock)
    with pytest.raises(ValueError, match="has no running episode or is busy"):
        slots.send(0, still())
    slots.begin(0, STARTS[0])
    with pytest.raises(ValueError, match="has no running episode or is busy"):
        slots.send(0, still())
    slots.poll()
    with pytest.raises(ValueError, match=r"shape \[steps, 2\]"):
        slots.send(0, np.zeros((4, 3)))
    with pytest.raises(ValueError, match="no slot 2"):
        slots.begin(2, STARTS[0])
    with pytest.raises(ValueError, match="cannot begin"):
        slots.begin(1, Start("lift", 0))
    with pytest.raises(ValueError, match="at least one"):
        slots.demonstrate(0, 0)
    with pytest.raises(ValueError, match="state_dims"):
        _ = Points(state_dims=1).spec
    with pytest.raises(ValueError, match="at least one slot"):
        Synthetic(FIXED, 0)
