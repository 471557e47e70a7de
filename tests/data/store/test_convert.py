import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.errors import DatasetError
from data.files.folder import LocalFolder, open_folder
from data.files.job import alone, in_threads, running
from data.store import convert
from data.store.convert import Settings, parts_of, shard_episodes
from data.store.store import build_store, open_store
from tests.helpers.data.recording import FRONT, LENGTHS, WRIST
from tests.helpers.data.stores import contents

SETTINGS = Settings(16, "jpeg", shard_frames=15)


@pytest.fixture(scope="module")
def dataset(recorded):
    return open_dataset(recorded)


@pytest.fixture(scope="module")
def expected(dataset, tmp_path_factory):
    folder = LocalFolder(tmp_path_factory.mktemp("expected") / "s")
    convert.convert(dataset, folder, SETTINGS)
    return contents(folder.root)


def test_shards_hold_whole_episodes_up_to_their_frames():
    lengths = np.array([5, 5, 5, 30, 1, 14, 2])
    assert shard_episodes(lengths, 15).tolist() == [0, 3, 4, 6, 7]
    assert shard_episodes(lengths, 1).tolist() == list(range(8))
    assert shard_episodes(lengths, 1000).tolist() == [0, 7]


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_bytes_do_not_depend_on_the_run_or_the_workers(dataset, tmp_path, encoding):
    settings = Settings(16, encoding, shard_frames=15)
    alone, several = LocalFolder(tmp_path / "alone"), LocalFolder(tmp_path / "several")
    convert.convert(dataset, alone, settings)

    with running(in_threads(3)):
        convert.convert(dataset, several, settings)
    assert contents(several.root) == contents(alone.root)


