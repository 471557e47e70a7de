"""A recording holds each tick as it was, becomes a LeRobot dataset, and never holds up a robot."""

import json
import os
import sys
import threading

import numpy as np
import pytest

from chiliad_client import Command, ControlLoop, EpisodeRecorder, LoopSettings
from data import open_dataset
from tests.helpers.client.fakes import FakeClock, FakeRobot, FakeServer
from tools.datasets.from_robot import read_robot_episode, write_robot_dataset


class Seeing(FakeRobot):
    """Has a camera whose pictures tell their number, in a buffer that it uses again."""

    name, state_names, action_names = "two_joints", ("waist", "elbow"), ("waist", "elbow")
    buffer = np.zeros((33, 48, 3), np.uint8)

    def observe(self):
        seen = super().observe()
        self.buffer[:] = self.observed % 200
        return {**seen, "observation/front": self.buffer}


def drive(folder, jpeg=90, episodes=2):
    clock = FakeClock()
    robot = Seeing(clock)
    server = FakeServer(clock, lambda m: np.linspace(0, 0.9, 20).reshape(10, 2), delay=0.15)
    reports = []
    with EpisodeRecorder(folder, jpeg=jpeg, queued=1000) as recorder:
        loop = ControlLoop(robot, server, "push", LoopSettings(10), recorder=recorder, clock=clock)
        for number in range(episodes):
            reports.append(loop.run(seconds=2 + number))
    return robot, reports[-1]


def test_each_tick_is_recorded_as_it_was(tmp_path):
    robot, _ = drive(tmp_path, jpeg=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("episode_000000.npz", "episode_000001.npz")
    ]
    with np.load(tmp_path / "episode_000000.npz") as episode:
        assert str(episode["task"]) == "push"
        assert episode["hz"] == 10
        assert episode["dropped"] == 0
        assert episode["tick"].tolist() == list(range(21))
        sent = np.array([action for _, action in robot.sent[:21]], np.float32)
        np.testing.assert_array_equal(episode["action"], sent)
        np.testing.assert_array_equal(episode["observation.state"][1:], sent[:-1])
        assert episode["mode"].tolist() == [1, 1, *[0] * 18, 1]
        planned = episode["planned"]
        assert np.isnan(planned[[0, 1, 20]]).all()
        np.testing.assert_array_equal(planned[2:20], sent[2:20])
        assert (episode["age"][2:20] > 0).all()
        for tick in range(21):
            assert (episode[f"observation.images.front/{tick:06d}"] == tick + 1).all()


def test_it_becomes_a_lerobot_dataset(tmp_path):
    drive(tmp_path / "seen")
    assert list(write_robot_dataset(tmp_path / "seen", tmp_path / "set")) == [1, 2]
    dataset = open_dataset(tmp_path / "set")
    assert dataset.fps == 10
    assert dataset.lengths.tolist() == [21, 31]
    episode = dataset.episode(1)
    assert episode["task"] == "push"
    assert episode["observation.images.front"].shape == (31, 34, 48, 3)
    shown = episode["observation.images.front"].astype(int)
    assert np.abs(shown - (22 + np.arange(31))[:, None, None, None]).max() <= 3
    with np.load(tmp_path / "seen/episode_000001.npz") as recorded:
        np.testing.assert_array_equal(episode["action"], recorded["action"])
        np.testing.assert_array_equal(episode["mode"].ravel(), recorded["mode"])
    np.testing.assert_allclose(episode["delta_t"].ravel()[1:], 0.1, atol=1e-4)
    assert dataset.robot_type == "two_joints"
    assert dataset.features["observation.state"]["names"] == ["waist", "elbow"]
    assert dataset.features["action"]["names"] == ["waist", "elbow"]


def test_without_an_encoder_pixels_are_recorded_with_a_warning(tmp_path, monkeypatch, caplog):
    for name in ("simplejpeg", "PIL"):
        monkeypatch.setitem(sys.modules, name, None)
    drive(tmp_path, episodes=1)
    assert "pip install './client[jpeg]'" in caplog.text
    with np.load(tmp_path / "episode_000000.npz") as episode:
        assert (episode["observation.images.front/000003"] == 4).all()


@pytest.mark.parametrize("names", [None, lambda self: ["waist"], "waist"])
def test_names_that_are_no_list_are_left_out(tmp_path, monkeypatch, names):
    monkeypatch.setattr(Seeing, "state_names", names)
    _, report = drive(tmp_path, jpeg=None, episodes=1)
    assert report.ticks["act"] > 10
    with np.load(tmp_path / "episode_000000.npz") as episode:
        assert json.loads(str(episode["names"])) == {"action": ["waist", "elbow"]}


def test_pictures_are_jpeg_unless_their_pixels_are_asked_for(tmp_path):
    drive(tmp_path, episodes=1)
    path = tmp_path / "episode_000000.npz"
    with np.load(path) as content:
        cells = [content[n] for n in content.files if n.startswith("observation.images.")]
    assert len(cells) == 21
    assert {cell[:3] for cell in cells} == {b"\xff\xd8\xff"}
    frames = read_robot_episode(path).frames["observation.images.front"].astype(int)
    assert np.abs(frames - (1 + np.arange(21))[:, None, None, None]).max() <= 2


