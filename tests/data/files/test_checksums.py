"""Checksums of a dataset's files tell any change of them."""

import shutil
from pathlib import Path

import pytest

from data import open_dataset
from data.errors import DatasetError
from data.files.checksums import CHECKSUMS, damaged_files, write_checksums
from data.files.folder import LocalFolder
from tests.helpers.data.recording import WRIST

VIDEO = f"videos/{WRIST}/chunk-000/file-000.mp4"


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def found(root: Path) -> list[str]:
    return [str(error) for error in damaged_files(LocalFolder(root))]


def test_a_dataset_of_ours_has_checksums_that_hold(recorded: Path) -> None:
    assert (recorded / CHECKSUMS).is_file()
    assert found(recorded) == []
    assert open_dataset(recorded).num_episodes == 6


@pytest.mark.parametrize("name", ["meta/info.json", "data/chunk-000/file-000.parquet", VIDEO])
def test_one_flipped_bit_is_found(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert found(copy) == [
        f"{copy / name}, checksum: the file does not hold the bytes it was written with; copy it "
        f"again or, if it was changed on purpose, delete {CHECKSUMS}."
    ]


def test_missing_cut_and_new_files_are_found(copy: Path) -> None:
    (copy / "meta/tasks.parquet").unlink()
    (copy / VIDEO).write_bytes(b"cut")
    (copy / "data/chunk-000/file-001.parquet").write_bytes(b"new")
    new, missing, cut = found(copy)
    assert "file-001.parquet, checksum: the file is newer than" in new
    assert "tasks.parquet, checksum: the file is missing" in missing
    assert "file-000.mp4, checksum: the file has 3 bytes, but was written with" in cut


def test_a_dataset_without_checksums_is_not_blamed_until_it_has_some(copy: Path) -> None:
    (copy / CHECKSUMS).unlink()
    (copy / VIDEO).write_bytes(b"cut")
    assert found(copy) == []
    write_checksums(copy)
    (copy / VIDEO).write_bytes(b"gut")
    assert len(found(copy)) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"sha256": 3}', '{"sha256": {"a": 3}}', "[" * 9999])
def test_broken_checksums_are_named(copy: Path, text: str) -> None:
    (copy / CHECKSUMS).write_text(text)
    with pytest.raises(DatasetError, match=r"checksums.json, sha256: does not list the files"):
        found(copy)
