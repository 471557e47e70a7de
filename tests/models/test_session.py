"""A robot's session: the past that a policy reads, the mean of chunks that overlap, and nothing at
all for a policy that looks at one moment alone."""

from dataclasses import replace

import numpy as np
import pytest

from models.inputs.observation import RobotObservation
from models.session import RobotSession
from tests.helpers.models.tiny_policy import KEYS, openpi, programs, tiny_policy

STATE_OF_FOUR = {"state": (-3, -2, -1, 0)}


def seen(step):
    picture = np.full((2, 2, 3), step, np.uint8)
    return RobotObservation({"front": picture}, "push", np.full(3, float(step)))


def states(session, step):
    """First numbers of the past states that are read beside an observation."""
    past = session.observe(seen(step), step).past["state"]
    return [None if state is None else state[0] for state in past]


@pytest.mark.parametrize("observed", [{}, {"state": (0,), "front": (0,)}])
def test_a_policy_of_one_moment_keeps_no_observation(observed):
    session = RobotSession(observed=observed)
    for step in range(5):
        one = seen(step)
        assert session.observe(one, step) is one
    assert session.lookback == 0
    assert not session.remembers
    assert not session._moments


def test_a_session_changes_not_a_bit_and_no_program_of_a_policy_of_one_moment():
    policy = replace(tiny_policy())
    session = policy.session(5)
    for request, key in enumerate(KEYS[:2]):
        assert session.key == (5, request)
        answer = policy.infer(openpi(1), session=session, executed=request or None)["actions"]
        np.testing.assert_array_equal(answer, policy.infer(openpi(1), keys=key[None])["actions"])
        np.testing.assert_array_equal(session.chunk, answer[0])
    assert programs(policy) == 1


def test_the_past_is_read_beside_each_observation_and_begins_with_the_episode():
    session = RobotSession(observed=STATE_OF_FOUR)
    assert states(session, 0) == [0, 0, 0, 0]
    assert states(session, 1) == [0, 0, 0, 1]
    assert states(session, 2) == [0, 0, 1, 2]
    assert [states(session, step) for step in range(3, 9)][-1] == [5, 6, 7, 8]
    assert states(session, 0) == [0, 0, 0, 0], "step 0 begins an episode"
    assert states(session, 1) == [0, 0, 0, 1]
    session.reset()
    assert not session._moments


def test_values_before_the_episode_are_masked_where_the_family_says_so():
    session = RobotSession(observed=STATE_OF_FOUR, padding="mask")
    assert states(session, 0) == [None, None, None, 0]
    assert states(session, 1) == [None, None, 0, 1]
    assert [states(session, step) for step in range(2, 4)][-1] == [0, 1, 2, 3]


def test_the_nearest_observation_stands_for_one_that_was_lost():
    session = RobotSession(observed=STATE_OF_FOUR)
    for step in (0, 1, 2):
        states(session, step)
    assert states(session, 5) == [2, 2, 5, 5], "of 3 and 4, nothing arrived"
    assert states(session, 7) == [5, 5, 5, 7], "6 is as near to 5 as to 7"


def test_a_step_that_is_observed_again_is_replaced_with_all_later_ones():
    session = RobotSession(observed=STATE_OF_FOUR)
    for step in range(6):
        states(session, step)
    again = replace(seen(5), state=np.full(3, 50.0))
    assert [x[0] for x in session.observe(again, 5).past["state"]] == [2, 3, 4, 50]
    assert states(session, 6) == [3, 4, 50, 6]
    assert states(session, 5) == [3, 3, 4, 5], "6 was later, and 2 is no longer held"


def test_each_column_has_its_own_steps_and_no_more_is_kept_than_they_need():
    session = RobotSession(observed={"front": (-4, -2), "state": (-1,)})
    for step in range(20):
        past = session.observe(seen(step), step).past
    assert [picture[0, 0, 0] for picture in past["front"]] == [15, 17]
    assert [state[0] for state in past["state"]] == [18]
    assert len(session._moments) == 5
    held = {name for moment in session._moments for name in moment.values}
    assert held == {"front", "state"}


def test_a_camera_that_was_absent_is_absent_from_the_past():
    session = RobotSession(observed={"front": (-1, 0)})
    session.observe(replace(seen(0), images={}), 0)
    before, now = session.observe(seen(1), 1).past["front"]
    assert before is None
    assert now[0, 0, 0] == 1


