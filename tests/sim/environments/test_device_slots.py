"""DeviceSlots answer as their episodes would alone, and with what was seen at an episode's end."""

import numpy as np
import pytest

from sim.environments.device_slots import DeviceSlots
from sim.environments.experts import expert as tabletop_expert
from sim.protocol import Start
from tests.helpers.sim.point_world import PointWorld, expert


def points(count=3):
    return DeviceSlots(PointWorld(), count, expert)


def begun(lanes, *seeds):
    for slot, seed in enumerate(seeds):
        lanes.begin(slot, Start(lanes.spec.name, seed))
    return {outcome.slot: outcome for outcome in lanes.poll()}


def toward(lanes, seed):
    """The expert's action of a fresh episode; kept up, it reaches the goal at step 6."""
    return expert(PointWorld(), PointWorld().reset([seed]))[0].astype(np.float32)


def equal(one, other):
    return all(
        np.array_equal(a, b) for a, b in zip(one.observation, other.observation, strict=True)
    ) and all(np.array_equal(getattr(one, f), getattr(other, f)) for f in one._fields[2:])


def test_the_specification_is_the_environments():
    spec = points().spec
    assert (spec.name, spec.tasks, spec.picture) == ("points", ("points",), (32, 32))
    assert (spec.cameras, spec.action_names, spec.max_steps) == (("top",), ("dx", "dy"), 12)
    assert spec.expert
    assert not DeviceSlots(PointWorld(), 1).spec.expert


def test_a_beginning_shows_the_fresh_episode_and_its_goal():
    env, outcomes = PointWorld(), begun(points(), 5, 6, 7)
    state = env.reset([5, 6, 7])
    assert [outcomes[slot].goal for slot in range(3)] == state.goal.tolist()
    for slot in range(3):
        assert np.array_equal(outcomes[slot].observation.images, env.observe(state).images[slot])
        assert len(outcomes[slot].reward) == 0
        assert not outcomes[slot].ended


def test_only_what_was_told_something_answers_and_moves():
    lanes = points()
    begun(lanes, 5, 6, 7)
    lanes.send(1, np.tile(toward(lanes, 6), (2, 1)))
    (outcome,) = lanes.poll()
    assert (outcome.slot, len(outcome.reward)) == (1, 2)
    assert lanes.poll() == []
    lanes.begin(2, Start("points", 8))
    lanes.poll()
    for slot in (0, 1):
        lanes.send(slot, np.zeros((1, 2)))
    still, moved = sorted(lanes.poll(), key=lambda outcome: outcome.slot)
    assert np.array_equal(still.observation.state, (0, 0))
    assert np.linalg.norm(moved.observation.state) == pytest.approx(0.3, rel=1e-4)


def test_an_episode_is_the_same_in_any_lane_beside_any_others():
    chunks = [toward(None, 6) * scale for scale in (0.2, 0.9, -0.3, 1.0)]
    told = [np.tile(chunk, (3, 1)) for chunk in chunks]

    def alone():
        lanes = points(1)
        yield begun(lanes, 6)[0]
        for actions in told:
            lanes.send(0, actions)
            yield lanes.poll()[0]

    lanes = points(4)
    begun(lanes, 1, 2, 3)
    lanes.begin(2, Start("points", 6))
    rng, mine = np.random.default_rng(0), [lanes.poll()[0]]
    for actions in told:
        for slot in (0, 1):
            lanes.begin(slot, Start("points", int(rng.integers(100))))
        lanes.send(2, actions)
        mine += [outcome for outcome in lanes.poll() if outcome.slot == 2]
        lanes.send(1, rng.normal(size=(5, 2)))
        lanes.poll()
    assert all(equal(one, other) for one, other in zip(mine, alone(), strict=True))


def test_an_end_within_a_chunk_answers_what_was_seen_then():
    env, lanes = PointWorld(), points(2)
    begun(lanes, 5, 6)
    action = toward(lanes, 6)
    lanes.send(1, np.tile(action, (10, 1)), film=True)
    (end,) = lanes.poll()
    assert end.terminated
    assert not end.truncated
    assert end.success
    assert (len(end.reward), end.reward.sum(), len(end.film)) == (6, 1, 6)
    assert end.achieved[end.goal]
    _, happened = env.step_chunk(env.reset([6]), np.tile(action, (1, 6, 1)))
    assert np.array_equal(end.observation.state, happened.state[0, -1])
    assert np.linalg.norm(end.observation.state) > 0.8, "not where a fresh episode begins"
    last = type(happened.scene)(*(leaf[:, -1] for leaf in happened.scene))
    assert np.array_equal(end.observation.images, env.pictures(last)[0])
    assert np.array_equal(end.film, env.render(happened.scene, 160)[0])


def test_time_running_out_truncates():
    lanes = points(1)
    begun(lanes, 5)
    lanes.send(0, np.zeros((12, 2)))
    (end,) = lanes.poll()
    assert end.truncated
    assert not end.terminated
    assert not end.success
    assert len(end.reward) == 12


