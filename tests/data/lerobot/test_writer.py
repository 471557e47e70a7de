import json
import shutil

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit
from data.lerobot.upgrade import upgrade
from data.lerobot.writer import DatasetWriter
from data.video.encoding import VideoEncoding
from tests.helpers.data.recording import FEATURES, FRONT, WRIST, make_episode, psnr, write
from tests.helpers.data.v21 import write_v21

STATS = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")


def test_the_layout_is_lerobots(recorded, episodes):
    files = {str(p.relative_to(recorded)) for p in recorded.rglob("*") if p.is_file()}
    assert files == {
        "meta/checksums.json",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        f"videos/{FRONT}/chunk-000/file-000.mp4",
        f"videos/{WRIST}/chunk-000/file-000.mp4",
    }
    data = pq.ParquetFile(recorded / "data/chunk-000/file-000.parquet")
    assert data.num_row_groups == len(episodes)
    types = {field.name: str(field.type) for field in data.schema_arrow}
    assert types == {
        "observation.state": "fixed_size_list<element: float>[4]",
        "action": "fixed_size_list<element: float>[3]",
        "next.success": "bool",
        "timestamp": "float",
        "frame_index": "int64",
        "episode_index": "int64",
        "index": "int64",
        "task_index": "int64",
    }
    tasks = pq.read_schema(recorded / "meta/tasks.parquet")
    assert tasks.names == ["task_index", "__index_level_0__"]
    assert json.loads(tasks.metadata[b"pandas"])["index_columns"] == ["__index_level_0__"]


def test_episode_metadata_has_every_column_of_a_recording_of_lerobot(recorded, metaworld):
    name = "meta/episodes/chunk-000/file-000.parquet"
    ours, theirs = pq.read_schema(recorded / name), pq.read_schema(metaworld / name)

    def types(schema, cameras, features):
        names = {c: f"camera{i}" for i, c in enumerate(cameras)}
        found = {}
        for field in schema:
            kind, _, rest = field.name.partition("/")
            feature = rest.partition("/")[0]
            if kind == "stats" and feature not in features and feature not in names:
                continue
            text = field.name.replace(feature, names.get(feature, feature))
            found[text] = str(field.type)
        return found

    shared = ("observation.state", "action", "timestamp", "index", "task_index")
    corner, wrist = "observation.images.corner", "observation.images.wrist"
    assert types(ours, (FRONT, WRIST), shared) == types(theirs, (corner, wrist), shared)