def test_the_bytes_of_finished_episodes_are_counted_and_depth_stays_exact(tmp_path):
    depth = np.arange(64, dtype=np.uint16).reshape(8, 8, 1) * 100
    with EpisodeRecorder(tmp_path) as recorder:
        recorder.begin(10, "push")
        recorder.add({"observation/depth": depth}, command(0), 0.0)
        recorder.end()
    path = tmp_path / "episode_000000.npz"
    assert recorder.written == path.stat().st_size
    with np.load(path) as content:
        np.testing.assert_array_equal(content["observation.images.depth/000000"], depth)


def test_episodes_of_several_robots_are_not_mixed(tmp_path, monkeypatch):
    drive(tmp_path / "seen", episodes=1)
    monkeypatch.setattr(Seeing, "state_names", ("elbow", "waist"))
    drive(tmp_path / "seen", episodes=1)
    with pytest.raises(ValueError, match=r"_000001\.npz: .*state: elbow, waist.* of others into"):
        list(write_robot_dataset(tmp_path / "seen", tmp_path / "set"))
    monkeypatch.setattr(Seeing, "state_names", ("elbow",))
    drive(tmp_path / "less", episodes=1)
    with pytest.raises(ValueError, match=r"observation\.state has 2 dims and 1 names"):
        list(write_robot_dataset(tmp_path / "less", tmp_path / "set"))


@pytest.mark.parametrize("names", ["[1]", '{"action": 3}', '{"action": [1, 2]}'])
def test_names_that_are_not_texts_are_said_so(tmp_path, names):
    drive(tmp_path, jpeg=None, episodes=1)
    path = tmp_path / "episode_000000.npz"
    with np.load(path) as episode:
        np.savez(path, **{**episode, "names": np.array(names)})
    with pytest.raises(
        ValueError, match=r"000000\.npz.*: cannot be read \(names is .*not a list of"
    ):
        read_robot_episode(path)


def test_another_prompt_begins_another_episode_and_old_ones_stay(tmp_path):
    drive(tmp_path, episodes=1)
    clock = FakeClock()
    server = FakeServer(clock, lambda m: np.zeros((10, 2)), delay=0.05)
    with EpisodeRecorder(tmp_path) as recorder:
        loop = ControlLoop(
            *(FakeRobot(clock), server, "push", LoopSettings(10)), recorder=recorder, clock=clock
        )
        for prompt in ("push", "pull"):
            loop.say(prompt)
            for _ in range(5):
                loop.step()
    tasks = [read_robot_episode(path).prompt for path in sorted(tmp_path.iterdir())]
    assert tasks == ["push", "push", "pull"]


def command(tick):
    return Command(tick, "hold", np.zeros(2))


def test_a_disk_that_lags_costs_ticks_and_not_time(tmp_path, monkeypatch):
    let_go = threading.Event()
    write = EpisodeRecorder._write
    monkeypatch.setattr(EpisodeRecorder, "_write", lambda *a: (let_go.wait(300), write(*a)))
    with EpisodeRecorder(tmp_path, queued=4) as recorder:
        recorder.begin(10, "push")
        for tick in range(30):
            recorder.add({"observation/state": np.zeros(2)}, command(tick), tick / 10)
        assert recorder.dropped >= 25
        let_go.set()
        recorder.end()
    with np.load(tmp_path / "episode_000000.npz") as episode:
        assert len(episode["tick"]) == 30 - episode["dropped"]


def test_what_cannot_be_written_is_said_at_the_end_and_leaves_no_episode(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(EpisodeRecorder, "_write", full)

    def record():
        with EpisodeRecorder(tmp_path) as recorder:
            recorder.begin(10, "push")
            for tick in range(200):
                recorder.add({}, command(tick), 0.0)

    with pytest.raises(OSError, match="could not be written: no space left"):
        record()
    assert not list(tmp_path.glob("*.npz"))
    assert not [t for t in threading.enumerate() if t.name == "chiliad recorder"]


def test_what_is_no_recording_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no episode_"):
        list(write_robot_dataset(tmp_path, tmp_path / "set"))
    (tmp_path / "episode_000000.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"episode_000000\.npz.*cannot be read"):
        list(write_robot_dataset(tmp_path, tmp_path / "set"))
    (tmp_path / "episode_000000.npz").unlink()
    os.mkfifo(tmp_path / "episode_000000.npz")
    with pytest.raises(ValueError, match=r"episode_000000\.npz, episode: is a pipe, device or"):
        list(write_robot_dataset(tmp_path, tmp_path / "set"))
    (tmp_path / "episode_000000.npz").unlink()
    np.savez(tmp_path / "episode_000000.npz", action=np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"episode_000000\.npz.*mode"):
        list(write_robot_dataset(tmp_path, tmp_path / "set"))
