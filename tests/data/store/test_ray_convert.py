import os
import sys

import pytest

from data import open_dataset
from data.errors import DatasetError
from data.files.folder import LocalFolder
from data.store import convert, ray_convert
from data.store.convert import Settings
from tests.helpers.data.recording import LENGTHS, WRIST
from tests.helpers.data.stores import contents

SETTINGS = Settings(16, "jpeg", shard_frames=15)


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install -e '.[ray]'")
    with ray_convert.cluster("local"):
        yield


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


def test_a_cluster_writes_the_same_bytes_through_failures(ray, recorded, tmp_path):
    dataset, calls = open_dataset(recorded), []
    convert.convert(dataset, LocalFolder(tmp_path / "alone"), SETTINGS)
    run = ray_convert.on_ray()
    folder = flaky(tmp_path / "ray")
    convert.convert(dataset, folder, SETTINGS, run, lambda *call: calls.append(call))
    assert (tmp_path / "00001.json.came").exists()
    assert (tmp_path / "00002.json.came").exists()
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
    assert calls[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert len(calls) > 3


def test_an_error_that_stays_names_the_file(ray, copy, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_convert, "_ATTEMPTS", 1)
    video = next(copy.glob(f"videos/{WRIST}/*/*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    dataset, folder = open_dataset(copy), LocalFolder(tmp_path / "s")
    with pytest.raises(DatasetError, match=f"{WRIST}.*mp4, frame "):
        convert.convert(dataset, folder, SETTINGS, ray_convert.on_ray())
    assert not folder.exists("store.json")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"):
        ray_convert.on_ray()