def lerobots(chunks, m):
    """Actions of LeRobot's ACTTemporalEnsembler, which is given a chunk at every step: its online
    update, with its count of predictions for each step ahead."""
    h = len(chunks[0])
    weights = np.exp(-m * np.arange(h))
    sums, mean, count, actions = np.cumsum(weights), None, None, []
    for chunk in chunks:
        if mean is None:
            mean, count = chunk.copy(), np.ones((h, 1), int)
        else:
            mean = (mean * sums[count - 1] + chunk[:-1] * weights[count]) / sums[count]
            mean = np.concatenate([mean, chunk[-1:]])
            count = np.concatenate([np.minimum(count + 1, h), [[1]]])
        actions.append(mean[0])
        mean, count = mean[1:], count[1:]
    return np.stack(actions)


@pytest.mark.parametrize("m", [0.0, 0.01, 1.0, -0.1])
def test_overlapping_chunks_are_averaged_as_acts_authors_and_lerobot_do(m):
    chunks = np.random.default_rng(0).normal(size=(20, 6, 2))
    session, acted = RobotSession(ensemble=m), []
    for step, chunk in enumerate(chunks):
        session.observe(seen(step), step)
        acted.append(session.answered(chunk)[0])
    offline = []
    for step in range(len(chunks)):
        covering = [chunks[b][step - b] for b in range(max(step - 5, 0), step + 1)]
        w = np.exp(-m * np.arange(len(covering)))
        offline.append(w @ np.stack(covering) / w.sum())
    np.testing.assert_allclose(acted, offline, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(acted, lerobots(chunks, m), rtol=1e-12, atol=1e-12)


def test_chunks_are_averaged_over_what_is_left_of_them_and_never_across_episodes():
    chunks = np.random.default_rng(1).normal(size=(3, 6, 2)).astype(np.float32)
    session = RobotSession(ensemble=0.5)
    np.testing.assert_array_equal(session.answered(chunks[0]), chunks[0])
    session.observe(seen(4), session.after(4))
    mean = session.answered(chunks[1])
    assert mean.dtype == np.float32
    w = np.exp(-0.5)
    np.testing.assert_allclose(mean[:2], (chunks[0][4:] + w * chunks[1][:2]) / (1 + w), rtol=1e-6)
    np.testing.assert_array_equal(mean[2:], chunks[1][2:])
    session.observe(seen(0), session.after(None))
    np.testing.assert_array_equal(session.answered(chunks[2]), chunks[2])


def test_what_is_left_of_a_chunk_is_the_sessions_own():
    session, chunk = RobotSession(continues=True), np.arange(12.0).reshape(6, 2)
    assert session.left(None) is None
    with pytest.raises(ValueError, match="has not received a chunk yet"):
        session.left(0)
    session.answered(chunk)
    np.testing.assert_array_equal(session.left(2, committed=1), chunk[2:])
    with pytest.raises(ValueError, match="'executed' is 7, but the last chunk had 6 steps"):
        session.left(7)
    session.continues = False
    assert session.left(2) is None
    with pytest.raises(ValueError, match="begin it with continues=True"):
        session.left(2, committed=1)
    session.reset()
    assert session.chunk is None
    assert session.key == (0, 1), "noise is not drawn twice"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"observed": {"state": (-1, 1)}}, r"observed\['state'\] is \(-1, 1\)"),
        ({"observed": {"front": ()}}, r"observed\['front'\] is \(\)"),
        ({"ensemble": float("nan")}, "ensemble is nan"),
        ({"ensemble": 0.01, "continues": True}, "leave out either that or ensemble"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, why):
    with pytest.raises(ValueError, match=why):
        RobotSession(**wrong)


def test_one_session_is_one_robots():
    policy = tiny_policy()
    with pytest.raises(ValueError, match="one robot's and knows its last chunk"):
        policy.prepare(openpi(2), session=policy.session())
    with pytest.raises(ValueError, match="one robot's and knows its last chunk"):
        policy.prepare(openpi(1), session=policy.session(), previous=[None])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("images", "why"),
    [
        ({"front": np.zeros((8, 8, 3))}, r"image 'front' is float64 \[8, 8, 3\]; expected uint8"),
        ({"front": np.zeros((1, 8, 8, 3), np.uint8)}, r"uint8 \[1, 8, 8, 3\]"),
        ({"side": np.zeros((8, 8, 3), np.uint8)}, "does not know the camera 'side'"),
    ],
)
def test_what_is_no_picture_of_the_robots_is_refused(images, why):
    with pytest.raises(ValueError, match=why):
        tiny_policy().prepare([RobotObservation(images, "push", np.zeros(3, np.float32))])
