"""Demonstrations: what is kept, what is counted, and that labels are the expert's own."""

import numpy as np
import pytest

from sim import record
from sim.experts import expert
from sim.record import Recording, wording
from sim.scenery import CAMERAS, Randomisation
from sim.tabletop import TRAIN_SEEDS, Tabletop


def _same(one, other) -> bool:
    return one.task == other.task and all(
        np.array_equal(a[k], b[k])
        for a, b in ((one.columns, other.columns), (one.frames, other.frames))
        for k in a
    )


def test_a_recording_is_fixed_by_its_seed(envs):
    env = envs["reach"]
    one, again, other = (list(Recording(env, 20, seed=s)) for s in (0, 0, 1))
    assert len(one) == 20
    assert all(map(_same, one, again))
    assert not any(map(_same, one, other))


def test_a_longer_recording_begins_with_the_shorter_one(envs):
    short, long = (list(Recording(envs["reach"], n)) for n in (5, 20))
    assert all(map(_same, short, long))


def test_rows_are_observations_before_acting_with_the_undisturbed_label(envs):
    env = envs["lift"]
    recording = Recording(env, 16, seed=3)
    episodes = list(recording)
    first = TRAIN_SEEDS.start + 3 * 1_000_000
    state = env.reset(first + np.arange(16))
    assert recording.tried == 16, "no failure among these, so rows and seeds correspond"
    seen, labels = env.observe(state), np.asarray(expert(env, state))
    for i, episode in enumerate(episodes):
        frames = episode.frames["observation.images.front"]
        steps = len(episode.columns["action"])
        assert frames.shape == (steps, 48, 48, 3)
        assert episode.columns["observation.state"].shape == (steps, 4)
        assert all(column.dtype == np.float32 for column in episode.columns.values())
        np.testing.assert_array_equal(frames[0], seen.images[i, 0])
        np.testing.assert_array_equal(episode.columns["observation.state"][0], seen.state[i])
        np.testing.assert_array_equal(episode.columns["action"][0], labels[i])
        assert episode.task == wording(env, int(env.goal(state)[i]), int(first + i))


def test_noise_disturbs_what_is_done_and_not_what_is_wanted(envs):
    env = envs["reach"]
    still, shaken = (list(Recording(env, 16, noise=noise)) for noise in (0.0, 0.006))
    pairs = list(zip(still, shaken, strict=True))
    for calm, rough in pairs:
        assert np.allclose(calm.columns["action"][0], rough.columns["action"][0])
        assert np.ptp(rough.columns["action"][:, :2], axis=0).max() < 1e-3, "the block rests"
    assert any(len(c.columns["action"]) != len(r.columns["action"]) for c, r in pairs)


def test_episodes_end_when_the_goal_is_achieved(envs):
    lengths = [len(e.columns["action"]) for e in Recording(envs["lift"], 32)]
    assert max(lengths) < envs["lift"].max_steps
    assert len(set(lengths)) > 3


def test_failures_are_left_out_and_counted(envs, monkeypatch):
    env = envs["reach"]
    everything = list(Recording(env, 32))

    def sometimes(env, state):
        action = np.array(expert(env, state))
        action[1::2, :2] = 0.2
        return action

    monkeypatch.setattr(record, "expert", sometimes)
    recording = Recording(env, 10)
    kept = list(recording)
    assert (recording.kept, recording.tried) == (10, 19)
    assert all(map(_same, kept, everything[0:20:2]))


def test_every_wording_is_used(envs):
    env = envs["reach"]
    told = {episode.task for episode in Recording(env, 128)}
    assert told == {prompt for prompts in env.prompts for prompt in prompts}


def test_every_camera_of_a_randomised_scene_is_kept():
    env = Tabletop("reach", 24, tuple(CAMERAS), Randomisation(0, 0.1, 0.02, 0.3), lanes=16)
    episodes = list(Recording(env, 4))
    start = env.observe(env.reset(np.arange(4)))
    for i, episode in enumerate(episodes):
        assert list(episode.frames) == list(CAMERAS)
        for c, frames in enumerate(episode.frames.values()):
            assert frames.shape == (len(episode.columns["action"]), 24, 24, 3)
            np.testing.assert_array_equal(frames[0], start.images[i, c])


def test_a_seed_out_of_range_is_named(envs):
    with pytest.raises(ValueError, match=r"seed is 1000, expected 0 … 999"):
        Recording(envs["reach"], 1, seed=1000)
