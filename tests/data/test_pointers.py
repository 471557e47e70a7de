"""A file that is only git-LFS's pointer to its content is told as such, whichever kind it has."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save

from data.columns import open_parquet
from data.errors import naming_damage
from data.files.folder import LocalFolder
from data.files.json_file import read_json as read_data_json
from data.lerobot.importing.importing import find_recordings
from data.video.mp4 import open_video
from models.checkpoints.safetensors_format import map_file
from models.files.foreign_json import read_json
from models.files.lfs import pointer, pointer_in
from models.inputs.bpe import ByteBpe
from models.inputs.fast import Fast
from models.inputs.tokenizer import SentencePiece
from tools.datasets.from_robot import read_robot_episode

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 209715200\n"
)


def opened_as_hdf5(file: Path) -> None:
    with naming_damage(file, "file", "is damaged ({reason})."):
        raise OSError("file signature not found")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", map_file),
        ("config.json", read_json),
        ("info.json", lambda file: read_data_json(file, file, "copy it again")),
        ("episode.parquet", open_parquet),
        ("video.mp4", open_video),
        ("tokenizer.model", SentencePiece.read),
        ("tokenizer.json", ByteBpe.read),
        ("tokenizer.json", lambda file: ByteBpe.read(file.parent)),
        ("tokenizer.json", lambda file: Fast.load(file.parent)),
        ("episode.npz", read_robot_episode),
        ("data.hdf5", opened_as_hdf5),
        ("data.hdf5", lambda file: find_recordings([file])),
        ("log.mcap", lambda file: find_recordings([file.parent])),
        ("table.csv", lambda file: find_recordings([file])),
        ("anything.bin", lambda file: LocalFolder(file.parent).local(file.name)),
    ],
)
def test_a_pointer_of_git_lfs_is_told_as_such(tmp_path, name, read):
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "weights.safetensors").write_text(POINTER)
    (tmp_path / name).write_text(POINTER)
    told = f"{name}.* is a git-LFS pointer to 209715200 bytes, not the file itself; run `git lfs"
    with pytest.raises(ValueError, match=told):
        read(tmp_path / name)


def test_files_themselves_are_no_pointers(tmp_path):
    npz, parquet = io.BytesIO(), io.BytesIO()
    np.savez(npz, x=np.zeros(1))
    pq.write_table(pa.table({"x": [1]}), parquet)
    for content in (b"", b"version 1", b"{}", npz.getvalue(), parquet.getvalue(), save({})):
        (tmp_path / "file").write_bytes(content)
        assert pointer(tmp_path / "file") == ""
    assert pointer_in(POINTER.replace("size", "ext-0 x\nsize").encode())