def test_chunks_of_different_lengths_are_acted_at_once():
    lanes = points()
    begun(lanes, 5, 6, 7)
    for slot, steps in enumerate((1, 4, 2)):
        lanes.send(slot, np.full((steps, 2), 0.1))
    outcomes = {outcome.slot: outcome for outcome in lanes.poll()}
    assert [len(outcomes[slot].reward) for slot in range(3)] == [1, 4, 2]
    for slot, steps in enumerate((1, 4, 2)):
        assert outcomes[slot].observation.state == pytest.approx([steps * 0.015] * 2, rel=1e-4)


def test_a_demonstration_is_the_experts_actions_step_by_step_until_the_end():
    lanes = points()
    begun(lanes, 5, 6, 7)
    lanes.demonstrate(0, 4)
    lanes.demonstrate(2, 12)
    short, whole = sorted(lanes.poll(), key=lambda outcome: outcome.slot)
    assert (len(short.reward), short.ended) == (4, False)
    assert (len(whole.reward), whole.success) == (6, True)
    assert whole.actions == pytest.approx(np.tile(toward(lanes, 7), (6, 1)), abs=1e-5)
    lanes.demonstrate(0, 12)
    (rest,) = lanes.poll()
    assert (len(rest.reward), rest.success) == (2, True)


def test_noise_disturbs_what_is_done_by_episode_and_step_and_not_what_is_wanted():
    def demonstrated(noise, *slots):
        lanes = points(4)
        for slot in slots:
            lanes.begin(slot, Start("points", 6))
        lanes.poll()
        parts = []
        for steps in (2, 3):
            for slot in slots:
                lanes.demonstrate(slot, steps, noise)
            parts.append(lanes.poll()[-1])
        return parts

    quiet, noisy, again = demonstrated(0.0, 1), demonstrated(0.2, 1), demonstrated(0.2, 0, 3)
    for one, other, third in zip(quiet, noisy, again, strict=True):
        assert not np.allclose(one.observation.state, other.observation.state, atol=0.01)
        assert np.array_equal(other.observation.state, third.observation.state)
        assert np.linalg.norm(other.actions, axis=-1) == pytest.approx(1, abs=1e-5)


def test_a_slot_begins_anew_wherever_its_episode_is():
    lanes = points(2)
    first = begun(lanes, 5, 6)[0]
    lanes.send(0, np.ones((3, 2)))
    lanes.begin(0, Start("points", 9))
    other = lanes.poll()[0]
    lanes.send(0, np.ones((3, 2)))
    lanes.poll()
    lanes.begin(0, Start("points", 5))
    assert equal(lanes.poll()[0], first)
    assert not equal(other, first)


@pytest.mark.slow
def test_the_tabletops_end_is_seen_as_it_was(envs):
    env = envs["reach"]
    lanes = DeviceSlots(env, env.group_size, tabletop_expert)
    seeds = range(1_000_000_000, 1_000_000_000 + env.group_size)
    begun(lanes, *seeds)
    for slot in range(env.group_size):
        lanes.demonstrate(slot, env.max_steps)
    ends = {outcome.slot: outcome for outcome in lanes.poll()}
    state = env.reset(np.array(seeds))
    actions = np.stack(
        [np.resize(ends[slot].actions, (env.max_steps, 4)) for slot in range(env.group_size)]
    )
    _, happened = env.step_chunk(state, actions)
    for slot, end in ends.items():
        last = len(end.reward) - 1
        assert end.success
        assert happened.terminated[slot].argmax() == last
        assert np.array_equal(end.observation.state, happened.state[slot, last])
        seen = np.asarray(
            env.pictures(type(happened.scene)(*(x[slot : slot + 1, last] for x in happened.scene)))
        )
        assert np.array_equal(end.observation.images, seen[0])


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_done_is_refused():
    lanes = points(2)
    with pytest.raises(ValueError, match="slot 0 has no running episode or is busy"):
        lanes.send(0, np.zeros((1, 2)))
    begun(lanes, 5)
    with pytest.raises(ValueError, match="slot 1 has no running episode or is busy"):
        lanes.demonstrate(1, 2)
    with pytest.raises(ValueError, match=r"shape \[steps, 2\] for slot 0, got \(3,\)"):
        lanes.send(0, np.zeros(3))
    with pytest.raises(ValueError, match=r"slots 0 … 1, no slot 2"):
        lanes.begin(2, Start("points", 1))
    with pytest.raises(ValueError, match="no task 'lines'"):
        lanes.begin(1, Start("lines", 1))
    with pytest.raises(ValueError, match="no expert"):
        DeviceSlots(PointWorld(), 1).demonstrate(0, 1)
    lanes.send(0, np.zeros((1, 2)))
    with pytest.raises(ValueError, match="slot 0 has no running episode or is busy"):
        lanes.send(0, np.zeros((1, 2)))
    with pytest.raises(ValueError, match="count is 0"):
        points(0)
