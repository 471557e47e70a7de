"""One flipped bit anywhere in a frame store: it is refused by the file's name, never read as
another number or picture."""

import pickle
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data import open_dataset
from data.errors import DatasetError
from data.files import checksums
from data.files.folder import LocalFolder, open_folder
from data.frames import ACTION, STATE
from data.store import convert
from data.store.store import damaged_store_files, open_store, verify
from tests.helpers.data.flips import flips, put
from tests.helpers.data.recording import WRIST
from tests.helpers.data.stores import ROWS, SETTINGS, everything, pictures

TABLES = ("store.json", "files.json", "episodes.npz", "prompts.json", "stats.json")
COLUMNS = tuple(
    f"columns/{name}/{part}" for name in (ACTION, STATE) for part in ("c/0/0", "zarr.json")
)


@pytest.fixture(scope="module")
def raw(recorded, tmp_path_factory) -> Path:
    return made(recorded, tmp_path_factory.mktemp("raw") / "s", "raw")


@pytest.fixture(scope="module")
def jpeg(recorded, tmp_path_factory) -> Path:
    return made(recorded, tmp_path_factory.mktemp("jpeg") / "s", "jpeg")


def made(recorded: Path, root: Path, encoding: str) -> Path:
    """A store of two shards a camera."""
    convert.convert(open_dataset(recorded), LocalFolder(root), SETTINGS[encoding])
    return root


@pytest.mark.parametrize("name", [*TABLES, *COLUMNS])
def test_a_flipped_bit_in_tables_or_columns_is_refused_by_the_files_name(name, raw):
    for at in flips(raw / name, 8):
        with pytest.raises(ValueError, match=name) as refused:
            everything(raw)
        assert str(refused.value).endswith("."), at


def test_a_flipped_bit_in_a_raw_picture_is_refused_by_file_and_frame(raw):
    file = max(raw.glob(f"frames/*/{WRIST}.rgb"))
    record, store = convert.raw_record((16, 16)).itemsize, open_store(raw)
    start = len(ROWS) - file.stat().st_size // record
    whole = pictures(store, ROWS, WRIST)
    for at in flips(file, 32):
        frame = start + at // record
        with pytest.raises(DatasetError, match=rf"{file}, frame {frame}: .*delete parts/"):
            pictures(store, np.array([frame]), WRIST)
        others = np.delete(ROWS, frame)
        assert np.array_equal(pictures(store, others, WRIST), whole[others])


def test_a_flipped_bit_in_a_jpeg_or_around_it_is_refused_or_changes_nothing(jpeg):
    sound, messages = everything(jpeg), []
    for file in sorted(jpeg.glob("frames/*/*.array_record")):
        for at in flips(file, 16, where=np.fromfile(file, np.uint8) != 0):
            try:
                assert everything(jpeg) == sound, f"{file}, {at}"
            except DatasetError as error:
                messages.append(str(error).startswith(f"{file}, frame "))
    assert all(messages)
    assert len(messages) > 48


def test_a_zeroed_picture_is_refused(raw):
    file = min(raw.glob(f"frames/*/{WRIST}.rgb"))
    record = convert.raw_record((16, 16)).itemsize
    whole = file.read_bytes()
    file.write_bytes(whole[:record] + bytes(record) + whole[2 * record :])
    try:
        with pytest.raises(DatasetError, match=f"{file}, frame 1: "):
            pictures(open_store(raw), ROWS[:3], WRIST)
    finally:
        file.write_bytes(whole)


def test_opening_reports_columns_compared(raw):
    calls: list[tuple[int, int]] = []
    open_store(raw, lambda *call: calls.append(call))
    sizes = [path.stat().st_size for path in raw.glob("columns/**/*") if path.is_file()]
    assert calls[-1] == (sum(sizes), sum(sizes))
    assert len(calls) == len(sizes)


def test_columns_are_compared_by_the_process_that_opens_and_not_by_its_workers(raw, monkeypatch):
    store, read = open_store(raw), []
    monkeypatch.setattr(checksums, "sha256", lambda path: read.append(path))
    copied = pickle.loads(pickle.dumps(store))
    assert np.array_equal(copied.column(ACTION, ROWS), store.column(ACTION, ROWS))
    assert read == []


def test_a_worker_does_not_take_another_store_that_came_in_its_place(recorded, raw, tmp_path):
    root = Path(shutil.copytree(raw, tmp_path / "s"))
    pickled = pickle.dumps(open_store(root))
    shutil.rmtree(root)
    made(recorded, root, "jpeg")
    with pytest.raises(DatasetError, match=r"store\.json, files: has changed"):
        pickle.loads(pickled)


def test_columns_of_a_bucket_are_compared_at_opening(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/s"
    convert.convert(open_dataset(recorded), open_folder(url), SETTINGS["raw"])
    assert everything(url)
    name = f"{url}/columns/{ACTION}/c/0/0"
    content = bytearray(fsspec.open(name).open().read())
    content[5] ^= 4
    with fsspec.open(name, "wb") as file:
        file.write(bytes(content))
    with pytest.raises(DatasetError, match=f"{name}, checksum: .* convert again"):
        open_store(url)


def test_a_damaged_file_in_the_cache_of_a_bucket_is_refused_too(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/s"
    convert.convert(open_dataset(recorded), open_folder(url), SETTINGS["raw"])
    open_store(url)
    (cached,) = (tmp_path / "cache").rglob(f"columns/{ACTION}/c/0/0")
    put(cached, 5, cached.read_bytes()[5] ^ 4)
    with pytest.raises(DatasetError, match=f"{url}/columns/{ACTION}/c/0/0, checksum: "):
        open_store(url)


def test_all_damaged_files_are_listed_and_the_first_is_raised(raw, tmp_path):
    root = Path(shutil.copytree(raw, tmp_path / "s"))
    store = open_store(root)
    first, last = sorted(root.glob("frames/*/*.rgb"))[::3]
    put(first, 9, first.read_bytes()[9] ^ 1)
    last.write_bytes(last.read_bytes()[:-1])
    (root / "stats.json").unlink()
    found = [str(error) for error in damaged_store_files(LocalFolder(root))]
    assert [text.partition(", ")[0] for text in found] == [
        str(first), str(last), str(root / "stats.json"),
    ]  # fmt: skip
    assert "is missing" in found[2]
    with pytest.raises(DatasetError, match=f"{first}, checksum: "):
        verify(store)
