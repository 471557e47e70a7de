import pickle
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants

from data.errors import DatasetError, MissingFileError
from data.files.folder import open_folder
from tests.helpers.data.fake_hub import COMMIT, REPOSITORY, fake_hub

FILES = {"meta/info.json": b"{}", "data/chunk-000/a.parquet": b"a" * 1000, "data/b.txt": b"bb"}


@pytest.fixture
def on_disk(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "set"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The URL of the files in fsspec's filesystem in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for name, content in FILES.items():
        memory.pipe(f"/bucket/set/{name}", content)
    yield "memory://bucket/set"
    memory.store.clear()


@pytest.fixture
def hub(on_disk, tmp_path, monkeypatch):
    """Requests made of a hub that serves the files as hf://org/set."""
    with fake_hub(on_disk, tmp_path / "hub", monkeypatch) as requests:
        yield requests


def assert_holds_the_files(folder):
    assert folder.list("**/*") == sorted(FILES)
    assert folder.list("data/*.txt") == ["data/b.txt"]
    assert folder.list("data/chunk-*/*.parquet") == ["data/chunk-000/a.parquet"]
    for name, content in FILES.items():
        assert folder.exists(name)
        assert folder.size(name) == len(content)
        assert folder.local(name).read_bytes() == content
        assert folder.local(name).name == name.rpartition("/")[2]
    assert not folder.exists("meta/none.json")
    assert not folder.exists("meta")
    with pytest.raises(MissingFileError, match=r"meta/none\.json, file: is missing"):
        folder.local("meta/none.json")


def test_a_folder_on_disk_is_read_in_place(on_disk):
    assert_holds_the_files(open_folder(on_disk))
    assert open_folder(f"file://{on_disk}").local("data/b.txt") == on_disk / "data/b.txt"


def test_a_bucket_is_read_file_by_file(bucket):
    assert_holds_the_files(open_folder(bucket))
    assert_holds_the_files(pickle.loads(pickle.dumps(open_folder(bucket))))


def test_a_hub_repository_is_read_file_by_file(hub):
    assert_holds_the_files(open_folder(f"hf://{REPOSITORY}"))
    assert_holds_the_files(open_folder(f"hf://datasets/{REPOSITORY}@{COMMIT}"))
    inside = open_folder(f"hf://{REPOSITORY}@main/data")
    assert inside.local("b.txt").read_bytes() == b"bb"
    assert inside.list("*/*") == ["chunk-000/a.parquet"]


def test_only_what_is_asked_for_is_downloaded_from_the_hub(hub):
    folder = open_folder(f"hf://{REPOSITORY}")
    assert folder.list("data/*/*") == ["data/chunk-000/a.parquet"]
    assert not any("data/" in request for request in hub)
    folder.local("data/b.txt")
    assert [request for request in hub if request.startswith("GET") and "data/" in request] == [
        f"GET /datasets/{REPOSITORY}/resolve/{COMMIT}/data/b.txt"
    ]


def test_a_second_opening_of_a_hub_repository_makes_no_request(hub):
    assert_holds_the_files(open_folder(f"hf://{REPOSITORY}"))
    assert hub
    hub.clear()
    assert_holds_the_files(open_folder(f"hf://{REPOSITORY}"))
    assert hub == []


def test_a_cached_hub_repository_opens_offline(on_disk, tmp_path, monkeypatch):
    """The cache is laid by hand as an older library leaves it: without a list of files."""
    snapshot = tmp_path / f"hub/datasets--org--set/snapshots/{COMMIT}"
    on_disk.rename(snapshot.parent.mkdir(parents=True) or snapshot)
    (tmp_path / "hub/datasets--org--set/refs").mkdir()
    (tmp_path / "hub/datasets--org--set/refs/main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_holds_the_files(open_folder(f"hf://{REPOSITORY}"))
    with pytest.raises(MissingFileError, match=r"hf://org/other.*is not cached and the hub"):
        open_folder("hf://org/other")


def test_a_repository_that_is_not_there_is_named(hub):
    with pytest.raises(MissingFileError, match=r"hf://org/none, repository: is not on the hub"):
        open_folder("hf://org/none")
    with pytest.raises(ValueError, match="expected hf://organisation/name"):
        open_folder("hf://set")


def test_a_bucket_file_is_fetched_once_by_all_threads_and_openings(bucket, monkeypatch):
    fetched = []
    get = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda fs, *args: (fetched.append(args[0]), get(fs, *args))
    )
    folders = [open_folder(bucket) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda folder: folder.local("data/b.txt"), folders))
    assert len(paths) == len(fetched) == 1


def test_a_bucket_file_that_changed_is_fetched_again(bucket):
    assert open_folder(bucket).local("data/b.txt").read_bytes() == b"bb"
    fsspec.filesystem("memory").pipe("/bucket/set/data/b.txt", b"other")
    assert open_folder(bucket).local("data/b.txt").read_bytes() == b"other"


def test_an_interrupted_download_leaves_nothing_and_is_made_good(bucket, tmp_path, monkeypatch):
    def cut(fs, remote, local):
        with open(local, "wb") as file:
            file.write(b"a" * 10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", cut)
        with pytest.raises(KeyboardInterrupt):
            open_folder(bucket).local("data/chunk-000/a.parquet")
    left = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == []
    assert open_folder(bucket).local("data/chunk-000/a.parquet").stat().st_size == 1000


class ClientError(Exception):
    """Stands for a storage client's own error, which is no OSError."""


@pytest.mark.parametrize("method", ["__init__", "info"])
def test_an_error_of_a_storages_client_names_the_file(bucket, monkeypatch, method):
    def refused(*_, **__):
        raise ClientError("Parameter validation failed:\nInvalid bucket name")

    monkeypatch.setattr(MemoryFileSystem, method, refused)
    MemoryFileSystem.clear_instance_cache()
    with pytest.raises(
        DatasetError,
        match=r"memory://bucket/set.*, file: cannot be reached \(Parameter validation failed: Inv",
    ):
        open_folder(bucket).local("data/b.txt")


def test_a_download_that_comes_short_is_an_error(bucket, monkeypatch):
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda fs, remote, local: open(local, "wb").close()
    )
    with pytest.raises(
        DatasetError, match=r"memory://bucket/set/data/b\.txt, file: .*0 bytes arrived, expected 2"
    ):
        open_folder(bucket).local("data/b.txt")


def test_files_are_put_into_folders_and_buckets_but_not_into_the_hub(bucket, hub, tmp_path):
    (tmp_path / "new").write_bytes(b"new")
    for url in (tmp_path / "made", bucket):
        folder = open_folder(url)
        folder.put(tmp_path / "new", "a/b/c.bin")
        assert folder.local("a/b/c.bin").read_bytes() == b"new"
        assert open_folder(url).list("a/*/*") == ["a/b/c.bin"]
    with pytest.raises(ValueError, match="only read from"):
        open_folder(f"hf://{REPOSITORY}").put(tmp_path / "new", "a.bin")


def test_a_protocol_that_needs_a_package_names_it():
    with pytest.raises(ValueError, match=r"gs://bucket/set: a Python package is missing.*gcsfs"):
        open_folder("gs://bucket/set")
    with pytest.raises(ValueError, match="nonsense"):
        open_folder("nonsense://bucket/set")
