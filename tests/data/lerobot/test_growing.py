"""Recordings that are cut off: every finished episode can be read, and going on comes to the bytes
of a recording that was not."""

import json
import os
import resource
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.files.exchange import exchange
from data.lerobot.metadata import JOURNAL
from data.lerobot.writer import DatasetWriter
from data.validation.validate import validate
from tests.helpers.data.recording import FEATURES, FRONT, WRIST, assert_same_episodes, make_episode

EPISODES = [make_episode(number, 3 + number) for number in range(3)]


class Killed(BaseException):
    """Stands for the end of the process."""


def record(path, episodes=EPISODES, **options):
    """Records those that are not there yet."""
    with DatasetWriter(path, fps=20, features=FEATURES, about={"seed": 1}, **options) as writer:
        for number in range(writer.num_episodes, len(episodes)):
            writer.add_episode(*episodes[number], note={"number": number})
        notes = writer.notes
    return notes


def files(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "set"
    record(path)
    return files(path)


@contextmanager
def killed_at(moment, monkeypatch):
    """Ends all at the `moment`-th change of the folder's files, as a kill would: nothing is tidied
    up. Yields a list of the changes."""
    done: list[str] = []

    def wrap(name, change):
        def changed(*given, **named):
            if len(done) == moment:
                raise Killed
            done.append(name)
            return change(*given, **named)

        return changed

    with monkeypatch.context() as patch:
        for owner, name in (
            (Path, "replace"),
            (shutil, "copyfile"),
            (os, "fsync"),
        ):
            patch.setattr(owner, name, wrap(name, getattr(owner, name)))
        patch.setattr("data.lerobot.writer.exchange", wrap("exchange", exchange))
        patch.setattr("data.lerobot.growing.GrowingDataset.close", lambda self: None)
        patch.setattr("data.lerobot.writer.DatasetWriter.__exit__", _as_killed)
        yield done


def _as_killed(writer, kind, error, trace):
    try:
        if kind is None:
            writer._finish()
    finally:
        writer._grown._journal.close()


SMALL = {
    name: FEATURES[name] | ({"shape": (16, 16, 3)} if name == FRONT else {})
    for name in (FRONT, "action")
}


def small(path, finished, **options):
    """Records two small episodes; `finished` tells of each."""
    pictures = np.full((2, 16, 16, 3), 90, np.uint8)
    with DatasetWriter(path, fps=20, features=SMALL, **options) as writer:
        for number in range(writer.num_episodes, 2):
            columns = {"action": np.full((2, 3), number, np.float32)}
            writer.add_episode(columns, {FRONT: pictures * (number + 1)}, f"task {number}")
            finished.append(number)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.drill)])
def test_killed_at_any_change_of_a_file_every_finished_episode_opens(step, tmp_path, monkeypatch):
    small(tmp_path / "whole", [])
    whole, changes = files(tmp_path / "whole"), []
    for moment in range(0, 100, step):
        path, finished = tmp_path / str(moment), []
        with killed_at(moment, monkeypatch) as done, suppress(Killed):
            small(path, finished)
        changes += done
        if finished:
            dataset = open_dataset(path)
            assert dataset.num_episodes in (len(finished), len(finished) + 1)
            expected = np.repeat(np.arange(dataset.num_episodes), 2)
            assert dataset.column("action")[:, 0].tolist() == expected.tolist()
            assert dataset.frames(len(finished) - 1, FRONT).shape == (2, 16, 16, 3)
            assert dataset.task(len(finished) - 1) == f"task {len(finished) - 1}"
        if (path / JOURNAL).exists() or not path.exists():
            small(path, [], resume=True)
        assert files(path) == whole
        if len(done) < moment:
            break
    assert set(changes) == {"replace", "copyfile", "fsync", "exchange"}
    assert 20 < moment < 99


def test_what_is_on_disk_meanwhile_is_a_sound_dataset(tmp_path):
    with DatasetWriter(tmp_path / "set", fps=20, features=FEATURES) as writer:
        for number, episode in enumerate(EPISODES):
            writer.add_episode(*episode)
            dataset = open_dataset(tmp_path / "set")
            assert dataset.info["total_episodes"] == number + 1
            assert_same_episodes(dataset, EPISODES[: number + 1])
            assert [p for p in validate(tmp_path / "set") if p.severity == "error"] == []