def test_info_counts_and_video_ranges_are_right(recorded, episodes):
    info = json.loads((recorded / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert info["total_episodes"] == len(episodes)
    assert info["total_frames"] == sum(len(e.columns["action"]) for e in episodes)
    assert info["splits"] == {"train": f"0:{len(episodes)}"}
    assert info["features"][FRONT]["info"]["video.codec"] == "h264"
    table = pq.read_table(recorded / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    ends = np.cumsum(table["length"])
    assert table["dataset_to_index"] == ends.tolist()
    assert table[f"videos/{WRIST}/to_timestamp"] == (ends / 20).tolist()
    assert table["tasks"] == [[episode.task] for episode in episodes]


def test_episode_statistics_are_those_of_the_episode(recorded, episodes):
    table = pq.read_table(recorded / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    for i, (columns, frames, _) in enumerate(episodes):
        action = columns["action"].astype(float)
        expected = [action.min(0), action.max(0), action.mean(0), action.std(0), [len(action)]]
        expected += [np.quantile(action, q, axis=0) for q in (0.01, 0.1, 0.5, 0.9, 0.99)]
        for key, value in zip(STATS, expected, strict=True):
            assert np.allclose(table[f"stats/action/{key}"][i], value)
        pixels = frames[WRIST].reshape(-1, 3) / 255
        for key, value in (
            ("mean", pixels.mean(0)),
            ("std", pixels.std(0)),
            ("max", pixels.max(0)),
        ):
            assert np.allclose(np.ravel(table[f"stats/{WRIST}/{key}"][i]), value)


def test_a_recording_that_fails_before_an_episode_is_finished_leaves_nothing(tmp_path):
    def record():
        with DatasetWriter(tmp_path / "a", fps=20, features=FEATURES):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        record()
    assert list(tmp_path.iterdir()) == []


def test_videos_are_encoded_as_asked(tmp_path, episodes):
    found = {}
    for encoding in (VideoEncoding(), VideoEncoding("h264", 35), VideoEncoding("av1", 30)):
        path = tmp_path / f"{encoding.codec}{encoding.crf}"
        with DatasetWriter(path, fps=20, features=FEATURES, encoding=encoding) as writer:
            writer.add_episode(*episodes[1])
        (file,) = (path / f"videos/{FRONT}").glob("*/*.mp4")
        with av.open(str(file)) as container:
            assert container.streams.video[0].codec_context.name in (encoding.codec, "libdav1d")
        dataset = open_dataset(path)
        assert dataset.features[FRONT]["info"]["video.codec"] == encoding.codec
        assert psnr(dataset.frames(0, FRONT), episodes[1].frames[FRONT]) > 30
        found[encoding] = file.stat().st_size
    assert found[VideoEncoding("h264", 35)] < found[VideoEncoding()]


def test_what_a_killed_recording_left_is_replaced(tmp_path, episodes):
    (tmp_path / "a.partial/videos").mkdir(parents=True)
    write(tmp_path / "a", episodes[:1])
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def edit_interrupted(source, out):
    """Files of an edit into `out` that was interrupted."""

    def interrupt(done, total):
        if done > total * 2 // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        edit_dataset([source], out, Edit(delete=(0,)), progress=interrupt)
    partial = out.with_name(out.name + ".partial")
    return {p: p.read_bytes() for p in partial.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "make",
    [lambda old, out: DatasetWriter(out, fps=20, features=FEATURES), upgrade],
    ids=["record", "upgrade"],
)
def test_what_an_edit_has_begun_is_not_lost_to_another_command(make, recorded, episodes, tmp_path):
    begun = edit_interrupted(recorded, tmp_path / "a")
    v21 = write_v21(tmp_path / "v21", episodes[:1], FEATURES, 20)
    with pytest.raises(
        ValueError, match=r"a\.partial: is in the way and holds the unfinished work"
    ):
        make(v21, tmp_path / "a")
    assert begun == {path: path.read_bytes() for path in begun}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.partial", "v21"]
    edit_dataset([recorded], tmp_path / "a", Edit(delete=(0,)))
    assert open_dataset(tmp_path / "a").num_episodes == 5


def test_an_edit_that_begins_while_its_place_is_recorded_is_not_lost(recorded, episodes, tmp_path):
    def record():
        with DatasetWriter(tmp_path / "a", fps=20, features=FEATURES) as writer:
            for episode in episodes[:3]:
                writer.add_episode(*episode)
            begun.update(edit_interrupted(tmp_path / "a", tmp_path / "a"))

    begun = {}
    with pytest.raises(
        ValueError, match=r"a\.partial: is in the way and holds the unfinished work"
    ):
        record()
    assert begun
    assert begun == {path: path.read_bytes() for path in begun}
    with (
        pytest.raises(ValueError, match=r"a\.partial: is in the way"),
        DatasetWriter(tmp_path / "a", fps=20, features=FEATURES, resume=True),
    ):
        pass
    shutil.rmtree(tmp_path / "a.partial")
    with DatasetWriter(tmp_path / "a", fps=20, features=FEATURES, resume=True):
        pass
    assert open_dataset(tmp_path / "a").num_episodes == 3


def test_a_dataset_that_is_called_partial_is_not_removed(episodes, tmp_path):
    before = write(tmp_path / "a.partial", episodes[:1])
    with pytest.raises(ValueError, match=r"a\.partial: is in the way"):
        write(tmp_path / "a", episodes[:1])
    assert open_dataset(before).num_episodes == 1


def test_an_existing_dataset_is_not_overwritten(recorded):
    with pytest.raises(ValueError, match="already exists and is not empty"):
        DatasetWriter(recorded, fps=20, features=FEATURES)


def test_a_recording_without_episodes_is_no_dataset(tmp_path):
    with (
        pytest.raises(ValueError, match="no episode was added"),
        DatasetWriter(tmp_path / "a", fps=20, features=FEATURES),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, f: c["action"].__setitem__((3, 1), np.nan),
            "Episode 1, column 'action', step 3",
        ),
        (
            lambda c, f: c["action"].__setitem__((0, 0), np.inf),
            "Episode 1, column 'action', step 0",
        ),
        (lambda c, f: c.update(action=c["action"][:, :2]), r"column 'action': shape is \(8, 2\)"),
        (lambda c, f: c.update(action=np.full((8, 3), "a")), "column 'action': type is <U1"),
        (lambda c, f: c.pop("action"), "Episode 1 has columns"),
        (lambda c, f: f.pop(WRIST), "Episode 1 has cameras"),
        (lambda c, f: f.update({WRIST: f[WRIST][:5]}), f"camera '{WRIST}': frames are uint8"),
        (lambda c, f: f.update({WRIST: list(f[WRIST])}), f"'{WRIST}': frames are list, expected"),
    ],
)
def test_a_bad_episode_is_refused_and_the_rest_is_kept(tmp_path, change, message):
    good, bad = make_episode(0, 6), make_episode(1, 8)
    with DatasetWriter(tmp_path / "a", fps=20, features=FEATURES) as writer:
        writer.add_episode(*good)
        change(bad.columns, bad.frames)
        with pytest.raises(ValueError, match=message):
            writer.add_episode(*bad)
    info = json.loads((tmp_path / "a/meta/info.json").read_text())
    assert info["total_frames"] == 6


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"dtype": "video", "shape": (47, 48, 3)}, "even height and width"),
        ({"dtype": "float32", "shape": (2, 2)}, r"a shape \(n,\)"),
        ({"dtype": "image", "shape": (48, 48, 3)}, "dtype 'image'"),
        ({"dtype": "float32"}, "give its dtype and its shape"),
        ({"dtype": "float32", "shape": 3}, "give its dtype and its shape"),
        (3, "Feature 'x' is 3; give its dtype"),
    ],
)
def test_a_feature_that_cannot_be_written_is_refused(tmp_path, feature, message):
    with pytest.raises(ValueError, match=message):
        DatasetWriter(tmp_path / "a", fps=20, features={"x": feature})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        *(({"fps": fps}, "fps is .*; give a whole number") for fps in (0, -1, np.nan, 29.97, "30")),
        ({"features": {}}, "The features are empty"),
        ({"encoding": "av1"}, "encoding is 'av1'; give a VideoEncoding"),
    ],
)
def test_an_option_that_makes_no_dataset_is_refused_at_once(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        DatasetWriter(tmp_path / "a", **{"fps": 20, "features": FEATURES} | option)
    assert list(tmp_path.iterdir()) == []


def test_a_robot_that_no_reader_takes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Robot 'arm/left' cannot be used as a file name"):
        DatasetWriter(tmp_path / "a", fps=20, features=FEATURES, robot_type="arm/left")
    assert list(tmp_path.iterdir()) == []


def test_an_integer_that_statistics_cannot_hold_is_refused(tmp_path):
    features = {"action": {"dtype": "uint64", "shape": (1,), "names": None}}
    with (
        pytest.raises(ValueError, match="'action': 9223372036854775808 does not fit the statist"),
        DatasetWriter(tmp_path / "a", fps=20, features=features) as writer,
    ):
        writer.add_episode({"action": np.full((3, 1), 2**63, np.uint64)}, {}, "x")


@pytest.mark.parametrize("wide", [70_000, -(2**40)])
def test_an_integer_that_its_column_cannot_hold_is_refused_and_not_wrapped(tmp_path, wide):
    features = {"action": {"dtype": "int16", "shape": (2,)}}
    with DatasetWriter(tmp_path / "a", fps=20, features=features) as writer:
        writer.add_episode({"action": np.array([[1, -32_768], [2, 32_767]])}, {}, "x")
        with pytest.raises(
            ValueError,
            match=rf"Episode 1, column 'action', step 1: value \[4, {wide}\] does not fit int16",
        ):
            writer.add_episode({"action": np.array([[3, 0], [4, wide]])}, {}, "x")
    assert open_dataset(tmp_path / "a").column("action").tolist() == [[1, -32_768], [2, 32_767]]


def test_a_long_episode_counts_in_a_cameras_statistics_by_its_frames(tmp_path):
    camera = "observation.images.top"
    features = {
        "action": {"dtype": "float32", "shape": (1,)},
        camera: {"dtype": "video", "shape": (16, 16, 3)},
    }
    with DatasetWriter(tmp_path / "a", fps=20, features=features) as writer:
        for length, level in ((1000, 255), (100, 0), (50, 51)):
            frames = np.full((length, 16, 16, 3), level, np.uint8)
            writer.add_episode({"action": np.zeros((length, 1), np.float32)}, {camera: frames}, "x")
    found = json.loads((tmp_path / "a/meta/stats.json").read_text())[camera]
    assert found["count"] == [1150]
    np.testing.assert_allclose(np.ravel(found["mean"]), (1000 + 50 * 0.2) / 1150)
    assert np.ravel(found["q10"]).tolist() == [0.2] * 3
