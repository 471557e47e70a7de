"""Forms that LeRobot v3.0 datasets take in the wild, and what is wrong in them."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.columns import BOOKKEEPING
from data.dataset import picture_shape
from data.errors import DatasetError, MissingFileError
from tests.helpers.data.fake_hub import REPOSITORY, fake_hub
from tests.helpers.data.pictures import add_feature, edit_info, png, set_column, stored_in_parquet
from tests.helpers.data.recording import (
    EPISODES,
    FRONT,
    LENGTHS,
    PARQUET,
    TASKS,
    WRIST,
    assert_same_episodes,
    make_episode,
    write,
)


@pytest.fixture
def split(tmp_path, episodes):
    """The episodes in several parquet and mp4 files."""
    return write(tmp_path / "split", episodes, data_megabytes=0.001, video_megabytes=0.004)


def test_a_wrong_file_index_after_every_rollover_is_made_good(split, episodes):
    """LeRobot 0.4's converter names the file before for the first episode of each file."""
    table = pq.read_table(split / EPISODES)
    right = table["data/file_index"].to_numpy()
    assert right[-1] > 1
    index = right - (np.diff(right, prepend=0) > 0)
    set_column(split / EPISODES, "data/file_index", index)
    assert_same_episodes(open_dataset(split), episodes)
    for i in range(len(LENGTHS)):
        columns = open_dataset(split, episodes=[i]).columns(0)
        np.testing.assert_array_equal(columns["action"], episodes[i].columns["action"])


def test_an_episode_that_lies_in_two_files_is_put_together(split, episodes):
    files = sorted((split / "data").rglob("*.parquet"))
    first, second = (pq.read_table(file) for file in files[:2])
    pq.write_table(first.slice(0, len(first) - 3), files[0])
    pq.write_table(pa.concat_tables([second, first.slice(len(first) - 3)]), files[1])
    assert_same_episodes(open_dataset(split), episodes)


def test_a_row_whose_episode_lies_a_whole_integer_away_is_not_mixed_in(split):
    """The difference of two int64 wraps around and looks like the next row's."""
    file = sorted((split / "data").rglob("*.parquet"))[1]
    table = pq.read_table(file)
    numbers = table["episode_index"].to_pylist()
    numbers[-1] = -(2**63)
    set_column(file, "episode_index", numbers, pa.int64())
    with pytest.raises(DatasetError, match=r"column 'length': episode \d has length"):
        open_dataset(split).column("action")


def test_a_stream_holds_one_file_at_a_time_and_all_of_it_in_order(split, episodes):
    dataset = open_dataset(split)
    blocks = list(dataset.stream(["action", "episode_index", "next.success"]))
    assert len(blocks) == dataset.metadata.num_data_files > 2
    numbers = np.concatenate([block["episode_index"] for block in blocks])
    assert numbers.tolist() == np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist()
    action = np.concatenate([block["action"] for block in blocks])
    np.testing.assert_array_equal(action, np.concatenate([e.columns["action"] for e in episodes]))
    some = np.concatenate([b["action"] for b in dataset.stream(["action"], [4, 0, 1])])
    np.testing.assert_array_equal(
        some, np.concatenate([episodes[k].columns["action"] for k in (4, 0, 1)])
    )


def test_opening_reads_no_data_file(split):
    for file in (*split.glob("data/*/*"), *split.glob("videos/*/*/*")):
        file.write_bytes(b"not read")
    dataset = open_dataset(split)
    assert dataset.num_frames == dataset.runs.length.sum() == sum(LENGTHS)
    assert dataset.task(1) == TASKS[1]
    assert dataset.present.all()
    with pytest.raises(DatasetError, match="not a readable parquet"):
        dataset.column("action")


def test_a_selection_needs_only_the_files_of_its_episodes(split, episodes):
    whole = open_dataset(split)
    needed = {whole.file(4)}
    needed |= {whole.video(4, camera)[0] for camera in whole.cameras}
    for file in (*split.glob("data/*/*"), *split.glob("videos/*/*/*")):
        if file not in needed:
            file.write_bytes(b"not read")
    dataset = open_dataset(split, episodes=[4])
    assert dataset.episode_numbers.tolist() == [4]
    assert dataset.lengths.tolist() == [LENGTHS[4]]
    assert_same_episodes(dataset, episodes[4:5])
    assert dataset.digest != whole.digest
    with pytest.raises(ValueError, match=r"no episode 9; there are 6, numbered 0 to 5"):
        open_dataset(split, episodes=[4, 9])


def test_numbers_with_gaps_are_kept(copy, episodes):
    numbers = np.array([0, 3, 4, 20, 21, 50])
    set_column(copy / EPISODES, "episode_index", numbers)
    set_column(copy / PARQUET, "episode_index", np.repeat(numbers, LENGTHS))
    dataset = open_dataset(copy)
    assert dataset.episode_numbers.tolist() == numbers.tolist()
    assert_same_episodes(dataset, episodes)
    assert_same_episodes(open_dataset(copy, episodes=[20, 3]), [episodes[1], episodes[3]])