def test_an_error_keeps_what_is_finished_and_resuming_goes_on(tmp_path, whole):
    def fail():
        with DatasetWriter(
            tmp_path / "set", fps=20, features=FEATURES, about={"seed": 1}
        ) as writer:
            writer.add_episode(*EPISODES[0], note={"number": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert_same_episodes(open_dataset(tmp_path / "set"), EPISODES[:1])
    with pytest.raises(ValueError, match="holds a recording that was cut off; continue it with"):
        record(tmp_path / "set")
    assert record(tmp_path / "set", resume=True) == [{"number": k} for k in range(3)]
    assert files(tmp_path / "set") == whole
    with pytest.raises(ValueError, match="is not empty but holds nothing to resume"):
        record(tmp_path / "set", resume=True)


@contextmanager
def small_disk(size):
    """No file may be larger, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [3000, 100_000])
def test_a_full_disk_ends_it_with_one_error_and_keeps_what_is_finished(size, tmp_path, whole):
    """The first episode still fits, or nothing does."""
    large, noise = make_episode(1, 60), np.random.default_rng(0)
    for pictures in large.frames.values():
        pictures[:] = noise.integers(0, 255, pictures.shape)
    with small_disk(size), pytest.raises(OSError, match="File too large"):
        record(tmp_path / "set", [EPISODES[0], large])
    if not (tmp_path / "set").exists():
        assert size == 3000
        return
    assert not (tmp_path / "set/.unfinished").exists()
    assert_same_episodes(open_dataset(tmp_path / "set"), EPISODES[:1])
    record(tmp_path / "set", resume=True)
    assert files(tmp_path / "set") == whole


def test_a_disk_without_room_for_the_first_line_leaves_nothing(tmp_path):
    with small_disk(10), pytest.raises(OSError, match="File too large"):
        record(tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_another_recording_does_not_go_on_there(tmp_path):
    def begin(**options):
        with (
            suppress(KeyboardInterrupt),
            DatasetWriter(tmp_path / "set", features=FEATURES, **options) as writer,
        ):
            if not writer.num_episodes:
                writer.add_episode(*EPISODES[0])
            raise KeyboardInterrupt

    begin(fps=20, about={"seed": 1})
    with pytest.raises(
        ValueError, match="was recorded with seed 1, but now it is 2; continue with"
    ):
        begin(fps=20, about={"seed": 2}, resume=True)
    with pytest.raises(ValueError, match="was recorded with fps 20, but now it is 10"):
        begin(fps=10, about={"seed": 1}, resume=True)


def test_two_processes_do_not_record_into_one_folder(tmp_path):
    with DatasetWriter(tmp_path / "set", fps=20, features=FEATURES) as writer:
        writer.add_episode(*EPISODES[0])
        with pytest.raises(ValueError, match="is being recorded by another process"):
            DatasetWriter(tmp_path / "set", fps=20, features=FEATURES, resume=True)
    assert {FRONT, WRIST} <= set(open_dataset(tmp_path / "set").cameras)


def stopped_recording(path, episodes):
    """Journal of a recording that was cut off, which tells of each episode in a line."""

    def stop():
        with DatasetWriter(path, fps=20, features=FEATURES, about={"seed": 1}) as writer:
            for number, episode in enumerate(episodes):
                writer.add_episode(*episode, note={"number": number})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    return path / JOURNAL


def test_the_journal_tells_a_text_once_and_the_form_that_repeated_all_is_read(tmp_path, whole):
    journal = stopped_recording(tmp_path / "set", [*EPISODES[:2], EPISODES[0]])
    header, *entries = map(json.loads, journal.read_text().splitlines())
    assert [entry["tasks"] for entry in entries] == [[EPISODES[0].task], [EPISODES[1].task], []]
    shutil.rmtree(tmp_path / "set")
    journal = stopped_recording(tmp_path / "set", EPISODES[:2])
    header, *entries = map(json.loads, journal.read_text().splitlines())
    entries[1]["tasks"] = [episode.task for episode in EPISODES[:2]]
    journal.write_text("".join(json.dumps(line) + "\n" for line in (header, *entries)))
    record(tmp_path / "set", resume=True)
    assert files(tmp_path / "set") == whole