def test_only_parts_that_are_missing_are_made(dataset, expected, tmp_path):
    folder, made = LocalFolder(tmp_path / "s"), []

    def two_parts(work, parts, done):
        yield from alone(work, parts[:2], done)
        raise KeyboardInterrupt

    def others(work, parts, done):
        made.extend(part.name for part in parts)
        yield from alone(work, parts, done)

    with running(two_parts), pytest.raises(KeyboardInterrupt):
        convert.convert(dataset, folder, SETTINGS)
    first = []
    with running(others):
        convert.convert(dataset, folder, SETTINGS, lambda *call: first.append(call))
    parts = parts_of(dataset, SETTINGS)
    assert made == [part.name for part in parts[2:]]
    assert first[0] == (parts[1].pictures // 2, sum(LENGTHS))
    assert first[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert contents(folder.root) == expected


_SLOW = """
import sys, time
from data import open_dataset
from data.store import convert
from data.files.folder import LocalFolder
from data.lerobot.dataset import LeRobotDataset

frames = LeRobotDataset.frames

def slow(dataset, i, camera):
    if i > 2:
        time.sleep(1000)
    return frames(dataset, i, camera)

LeRobotDataset.frames = slow
settings = convert.Settings(16, "jpeg", shard_frames=15)
convert.convert(open_dataset(sys.argv[1]), LocalFolder(convert.Path(sys.argv[2])), settings)
"""


@pytest.mark.slow
def test_a_killed_conversion_keeps_what_was_finished(dataset, recorded, expected, tmp_path):
    root = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-c", _SLOW, str(recorded), str(root)])
    finished = parts_of(dataset, SETTINGS)[1].manifest
    while not (root / finished).exists():
        assert process.poll() is None
        time.sleep(0.05)
    while not list(root.glob(".making-*/frames")):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = (root / finished).stat().st_mtime_ns
    convert.convert(dataset, LocalFolder(root), SETTINGS)
    assert (root / finished).stat().st_mtime_ns == kept
    assert contents(root) == expected


def test_a_frame_that_cannot_be_decoded_stops_with_its_file(copy, tmp_path):
    video = next(copy.glob(f"videos/{WRIST}/*/*.mp4"))
    whole = video.read_bytes()
    video.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=f"{WRIST}.*mp4, frame "):
        build_store(open_dataset(copy), tmp_path / "s", 32, "raw")
    with pytest.raises(FileNotFoundError, match=r"store\.json: missing"):
        open_store(tmp_path / "s")


def test_an_episode_with_too_few_frames_is_refused(recorded, tmp_path):
    dataset = open_dataset(recorded)
    frames = dataset.frames
    dataset.frames = lambda i, camera: frames(i, camera)[: LENGTHS[3]]
    expected = f"episode 1, {FRONT}: has 9 frames, expected 12"
    with running(alone), pytest.raises(DatasetError, match=expected):
        convert.convert(dataset, LocalFolder(tmp_path / "s"), SETTINGS)


class OneCamera:
    """A dataset that lacks the wrist camera in some episodes."""

    absent = (1, 2, 3)

    def __init__(self, dataset):
        self.dataset = dataset
        self.present = dataset.present.copy()
        self.present[self.absent, 1] = False

    def frames(self, i, camera):
        assert not (camera == WRIST and i in self.absent)
        return self.dataset.frames(i, camera)

    def __getattr__(self, name):
        return getattr(self.dataset, name)


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_an_absent_camera_stores_nothing(dataset, tmp_path, encoding):
    settings = Settings(16, encoding, shard_frames=20)
    with running(alone):
        convert.convert(dataset, LocalFolder(tmp_path / "full"), settings)
        convert.convert(OneCamera(dataset), LocalFolder(tmp_path / "sparse"), settings)
    full, sparse = open_store(tmp_path / "full"), open_store(tmp_path / "sparse")
    assert np.array_equal(sparse.present[:, 1], ~np.isin(np.arange(6), OneCamera.absent))
    there = np.flatnonzero(np.repeat(sparse.present[:, 1], LENGTHS))
    for camera, rows in ((WRIST, there), (FRONT, np.arange(sum(LENGTHS)))):
        out = np.zeros((2, len(rows), 16, 16, 3), np.uint8)
        full.images(rows, camera, list(out[0]))
        sparse.images(rows, camera, list(out[1]))
        assert np.array_equal(*out)
    assert len(full.folder.list(f"frames/*/{WRIST}.*")) == 3
    assert len(sparse.folder.list(f"frames/*/{WRIST}.*")) == 2
    if encoding == "raw":
        files = (tmp_path / "sparse").glob(f"frames/*/{WRIST}.rgb")
        assert sum(file.stat().st_size for file in files) == len(there) * (16 * 16 * 3 + 4)
    with pytest.raises(ValueError, match=f"episode 1 has no '{WRIST}'"):
        sparse.images(np.array([0, LENGTHS[0]]), WRIST, [*np.zeros((2, 16, 16, 3), np.uint8)])


def test_a_folder_of_something_else_is_left_alone(dataset, tmp_path):
    (tmp_path / "thesis.tex").write_text("\\documentclass")
    with pytest.raises(
        ValueError, match=r"holds 'thesis\.tex', which does not belong to the store"
    ):
        build_store(dataset, tmp_path, 16)


def test_an_unfinished_store_of_other_settings_is_refused(dataset, tmp_path):
    def tables_only(work, parts, done):
        yield from alone(work, parts[:1], done)
        raise KeyboardInterrupt

    folder = LocalFolder(tmp_path / "s")
    with running(tables_only), pytest.raises(KeyboardInterrupt):
        convert.convert(dataset, folder, SETTINGS)
    with pytest.raises(ValueError, match=r"holds 'parts/.*-tables\.json', which does not belong"):
        convert.convert(dataset, folder, Settings(24))


def test_a_bucket_holds_the_same_bytes_and_is_read_back(dataset, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://bucket/{tmp_path.name}"
    folder = open_folder(url)
    convert.convert(dataset, folder, SETTINGS)
    assert {name: folder.local(name).read_bytes() for name in expected} == expected
    remote = open_store(url)
    rows = np.arange(sum(LENGTHS))
    out = np.zeros((2, len(rows), 16, 16, 3), np.uint8)
    remote.images(rows, FRONT, list(out[0]))
    local = LocalFolder(tmp_path / "local")
    convert.convert(dataset, local, SETTINGS)
    open_store(local.root).images(rows, FRONT, list(out[1]))
    assert np.array_equal(*out)
    assert np.array_equal(
        remote.column("action", rows), open_store(local.root).column("action", rows)
    )


def test_what_a_lost_node_left_is_removed_at_the_end(dataset, expected, tmp_path):
    def losing_one(work, units, done):
        (tmp_path / "s/.making-lost/frames").mkdir(parents=True)
        return alone(work, units, done)

    with running(losing_one):
        convert.convert(dataset, LocalFolder(tmp_path / "s"), SETTINGS)
    assert contents(tmp_path / "s") == expected


def test_scratch_files_of_a_crash_are_removed(dataset, tmp_path):
    left = Path(tmp_path / "s/.making-left")
    left.mkdir(parents=True)
    convert.convert(dataset, LocalFolder(tmp_path / "s"), SETTINGS)
    assert not left.exists()