def test_rows_that_no_metadata_lists_are_an_error_when_all_is_read(copy):
    table = pq.read_table(copy / EPISODES)
    pq.write_table(table.slice(0, 5), copy / EPISODES)
    dataset = open_dataset(copy)
    assert len(dataset.columns(4)["action"]) == LENGTHS[4]
    with pytest.raises(DatasetError, match="8 rows have 5 or another value"):
        dataset.column("action")


def test_selected_episodes_are_all_that_is_downloaded(split, episodes, tmp_path, monkeypatch):
    with fake_hub(split, tmp_path / "hub", monkeypatch) as requests:
        dataset = open_dataset(f"hf://{REPOSITORY}", episodes=[0])
        assert dataset.name == REPOSITORY
        assert_same_episodes(dataset, episodes[:1])
        fetched = {r.partition("0123456789abcdef01234567/")[2] for r in requests if "GET" in r}
        assert sorted(name for name in fetched if not name.startswith("meta/") and name) == [
            "data/chunk-000/file-000.parquet",
            f"videos/{FRONT}/chunk-000/file-000.mp4",
            f"videos/{WRIST}/chunk-000/file-000.mp4",
        ]
        assert_same_episodes(open_dataset(f"hf://{REPOSITORY}@main"), episodes)
        assert open_dataset(f"hf://{REPOSITORY}").digest == open_dataset(split).digest
        requests.clear()
        assert_same_episodes(pickle.loads(pickle.dumps(dataset)), episodes[:1])
    assert requests == []


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64()])
def test_cameras_without_a_place_in_the_metadata_are_absent(copy, episodes, kind):
    """pandas writes an integer column with nulls as floats with NaN."""
    table = pq.read_table(copy / EPISODES)
    for field in ("chunk_index", "file_index", "from_timestamp"):
        name = f"videos/{WRIST}/{field}"
        values = [None if i == 3 else v for i, v in enumerate(table[name].to_pylist())]
        column = pa.array(values, pa.float64() if field == "from_timestamp" else kind)
        if kind == pa.float64():
            column = column.fill_null(float("nan"))
        set_column(copy / EPISODES, name, column)
    dataset = open_dataset(copy)
    assert np.argwhere(~dataset.present).tolist() == [[3, 1]]
    with pytest.raises(MissingFileError, match=f"camera '{WRIST}': episode 3 has no video"):
        dataset.frames(3, WRIST)
    for i in (2, 4):
        assert len(dataset.frames(i, WRIST)) == LENGTHS[i]


def test_pictures_named_by_path_are_read_from_images(copy, episodes):
    cells = []
    for i, episode in enumerate(episodes):
        for step, picture in enumerate(episode.frames[FRONT]):
            name = f"observation.images.top/episode_{i:06d}/frame_{step:06d}.png"
            path = copy / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(picture))
            there = (f"images/{name}", name, f"/home/somebody/set/images/{name}")[i % 3]
            cells.append({"bytes": None, "path": there})
    camera = stored_in_parquet(copy, cells)
    dataset = open_dataset(copy)
    assert dataset.present.all()
    for i, episode in enumerate(episodes):
        np.testing.assert_array_equal(dataset.frames(i, camera), episode.frames[FRONT])
    path.unlink()
    with pytest.raises(DatasetError, match=r"row 7.*frame_000007\.png.*not in"):
        dataset.frames(5, camera)


def test_episodes_without_pictures_in_the_parquet_lack_the_camera(copy, episodes):
    cells = [
        None if i == 2 else {"bytes": png(picture), "path": None}
        for i, episode in enumerate(episodes)
        for picture in episode.frames[FRONT]
    ]
    camera = stored_in_parquet(copy, cells)
    dataset = open_dataset(copy)
    assert np.argwhere(~dataset.present).tolist() == [[2, 2]]
    np.testing.assert_array_equal(dataset.frames(3, camera), episodes[3].frames[FRONT])


def test_a_damaged_picture_is_named(copy, episodes):
    cells = [{"bytes": png(p), "path": "frame.png"} for e in episodes for p in e.frames[FRONT]]
    cells[9]["bytes"] = cells[9]["bytes"][:100]
    camera = stored_in_parquet(copy, cells)
    with pytest.raises(
        DatasetError, match=r"file-000\.parquet.*row 2 of the episode holds no read"
    ):
        open_dataset(copy).frames(1, camera)


