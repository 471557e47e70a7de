"""Questions of clients and their answers become a dataset: whole, by connection and prompt, without
ever holding up an answer, and with what was left out counted."""

import threading

import numpy as np
import pytest

from data import open_dataset
from data.validation.validate import validate
from models.files.terminal import Console
from models.inputs.observation import RobotObservation
from tests.helpers.tools.served import Echo, Running, client, observation
from tools.serving.recorder import CHUNK, Exchange, RecordedCounts, Recorder, recorded, recording
from tools.serving.server import PolicyServer


def exchange(value, prompt="push", size=(8, 8), time=0.0, cameras=("front",), steps=2):
    pictures = {camera: np.full((*size, 3), 40 + value, np.uint8) for camera in cameras}
    chunk = np.full((steps, 2), value, np.float64)
    seen = RobotObservation(pictures, prompt, np.full(3, value, np.float32))
    return Exchange(seen, chunk, time)


def test_clients_of_a_server_are_recorded_by_connection_and_prompt(tmp_path):
    echo, path = Echo(), tmp_path / "recorded"
    server = PolicyServer(None)
    with recording(path, server, Console(quiet=True)) as recorder:
        running = Running(server, prepare=lambda report: recorded(echo, echo.inputs, recorder))
        with client(running.url) as robot:
            for value in (1, 2):
                robot.infer(observation(value))
            with pytest.raises(ValueError, match="server failed"):
                robot.infer({**observation(9), "prompt": "fail"})
            robot.infer({**observation(3), "prompt": "pull"})
        with client(running.url) as robot:
            chunk = robot.infer(observation(4))["actions"]
        running.stop()
        running.join()
    dataset = open_dataset(path)
    assert [p.severity for p in validate(path) if p.severity == "error"] == []
    assert dataset.lengths.tolist() == [2, 1, 1]
    told = [dataset.episode(i)["task"] for i in range(3)]
    assert told == ["lift the red block", "pull", "lift the red block"]
    assert dataset.column("observation.state")[:, 0].tolist() == [1, 2, 3, 4]
    assert dataset.column("action")[:, 0].tolist() == [1, 2, 3, 4]
    assert np.array_equal(dataset.column(CHUNK)[-1].reshape(2, 2), chunk)
    assert dataset.frames(0, "observation.images.front").shape == (2, 6, 8, 3)
    assert recorder.recorded.frames == 4
    assert recorder.recorded.dropped == 0


def test_a_stuck_disk_holds_up_no_answer_and_what_is_left_out_is_counted(tmp_path, monkeypatch):
    gate, reached = threading.Event(), threading.Event()
    take = Recorder._take

    def stuck(self, *given):
        reached.set()
        assert gate.wait(300)
        take(self, *given)

    monkeypatch.setattr(Recorder, "_take", stuck)
    with Recorder(tmp_path / "a", queued=3) as recorder:
        recorder.add(1, exchange(0))
        assert reached.wait(300)
        for value in range(1, 10):  # returns although nothing is written
            recorder.add(1, exchange(value))
        assert recorder.recorded.dropped == 7
        gate.set()
        while not recorder._places.acquire(blocking=False):
            pass
        recorder._places.release()
        recorder.end(1)
        recorder.add(1, exchange(10))
    counts = recorder.recorded
    assert counts.frames + counts.dropped == 11
    assert "left out" in str(counts)
    dataset = open_dataset(tmp_path / "a")
    assert dataset.column("observation.state")[:3, 0].tolist() == [0, 1, 2]
    assert dataset.column("dropped").sum() == counts.dropped


def test_long_episodes_are_split_so_that_memory_is_bounded(tmp_path):
    picture = exchange(0).observation.images["front"].nbytes
    with Recorder(tmp_path / "a", most_bytes=4 * picture) as recorder:
        for value in range(13):
            recorder.add(1, exchange(value))
            while recorder._queue.qsize():
                pass
    dataset = open_dataset(tmp_path / "a")
    assert dataset.lengths.tolist() == [5, 5, 3]
    assert dataset.column("action")[:, 0].tolist() == list(range(13))


def test_times_between_requests_are_kept_and_give_the_rate(tmp_path):
    with Recorder(tmp_path / "a") as recorder:
        for value, time in enumerate((10.0, 10.2, 10.4, 11.4)):
            recorder.add(1, exchange(value, time=time))
    dataset = open_dataset(tmp_path / "a")
    assert dataset.fps == 5
    assert np.ravel(dataset.column("delta_t")) == pytest.approx([0, 0.2, 0.2, 1.0], abs=1e-5)


def test_pictures_of_other_sizes_are_left_out_and_counted(tmp_path):
    with Recorder(tmp_path / "a") as recorder:
        recorder.add(1, exchange(0, size=(7, 9)))
        recorder.end(1)
        recorder.add(2, exchange(1, size=(16, 16)))
    assert recorder.recorded.unlike == 1
    assert open_dataset(tmp_path / "a").frames(0, "observation.images.front").shape[1:] == (
        8,
        10,
        3,
    )


@pytest.mark.parametrize(
    "other", [{"cameras": ("front", "wrist")}, {"cameras": ()}, {"steps": 1}, {"size": (16, 16)}]
)
def test_an_exchange_of_other_shapes_costs_the_recording_nothing_but_itself(tmp_path, other):
    """An optional camera more or less, and the last chunk of a replay."""
    with Recorder(tmp_path / "a") as recorder:
        for client, more in ((1, [{}, {}]), (2, [other, other]), (3, [{}, other])):
            for one in more:
                recorder.add(client, exchange(client, **one))
            recorder.end(client)
    assert recorder.recorded == RecordedCounts(2, 3, dropped=0, unlike=3, unwritten=0)
    assert "3 had other cameras or shapes than the first" in str(recorder.recorded)
    states = open_dataset(tmp_path / "a").column("observation.state")[:, 0]
    assert states.tolist() == [1, 1, 3]


def test_an_episode_that_cannot_be_written_costs_the_recording_nothing_but_itself(tmp_path):
    wild = exchange(0)._replace(chunk=np.full((2, 2), np.inf))
    with Recorder(tmp_path / "a") as recorder:
        for client, one in enumerate((exchange(1), wild, exchange(2))):
            recorder.add(client, one)
            recorder.end(client)
    assert recorder.recorded == RecordedCounts(2, 2, dropped=0, unlike=0, unwritten=1)
    assert "1 could not be written" in str(recorder.recorded)
    assert open_dataset(tmp_path / "a").column("action")[:, 0].tolist() == [1, 2]


def test_a_full_disk_is_said_and_answers_go_on(tmp_path, monkeypatch):
    def full(self, *given):
        raise OSError("No space left on device")

    monkeypatch.setattr("tools.serving.recorder.DatasetWriter.add_episode", full)

    recorder = Recorder(tmp_path / "a")

    def record():
        with recorder:
            recorder.add(2, exchange(0))
            recorder.add(1, exchange(0))
            recorder.end(1)
            recorder.add(1, exchange(1))

    with pytest.raises(OSError, match=r"No space left on device\. .*; 3 could not be written\."):
        record()
    assert recorder.recorded == RecordedCounts(0, 0, dropped=0, unlike=0, unwritten=3)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_is_not_empty_is_refused_at_once(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        Recorder(tmp_path)


def test_a_server_that_nobody_asked_leaves_no_dataset(tmp_path):
    with Recorder(tmp_path / "a"):
        pass
    assert not (tmp_path / "a").exists()
