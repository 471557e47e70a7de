"""Frame stores of a bucket, streamed through a cache with a bound that processes share."""

import fcntl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.files.folder import LocalFolder, open_folder
from data.files.shards import OpenShards, cache_limit
from data.store import convert
from data.store.convert import Settings
from data.store.store import open_store, verify
from tests.helpers.data.stores import ROWS, pictures

READ = """
import sys
import numpy as np
from data.store.store import open_store

store = open_store(sys.argv[1])
rng = np.random.default_rng(int(sys.argv[2]))
total = 0
for _ in range(30):
    rows = rng.integers(0, int(store.lengths.sum()), 3)
    for camera in store.cameras:
        out = np.zeros((3, 16, 16, 3), np.uint8)
        store.images(rows, camera, list(out))
        total += int(out.sum())
print(total)
"""


@pytest.fixture
def remote(tmp_path, monkeypatch, recorded):
    """The URL of a raw store in a folder that fsspec serves as another machine's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = Settings(16, "raw", shard_frames=12)
    convert.convert(open_dataset(recorded), LocalFolder(tmp_path / "there"), settings)
    return f"local://{tmp_path}/there"


def largest(remote: str) -> int:
    shards = Path(remote.removeprefix("local://")).glob("frames/*/*")
    return max(path.stat().st_size for path in shards)


def cached(tmp_path: Path) -> list[Path]:
    found = (tmp_path / "cache/chiliad/shards").rglob("*.rgb")
    return [path for path in found if path.is_file()]


def size(tmp_path: Path) -> int:
    """Bytes of all shards at one moment: while the lock is held, none goes."""
    with (tmp_path / "cache/chiliad/shards/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return sum(path.stat().st_size for path in cached(tmp_path))


def test_pictures_are_the_same_and_the_cache_stays_within_its_bound(remote, tmp_path, monkeypatch):
    expected = pictures(open_store(tmp_path / "there"), ROWS, "observation.images.front")
    limit = 3 * largest(remote)
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", str(limit))
    store = open_store(remote)
    for rows in (ROWS, ROWS[::-1]):
        for row in rows:
            for camera in store.cameras:
                shown = pictures(store, np.array([row]), camera)
                if camera == "observation.images.front":
                    np.testing.assert_array_equal(shown[0], expected[row])
            assert 0 < size(tmp_path) <= limit
    assert len(cached(tmp_path)) < len(list((tmp_path / "there").glob("frames/*/*")))


def test_a_store_is_verified_within_the_bound(remote, tmp_path, monkeypatch):
    limit = 2 * largest(remote)
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", str(limit))
    verify(open_store(remote))
    assert 0 < size(tmp_path) <= limit
    assert not list((tmp_path / "cache/chiliad/files").rglob("*.rgb"))


def test_without_a_bound_all_that_is_read_stays(remote, tmp_path, monkeypatch):
    monkeypatch.delenv("CHILIAD_CACHE_LIMIT", raising=False)
    store = open_store(remote)
    for camera in store.cameras:
        pictures(store, ROWS, camera)
    there = list((tmp_path / "there").glob("frames/*/*"))
    kept = (tmp_path / "cache/chiliad/files").rglob("*.rgb")
    assert len(list(kept)) == len(there)
    assert not cached(tmp_path)


def test_those_used_longest_ago_go(tmp_path, monkeypatch):
    monkeypatch.setattr("data.files.shards._RECENT", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", "25")
    (tmp_path / "there").mkdir()
    for name in "abcd":
        (tmp_path / f"there/{name}").write_bytes(name.encode() * 10)
    folder, shards = open_folder(f"local://{tmp_path}/there"), OpenShards()

    def read(name: str) -> bytes:
        return shards.get(folder, "key", name, Path.read_bytes)

    def there() -> set[str]:
        found = (tmp_path / "cache/chiliad/shards").rglob("*")
        return {path.name for path in found if path.is_file() and path.suffix != ".lock"}

    for name, kept in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("a", "ac"), ("d", "ad")):
        assert read(name) == name.encode() * 10
        assert there() == {".lock", *kept}


@pytest.mark.slow
def test_processes_share_the_bound(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", str(2 * largest(remote)))
    words = [sys.executable, "-c", READ, remote]
    processes = [
        subprocess.Popen([*words, str(seed)], stdout=subprocess.PIPE, text=True) for seed in (1, 2)
    ]
    (tmp_path / "cache/chiliad/shards").mkdir(parents=True)
    while any(process.poll() is None for process in processes):
        assert size(tmp_path) <= 2 * largest(remote)
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    monkeypatch.delenv("CHILIAD_CACHE_LIMIT")
    for seed, total in enumerate(said, 1):
        alone = subprocess.run([*words, str(seed)], capture_output=True, text=True, check=True)
        assert alone.stdout == total


def test_room_of_a_process_that_was_killed_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", "25")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a").write_bytes(b"a" * 10)
    claim = tmp_path / "cache/chiliad/shards/1-2-3.reserved"
    claim.parent.mkdir(parents=True)
    claim.write_bytes(bytes(20))
    folder = open_folder(f"local://{tmp_path}/there")
    OpenShards().get(folder, "key", "a", Path.read_bytes)
    assert not claim.exists()


def test_a_bound_smaller_than_a_shard_is_refused_when_the_store_is_opened(remote, monkeypatch):
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", str(largest(remote) - 1))
    with pytest.raises(
        ValueError, match=r"\.rgb: has \d+ bytes, more than the \d+ that CHILIAD_CACHE"
    ):
        open_store(remote)


@pytest.mark.parametrize(
    ("said", "size"), [("", None), ("200GB", 200 * 10**9), ("1.5 k", 1500), ("7", 7)]
)
def test_a_bound_is_said_in_bytes_or_with_a_unit(said, size, monkeypatch):
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", said)
    assert cache_limit() == size


@pytest.mark.parametrize("said", ["much", "-3GB", "0", "3XB"])
def test_a_bound_that_is_no_size_is_refused(said, monkeypatch):
    monkeypatch.setenv("CHILIAD_CACHE_LIMIT", said)
    with pytest.raises(ValueError, match=f"CHILIAD_CACHE_LIMIT is '{said}'; give a size"):
        cache_limit()