def test_nested_and_wide_columns_and_long_strings_are_read(copy):
    rng, rows = np.random.default_rng(0), sum(LENGTHS)
    nested = rng.normal(size=(rows, 2, 3, 4)).astype(np.float32)
    double = rng.normal(size=(rows, 3))
    add_feature(
        copy, "tactile", pa.array(nested.tolist(), pa.list_(pa.list_(pa.list_(pa.float32())))),
        {"dtype": "float32", "shape": [2, 3, 4], "names": None},
    )  # fmt: skip
    add_feature(
        copy, "torque", pa.array(double.tolist(), pa.large_list(pa.float64())),
        {"dtype": "float64", "shape": [3], "names": {"motors": ["a", "b", "c"]}},
    )  # fmt: skip
    add_feature(
        copy, "note", pa.array([f"frame {k}" for k in range(rows)], pa.large_string()),
        {"dtype": "string", "shape": [1], "names": None},
    )  # fmt: skip
    dataset = open_dataset(copy)
    np.testing.assert_array_equal(dataset.column("tactile"), nested)
    np.testing.assert_array_equal(dataset.column("torque"), double)
    assert dataset.column("torque").dtype == np.float64
    assert dataset.column("note")[20, 0] == "frame 20"


def test_features_of_unknown_kinds_need_no_shape(copy, episodes):
    def edit(info):
        info["features"]["language"] = {"dtype": "language_events"}

    edit_info(copy, edit)
    assert_same_episodes(open_dataset(copy), episodes[:2] + episodes[2:])


def test_the_height_and_width_of_pictures_are_told_by_names_not_places():
    hwc = {"shape": [48, 64, 3], "names": ["height", "width", "channels"]}
    chw = {"shape": [3, 48, 64], "names": ["channels", "height", "width"]}
    older = {"shape": [3, 48, 64], "names": None, "video_info": {"video.height": 48}}
    both = {"shape": [1, 1, 3], "names": None, "info": {"video.height": 48, "video.width": 64}}
    assert {picture_shape(feature) for feature in (hwc, chw, older, both)} == {(48, 64)}


def test_templates_and_chunks_are_taken_from_info(copy, episodes):
    (copy / "data").rename(copy / "tables")
    (copy / "tables/chunk-000/file-000.parquet").rename(copy / "tables/chunk-000/0.parquet")
    edit_info(
        copy,
        lambda info: info.update(
            data_path="tables/chunk-{chunk_index:03d}/{file_index}.parquet", chunks_size=1
        ),
    )
    assert_same_episodes(open_dataset(copy), episodes)


def test_lance_storage_is_refused(copy):
    edit_info(copy, lambda info: info.update(storage_format="lance"))
    with pytest.raises(DatasetError, match=r"storage_format: is 'lance', but only parquet is read"):
        open_dataset(copy)


def test_start_times_that_drifted_read_the_nearest_frames(copy, episodes):
    for camera in (FRONT, WRIST):
        name = f"videos/{camera}/from_timestamp"
        times = pq.read_table(copy / EPISODES)[name].to_numpy()
        drift = np.linspace(0, 1.5e-2, len(times))
        set_column(copy / EPISODES, name, times + drift * np.array([1, -1] * 3))
    assert_same_episodes(open_dataset(copy), episodes)


def test_a_video_shorter_than_the_metadata_tells_is_an_error(copy):
    table = pq.read_table(copy / EPISODES)
    longer = table["length"].to_numpy() + np.array([0, 0, 0, 0, 0, 3])
    set_column(copy / EPISODES, "length", longer)
    with pytest.raises(DatasetError, match=r"file-000\.mp4, frame 53: cannot be decoded"):
        open_dataset(copy).frames(5, FRONT)


def test_bookkeeping_can_be_streamed_though_no_feature_declares_it(copy):
    edit_info(copy, lambda info: [info["features"].pop(name) for name in BOOKKEEPING])
    (block,) = open_dataset(copy).stream(["index"])
    assert block["index"].tolist() == list(range(sum(LENGTHS)))


def test_long_datasets_are_streamed_in_bounded_blocks(tmp_path):
    """Row groups of an episode each, as LeRobot writes them, are read together up to a limit."""
    path = write(tmp_path / "d", [make_episode(0, 3), make_episode(1, 4)])
    table = pq.read_table(path / PARQUET)
    lengths = np.full(40, 3000)
    rows = {name: table[name].take(np.zeros(lengths.sum(), int)) for name in table.column_names}
    rows["episode_index"] = np.repeat(np.arange(40), lengths)
    rows["frame_index"] = np.tile(np.arange(3000), 40)
    pq.write_table(pa.table(rows), path / PARQUET, row_group_size=3000)
    listed = pq.read_table(path / EPISODES).take(np.zeros(40, int))
    pq.write_table(listed, path / EPISODES)
    set_column(path / EPISODES, "episode_index", np.arange(40))
    set_column(path / EPISODES, "length", lengths)
    sizes = [len(block["action"]) for block in open_dataset(path).stream(["action"])]
    assert sizes == [63000, 57000]
