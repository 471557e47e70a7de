"""Every job on a Ray of this machine: the bytes and numbers of one process, whatever fails."""

import os
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit, Trim
from data.errors import DatasetError
from data.files.folder import LocalFolder
from data.files.job import running
from data.lake import on_ray as lake
from data.lake import ranges
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.lerobot.upgrade import upgrade
from data.statistics.stats import compute, compute_together
from data.store import convert
from data.store.convert import Settings
from data.validation.validate import validate
from data.video.encoding import VideoEncoding
from tests.helpers.data.recording import FEATURES, FRONT, LENGTHS, WRIST, make_episode
from tests.helpers.data.stores import contents
from tests.helpers.data.v21 import write_v21

SETTINGS = Settings(16, "jpeg", shard_frames=15)


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install -e '.[ray]'")
    with lake.cluster("local"):
        yield


@pytest.fixture
def cluster(ray):
    """Everything that is a job of the test runs on Ray, and is counted."""
    with lake.on_ray() as (run, tally), running(run):
        yield tally


def flaky(root):
    """A folder whose storage refuses a part once, and kills the worker that brings another one."""

    class Flaky:
        url = str(root)

        def put(self, path, name):
            first = root.with_name(name[-10:].replace("/", "-") + ".came")
            if name.endswith("00001.json") and not first.exists():
                first.touch()
                raise OSError("connection reset")
            if name.endswith("00002.json") and not first.exists():
                first.touch()
                os._exit(1)
            LocalFolder(root).put(path, name)

        def __getattr__(self, name):
            return getattr(LocalFolder(root), name)

    return Flaky()


@pytest.mark.slow
def test_a_conversion_writes_the_same_bytes_through_failures_which_are_counted(
    ray, recorded, tmp_path
):
    dataset, calls = open_dataset(recorded), []
    convert.convert(dataset, LocalFolder(tmp_path / "alone"), SETTINGS)
    folder = flaky(tmp_path / "ray")
    with lake.on_ray() as (run, tally), running(run):
        convert.convert(dataset, folder, SETTINGS, lambda *call: calls.append(call))
    assert (tmp_path / "00001.json.came").exists()
    assert (tmp_path / "00002.json.came").exists()
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
    assert calls[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert len(calls) > 3
    assert (tally.units, tally.redone, tally.failed) == (len(calls) - 1, 1, 1)
    assert "1 restarted after a worker or node was lost, 1 retried" in str(tally)


@pytest.mark.slow
def test_statistics_and_findings_are_those_of_one_process(recorded, copy, ray, monkeypatch):
    monkeypatch.setattr(ranges, "UNIT_FRAMES", 15)
    video = next(copy.glob(f"videos/{WRIST}/*/*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    datasets = [open_dataset(recorded), open_dataset(copy)]

    def everything():
        stats = [compute(datasets[0]), compute_together(datasets), compute(datasets[0], [4, 1, 5])]
        found = [validate(recorded), validate(copy)]
        return [{k: v.tolist() for k, v in s.items()} for one in stats for s in one.values()], found

    expected = everything()
    with lake.on_ray() as (run, tally), running(run):
        assert everything() == expected
    assert expected[1][0] == []
    assert expected[1][1]
    assert tally.units > 50


@pytest.mark.slow
def test_edits_are_the_same_bytes(recorded, tmp_path, cluster):
    edits = {
        "copied": Edit(delete=(1,), trims=(Trim((2,), 1, None),)),
        "encoded": Edit(delete=(1,), encoding=VideoEncoding("h264")),
    }
    for name, edit in edits.items():
        edit_dataset([recorded], tmp_path / name, edit)
        with running(here):
            edit_dataset([recorded], tmp_path / f"{name}-alone", edit)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name}-alone")
    assert cluster.units > 20


def here(work, units, done):
    return (work(unit, done) for unit in units)


@pytest.mark.slow
def test_an_upgrade_is_the_same_bytes(episodes, tmp_path, cluster):
    old = write_v21(tmp_path / "old", episodes, FEATURES, 20)
    upgrade(old, tmp_path / "new")
    with running(here):
        upgrade(old, tmp_path / "alone")
    assert contents(tmp_path / "new") == contents(tmp_path / "alone")
    assert cluster.units >= len(LENGTHS)


@pytest.mark.slow
def test_an_import_is_the_same_bytes(tmp_path, cluster):
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    for number in range(3):
        aloha(recordings / f"episode_{number}.hdf5", number)
    layout = read_layout("aloha", task="lift", fps=None, robot="")
    import_dataset([recordings], tmp_path / "new", layout)
    with running(here):
        import_dataset([recordings], tmp_path / "alone", layout)
    assert contents(tmp_path / "new") == contents(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "new", "recordings"]
    assert cluster.units >= 3


def aloha(path: Path, number: int) -> None:
    episode = make_episode(number, 6)
    with h5py.File(path, "w") as file:
        file["action"] = np.tile(episode.columns["action"], (1, 4))
        file["observations/qpos"] = np.tile(episode.columns["observation.state"], (1, 3))
        file["observations/images/front"] = episode.frames[FRONT]


@pytest.mark.slow
def test_an_error_that_stays_names_the_file(copy, tmp_path, cluster):
    video = next(copy.glob(f"videos/{WRIST}/*/*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    dataset, folder = open_dataset(copy), LocalFolder(tmp_path / "s")
    with pytest.raises(DatasetError, match=f"{WRIST}.*mp4, frame "):
        convert.convert(dataset, folder, SETTINGS)
    assert not folder.exists("store.json")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"), lake.on_ray():
        pass


def test_an_address_where_no_ray_is_is_said_at_once(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    expected = r"Cannot connect to Ray at --ray-address 127\.0\.0\.1:1 .*; start it with"
    with pytest.raises(ValueError, match=expected), lake.on_ray("127.0.0.1:1"):
        pass
