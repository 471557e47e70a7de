"""Demonstrations over slots that report when they please: what is kept, in which order, and whose
labels."""

import numpy as np
import pytest

from sim.demonstrations import Demonstrations
from sim.environments.device_slots import DeviceSlots
from sim.protocol import Start
from tests.helpers.sim.point_world import (
    SPEED,
    PointWorld,
    Shuffled,
    expert,
    idle_policy,
    noisy_policy,
    seeing_policy,
)

TASK = PointWorld.name


def kept(slots, episodes=12, **options):
    return list(Demonstrations(slots, (TASK,), episodes, **options))


def same(one, other):
    return one.task == other.task and all(
        np.array_equal(a[k], b[k])
        for a, b in ((one.columns, other.columns), (one.frames, other.frames))
        for k in a
    )


def test_episodes_and_their_order_do_not_depend_on_who_reports_first():
    alone = kept(DeviceSlots(PointWorld(), 1, expert), noise=0.5)
    for seed in range(3):
        assert all(map(same, alone, kept(Shuffled(5, seed), noise=0.5)))


def test_rows_hold_what_was_seen_and_the_undisturbed_action():
    world = PointWorld()
    state = world.reset(np.arange(40, 44))
    episodes = kept(DeviceSlots(world, 3, expert), 4, first_seed=40, noise=0.5)
    for i, episode in enumerate(episodes):
        images = episode.frames["top"]
        assert len(images) == len(episode.columns["action"]) > 1
        np.testing.assert_array_equal(images[0], world.observe(state).images[i, 0])
        np.testing.assert_allclose(episode.columns["action"][0], expert(world, state)[i])
        speed = np.linalg.norm(episode.columns["action"], axis=1)
        np.testing.assert_allclose(speed, 1, atol=1e-5)
        moved = np.diff(episode.columns["observation.state"], axis=0)
        assert np.abs(moved / 0.15 - episode.columns["action"][:-1]).max() > 0.05
        assert episode.task in world.prompts[state.goal[i]]


def test_only_successes_are_kept_and_the_rest_is_counted():
    making = Demonstrations(Shuffled(4), (TASK,), 10, policy=noisy_policy)
    episodes = list(making)
    assert making.kept == len(episodes) == 10 < making.tried
    alone = Demonstrations(DeviceSlots(PointWorld(), 1), (TASK,), 10, policy=noisy_policy)
    assert all(map(same, episodes, alone))
    assert making.tried == alone.tried


def test_an_episode_whose_simulator_failed_is_made_again():
    def fails(start, attempt):
        return start.seed % 3 == 0 and attempt == 1

    making = Demonstrations(Shuffled(4, fails=fails), (TASK,), 6)
    assert all(map(same, making, kept(Shuffled(4), 6)))
    assert making.failed == 0
    lost = Demonstrations(Shuffled(4, fails=lambda start, _: start == Start(TASK, 2)), (TASK,), 6)
    assert len(list(lost)) == 6
    assert (lost.failed, lost.tried) == (1, 7)


def test_a_task_that_never_succeeds_is_given_up():
    with pytest.raises(
        ValueError, match=r"0 of 40 episodes of 'points' succeeded, but 2 were asked"
    ):
        kept(Shuffled(3), 2, policy=idle_policy)


def test_slots_without_an_expert_need_a_policy():
    with pytest.raises(ValueError, match="'points' has no scripted expert"):
        kept(DeviceSlots(PointWorld(), 1))


def test_an_expert_that_takes_over_shows_the_way_from_where_the_policy_has_come_to():
    def away(observation, prompts, keys):
        return np.tile(np.float32([0.7, -0.7]), (len(prompts), 4, 1))

    policy = {"policy": away, "replan_steps": 2, "takeover": 5}
    episodes = kept(Shuffled(3), 30, **policy)
    alone = kept(DeviceSlots(PointWorld(), 2, expert), 30, **policy)
    assert all(map(same, episodes, alone))
    begun = np.array([episode.columns["observation.state"][0] for episode in episodes])
    places = 0.7 * SPEED * np.outer([0, 2, 4], [1, -1])  # two looks at most, of two steps each
    which = np.abs(begun[:, None] - places).sum(-1).argmin(1)
    np.testing.assert_allclose(begun, places[which], atol=1e-5)
    assert set(which) == {0, 1, 2}
    for episode in episodes:
        wanted = episode.columns["action"]
        assert len(wanted) == len(episode.frames["top"]) <= PointWorld.max_steps
        np.testing.assert_allclose(np.linalg.norm(wanted, axis=1), 1, atol=1e-5)


def test_an_episode_that_the_policy_ends_itself_is_not_kept_of_a_takeover():
    """The seeing policy needs 6 steps, so all that is kept began before."""
    making = Demonstrations(
        Shuffled(4), (TASK,), 20, policy=seeing_policy, replan_steps=2, takeover=10
    )
    reached = [np.linalg.norm(e.columns["observation.state"][0]) for e in making]
    assert max(reached) < 6 * SPEED
    assert making.tried > making.kept == 20


def test_an_expert_can_only_take_over_where_there_is_one():
    with pytest.raises(ValueError, match="has no scripted expert"):
        kept(DeviceSlots(PointWorld(), 1), policy=noisy_policy, takeover=4)
