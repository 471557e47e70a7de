"""RLDS as TFDS wrote it (tests/fixtures/rlds) is read as TFDS reads it, and damage is named."""

import json
import pickle
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

import data.rlds.index
from data import open_dataset
from data.errors import DatasetError, MissingFileError
from data.rlds.dataset import RldsDataset, open_rlds
from data.rlds.tf_example import feature_values
from data.store.store import build_store

RLDS = Path(__file__).parents[2] / "fixtures/rlds"
EXTERIOR, WRIST = "observation.exterior_image_1_left", "observation.wrist_image_left"
TOUCH = "observation.touch"


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(RLDS / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture(params=["tfrecord", "array_record"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> RldsDataset:
    return open_rlds(RLDS / request.param, fps=15, cache_dir=tmp_path / "cache")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RLDS / "tfrecord", tmp_path / "robot/1.0.0"))


def opened(path: Path) -> RldsDataset:
    dataset = open_rlds(path, fps=15, cache_dir=path.parent / "cache")
    list(dataset.stream(dataset.column_names))
    return dataset


def test_columns_are_what_tfds_reads(dataset: RldsDataset, expected: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(dataset.lengths, expected["lengths"])
    read = set(expected) - {"lengths", *dataset.cameras}
    assert read == {name for name in dataset.column_names if "index" not in name} - {"timestamp"}
    for name in read:
        values, feature = dataset.column(name), dataset.features[name]
        assert values.shape == (expected["lengths"].sum(), *feature["shape"])
        if feature["dtype"] == "string":
            assert [text.encode() for text in values.ravel()] == expected[name].tolist()
        else:
            assert values.dtype == expected[name].dtype == feature["dtype"]
            np.testing.assert_array_equal(values.reshape(expected[name].shape), expected[name])


def test_pictures_are_what_tfds_reads(
    dataset: RldsDataset, expected: dict[str, np.ndarray]
) -> None:
    assert dataset.cameras == (EXTERIOR, TOUCH, WRIST)
    for camera in dataset.cameras:
        frames = np.concatenate([dataset.frames(i, camera) for i in range(dataset.num_episodes)])
        assert frames.dtype == np.uint8
        assert list(frames.shape[1:]) == dataset.features[camera]["shape"]
        off = np.abs(frames.astype(int) - expected[camera]).max()
        assert off <= (2 if camera == EXTERIOR else 0)  # JPEG decoders round in their own ways


def test_instructions_become_runs_with_their_wordings(dataset: RldsDataset) -> None:
    pen = ("put the pen in the cup", "pen into the cup, please", "drop the pen in the cup")
    close, wipe = ("close the drawer", "push the drawer shut"), ("wipe the table",)
    assert dataset.prompts == (("",), pen, close, wipe, ("öffne die Schublade",))
    assert dataset.runs.episode.tolist() == [0, 1, 2, 2, 3, 4]
    assert dataset.runs.first.tolist() == [0, 0, 0, 4, 0, 0]
    assert dataset.runs.length.tolist() == [5, 6, 4, 4, 9, 1]
    assert dataset.runs.task.tolist() == [0, 1, 2, 3, 4, 1]
    assert [dataset.task(i) for i in (0, 2, 4)] == ["", close[0], pen[0]]


def test_a_camera_is_absent_where_the_episode_says_so(dataset: RldsDataset) -> None:
    absent = np.argwhere(~dataset.present)
    assert absent.tolist() == [[3, dataset.cameras.index(WRIST)]]


def test_bookkeeping_counts_as_lerobot_does(dataset: RldsDataset) -> None:
    columns = dataset.columns(2)
    np.testing.assert_array_equal(columns["frame_index"], np.arange(8))
    np.testing.assert_array_equal(columns["index"], 11 + np.arange(8))
    np.testing.assert_array_equal(columns["episode_index"], np.full(8, 2))
    np.testing.assert_array_equal(columns["task_index"], [2, 2, 2, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(columns["timestamp"], (np.arange(8) / 15).astype(np.float32))


def test_chosen_episodes_come_in_the_order_asked_for(
    dataset: RldsDataset, expected: dict[str, np.ndarray]
) -> None:
    found = dataset.column("action", [3, 0])
    ends = np.cumsum(expected["lengths"])
    wanted = [expected["action"][ends[2] : ends[3]], expected["action"][: ends[0]]]
    np.testing.assert_array_equal(found, np.concatenate(wanted))


def test_a_pickled_dataset_reads_the_same(dataset: RldsDataset) -> None:
    again = pickle.loads(pickle.dumps(dataset))
    assert again.digest == dataset.digest
    np.testing.assert_array_equal(again.frames(1, WRIST), dataset.frames(1, WRIST))


def test_a_frame_store_is_made_of_it(
    dataset: RldsDataset, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    store = build_store(dataset, tmp_path / "store", 32, "raw")
    assert (store.name, store.fps, store.cameras) == ("robot", 15, dataset.cameras)
    assert store.prompts == dataset.prompts
    np.testing.assert_array_equal(store.present, dataset.present)
    rows = np.arange(29)
    for name in ("action", "observation.cartesian_position", "is_first", "observation.pose"):
        values = expected[name].reshape(29, -1).astype(np.float32)
        np.testing.assert_array_equal(store.column(name, rows), values)
    picture = np.zeros((1, 32, 32, 3), np.uint8)
    store.images(np.array([20]), EXTERIOR, list(picture))
    np.testing.assert_array_equal(picture[0, 4:28], dataset.frames(3, EXTERIOR)[1])


def test_a_second_opening_looks_at_no_shard(
    dataset: RldsDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = dataset.runs
    monkeypatch.setattr(data.rlds.index, "_scan", None)
    again = pickle.loads(pickle.dumps(dataset))
    assert all(np.array_equal(a, b) for a, b in zip(first, again.runs, strict=True))
    assert again.prompts == dataset.prompts


def test_a_changed_shard_is_looked_at_again(copy: Path) -> None:
    before = opened(copy)
    digest, second = before.digest, before.columns(1)["action"]
    swapped = [copy / f"robot-train.tfrecord-0000{k}-of-00004" for k in (0, 1)]
    contents = [path.read_bytes() for path in swapped]
    for path, content in zip(swapped, reversed(contents), strict=True):
        path.write_bytes(content)
    after = opened(copy)
    assert after.digest != digest
    np.testing.assert_array_equal(after.columns(0)["action"], second)


def test_the_folder_above_a_version_will_do(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = open_rlds(str(copy.parent), cache_dir=copy.parent / "cache")
    assert dataset.root == copy
    assert dataset.fps == 10
    assert "RLDS does not store a frame rate" in caplog.text


@pytest.mark.parametrize("byte", [0, 9, 500, -1])
def test_a_flipped_bit_is_found_and_its_record_named(copy: Path, byte: int) -> None:
    path = copy / "robot-train.tfrecord-00001-of-00004"
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="00001-of-00004, record 0: "):
        opened(copy)


def test_a_damaged_array_record_is_named(tmp_path: Path) -> None:
    root = shutil.copytree(RLDS / "array_record", tmp_path / "robot")
    path = root / "robot-train.array_record-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[18709:18711] = bytes(2)
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="00000-of-00001, file: is not a valid ArrayRecord"):
        opened(root)


@pytest.mark.parametrize("left", [-1, 6, 13])
def test_a_truncated_shard_is_named(copy: Path, left: int) -> None:
    path = copy / "robot-train.tfrecord-00002-of-00004"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DatasetError, match=r"00002-of-00004, record [01]: is cut off"):
        opened(copy)


def test_a_missing_shard_and_missing_records_are_named(copy: Path) -> None:
    path = copy / "robot-train.tfrecord-00003-of-00004"
    path.write_bytes(b"")
    with pytest.raises(DatasetError, match=r"00003-of-00004, file: holds 0 records, but .* 1;"):
        opened(copy)
    path.unlink()
    with pytest.raises(MissingFileError, match="00003-of-00004, file: is missing"):
        opened(copy)


def test_metadata_that_disagrees_with_the_records_is_named(copy: Path) -> None:
    path = copy / "features.json"
    features = json.loads(path.read_text())
    steps = features["featuresDict"]["features"]["steps"]["sequence"]["feature"]
    steps["featuresDict"]["features"]["action"]["tensor"]["shape"]["dimensions"] = ["8"]
    path.write_text(json.dumps(features))
    with pytest.raises(DatasetError, match="feature 'steps/action': holds 35 values in 5 steps"):
        opened(copy)
    path.write_text("{}")
    with pytest.raises(DatasetError, match=r"features.json, file: has no dataset of 'steps'"):
        opened(copy)


def test_a_bucket_is_read_as_a_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, np.ndarray]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "files"))
    fsspec.filesystem("memory").put(str(RLDS / "tfrecord"), "/bucket/robot/1.0.0", recursive=True)
    dataset = open_rlds("memory://bucket/robot", fps=15, cache_dir=tmp_path)
    again = pickle.loads(pickle.dumps(dataset))
    for one in (dataset, again):
        np.testing.assert_array_equal(one.column("action"), expected["action"])
        np.testing.assert_array_equal(one.frames(4, WRIST), expected[WRIST][-1:])


def test_lerobots_opener_knows_rlds(copy: Path) -> None:
    dataset = open_dataset(copy.parent)
    assert isinstance(dataset, RldsDataset)
    assert dataset.root == copy


def test_a_folder_without_rlds_and_an_unknown_split_are_errors(copy: Path) -> None:
    with pytest.raises(MissingFileError, match="so this is not an RLDS dataset"):
        open_rlds(copy.parent.parent / "nothing")
    with pytest.raises(DatasetError, match=r"splits: has no 'test'; there are \['train'\]"):
        _ = open_rlds(copy, fps=15, split="test", cache_dir=copy).lengths
    info = json.loads((copy / "dataset_info.json").read_text())
    info["splits"][0]["name"] = []
    (copy / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match="splits: has no 'train'; there are"):
        _ = open_rlds(copy, fps=15, cache_dir=copy).lengths


def test_numbers_that_are_not_packed_are_read_alike() -> None:
    packed_ints = b"\x1a\x06\x0a\x04\x05\xac\x02\x07"  # Feature{int64_list{5, 300, 7}}
    single_ints = b"\x1a\x07\x08\x05\x08\xac\x02\x08\x07"
    assert feature_values(packed_ints).tolist() == [5, 300, 7]
    assert feature_values(single_ints).tolist() == [5, 300, 7]
    half, two = np.array([0.5, 2], "<f4").view("S4")
    assert feature_values(b"\x12\x0a\x0a\x08" + half + two).tolist() == [0.5, 2]
    assert feature_values(b"\x12\x0a\x0d" + half + b"\x0d" + two).tolist() == [0.5, 2]
    assert len(feature_values(b"\x12\x00")) == len(feature_values(b"")) == 0
