"""A flipped bit in what was kept for later starts is an error that names the file."""

import io
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import open_dataset
from data.errors import DatasetError
from data.files import cached
from data.frames import ACTION, STATE
from data.mixture.mixed import mix
from data.mixture.mixture import DatasetConfig, Mixture, RobotConfig
from data.rlds.dataset import open_rlds
from data.store.direct import Direct, open_direct
from data.video import seek
from tests.helpers.data.flips import flips
from tests.helpers.data.memory_frames import MemoryFrames
from tests.helpers.data.pictures import stored_in_parquet
from tests.helpers.data.recording import FRONT, LENGTHS

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROWS = np.arange(sum(LENGTHS))


def pictures(frames: Direct, rows: np.ndarray, camera: str) -> np.ndarray:
    out = np.zeros((len(rows), frames.image_size, frames.image_size, 3), np.uint8)
    frames.images(rows, camera, list(out))
    return out


@pytest.fixture(scope="module")
def direct(recorded, episodes, tmp_path_factory) -> Direct:
    """A dataset whose front camera's pictures are JPEG in the parquet, opened without a store."""
    place = tmp_path_factory.mktemp("straight")
    root = Path(shutil.copytree(recorded, place / "d"))
    (root / "meta/checksums.json").unlink()
    cells = [
        {"bytes": jpeg(picture), "path": None}
        for episode in episodes
        for picture in episode.frames[FRONT]
    ]
    stored_in_parquet(root, cells)
    return open_direct(open_dataset(root), 16, place / "cache")


def jpeg(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def test_json_stays_readable_and_comes_back(tmp_path):
    value = {"a": [1.5, float("inf"), -0.1], "ü": None}
    cached.write_json(tmp_path / "v.json", value)
    assert cached.read_json(tmp_path / "v.json") == value
    assert json.loads((tmp_path / "v.json").read_text())["content"] == value


def test_every_flipped_bit_of_json_is_refused(tmp_path):
    file = tmp_path / "v.json"
    cached.write_json(file, {"mean": [1e-05, 2.5], "E": "e"})
    for _ in flips(file, 200):
        with pytest.raises(DatasetError, match=rf"{file}, checksum: .*delete the file"):
            cached.read_json(file)


def test_every_flipped_bit_of_bytes_is_refused(tmp_path):
    file = tmp_path / "v.bin"
    cached.write_bytes(file, b"some content")
    assert bytes(cached.read_bytes(file)) == b"some content"
    for _ in flips(file, 16):
        with pytest.raises(DatasetError, match=rf"{file}, checksum: .*delete the file"):
            cached.read_bytes(file)


@pytest.mark.parametrize("left", [0, 3, 4, 15])
def test_what_was_cut_off_is_refused(left, tmp_path):
    cached.write_bytes(tmp_path / "v", b"some content")
    (tmp_path / "v").write_bytes((tmp_path / "v").read_bytes()[:left])
    for read in (cached.read_bytes, cached.read_json):
        with pytest.raises(DatasetError, match=f"{tmp_path / 'v'}, checksum: "):
            read(tmp_path / "v")


def test_a_flipped_bit_in_computed_statistics_is_refused(tmp_path):
    frames = MemoryFrames("first")
    robot = RobotConfig("arm", cameras=frames.cameras, relative=(0, 1))
    mixture = Mixture((DatasetConfig("first", embodiment="arm"),), (robot,))
    sound = mix(mixture, [frames], 4, cache=tmp_path).embodiments
    (file,) = tmp_path.glob("statistics-*.json")
    for _ in flips(file, 8):
        with pytest.raises(DatasetError, match=rf"{file}, checksum: .*it is made again"):
            mix(mixture, [frames], 4, cache=tmp_path)
    assert mix(mixture, [frames], 4, cache=tmp_path).embodiments == sound


@pytest.mark.parametrize(
    "pattern",
    ["stats.json", "prompts.json", "episodes.npz", "files.json", f"columns/{ACTION}/c/0/0",
     f"columns/{STATE}/c/0/0", "pictures/*.arrow"],
)  # fmt: skip
def test_a_flipped_bit_in_copied_numbers_is_refused_at_opening(pattern, direct):
    (file,) = direct.folder.glob(pattern)
    for _ in flips(file, 4):
        with pytest.raises(DatasetError, match=rf"{file}, checksum: .*; delete {direct.folder},"):
            open_direct(direct.dataset, 16, direct.folder.parent)


def test_a_flipped_bit_in_a_copied_jpeg_is_refused_when_it_is_read(direct):
    (file,) = direct.folder.glob("pictures/*.bin")
    (camera,) = (c for c in direct.cameras if direct.dataset.features[c]["dtype"] == "image")
    sizes = seek.read_table(file.with_suffix(".arrow"), file).size
    whole = pictures(direct, ROWS, camera)
    for at in flips(file, 16):
        frame = int(np.searchsorted(np.cumsum(sizes), at, "right"))
        with pytest.raises(
            DatasetError, match=f"frame .*: is not a readable image; delete {direct.folder}"
        ):
            pictures(direct, np.array([frame]), camera)
        others = np.delete(ROWS, frame)
        assert np.array_equal(pictures(direct, others, camera), whole[others])


def test_tables_of_a_copy_are_compared_by_each_process_that_reads_them(direct):
    pickled = pickle.dumps(direct)
    for _ in flips(direct.folder / "episodes.npz", 4):
        with pytest.raises(DatasetError, match=r"episodes\.npz, checksum: "):
            _ = pickle.loads(pickled).lengths


def test_a_copy_without_its_list_of_files_is_refused(direct):
    file = direct.folder / "files.json"
    whole = file.read_bytes()
    file.unlink()
    try:
        with pytest.raises(DatasetError, match=rf"{file}, checksum: is missing; delete "):
            open_direct(direct.dataset, 16, direct.folder.parent)
    finally:
        file.write_bytes(whole)


def test_a_flipped_bit_in_a_seek_table_is_refused(tmp_path):
    video = min((FIXTURES / "lerobot/lerobot_h264").glob("videos/*front/*/*.mp4"))
    seek.seek_table(video, tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    for _ in flips(file, 16):
        seek._table.cache_clear()
        with pytest.raises(DatasetError, match=f"{file}, checksum: "):
            seek.seek_table(video, tmp_path)
    seek._table.cache_clear()
    assert len(seek.seek_table(video, tmp_path).shown)


def test_a_flipped_bit_in_the_index_of_an_rlds_dataset_is_refused(tmp_path):
    def lengths() -> list[int]:
        return open_rlds(FIXTURES / "rlds/tfrecord", cache_dir=tmp_path).lengths.tolist()

    sound = lengths()
    (file,) = tmp_path.glob("rlds-*.npz")
    for _ in flips(file, 16):
        with pytest.raises(DatasetError, match=f"{file}, checksum: "):
            lengths()
    assert lengths() == sound
