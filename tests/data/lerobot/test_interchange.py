"""LeRobot 0.4.4 and Chiliad read each other's datasets, frame for frame.

LeRobot does not run here: tests/fixtures/lerobot holds datasets that it wrote, one that we wrote,
and what its reader returned for each of them (how they were made: make.py there).
"""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.statistics import stats
from tests.fixtures.lerobot.episodes import CAMERAS, LENGTHS, episodes
from tests.fixtures.lerobot.ours import FIXTURES, record, upgraded

OURS = FIXTURES / "chiliad"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset as today's writer writes it."""
    root = tmp_path_factory.mktemp("lerobot") / "chiliad"
    record(root)
    return root


@pytest.mark.parametrize("name", ["lerobot_av1", "lerobot_h264", "lerobot_png"])
def test_reads_what_lerobot_wrote_frame_for_frame(name: str) -> None:
    assert_same_frames(FIXTURES / name, lerobot_reads(name))


@pytest.mark.parametrize("name", ["chiliad", "upgraded"])
def test_lerobot_reads_what_we_wrote_frame_for_frame(name: str) -> None:
    assert_same_frames(FIXTURES / name, lerobot_reads(name))


def test_lerobot_reads_the_values_that_todays_writer_is_given(fresh: Path) -> None:
    theirs, dataset = lerobot_reads("chiliad"), open_dataset(fresh)
    given = list(episodes())
    for name in given[0][0]:
        values = np.concatenate([columns[name] for columns, _, _ in given])
        np.testing.assert_array_equal(theirs[name].reshape(values.shape), values)
        np.testing.assert_array_equal(dataset.column(name), values)
    np.testing.assert_array_equal(theirs["task"], np.repeat([task for *_, task in given], LENGTHS))
    for camera in CAMERAS:
        seen = np.concatenate([dataset.frames(i, camera) for i in range(len(LENGTHS))])
        apart = np.abs(seen.astype(float) - theirs[camera]).mean(axis=(1, 2, 3))
        misplaced = np.abs(np.diff(seen.astype(float), axis=0)).mean(axis=(1, 2, 3))
        assert apart.max() < 0.2 * misplaced.min()


def test_todays_writer_lays_out_the_dataset_that_lerobot_read(fresh: Path) -> None:
    assert layout(fresh) == layout(OURS), "remake the fixture: tests/fixtures/lerobot/make.py"


def test_todays_upgrade_makes_the_dataset_that_lerobot_read(tmp_path: Path) -> None:
    upgraded(tmp_path / "upgraded")
    assert layout(tmp_path / "upgraded") == layout(FIXTURES / "upgraded"), "remake the fixture"


def test_lerobot_cuts_action_chunks_where_our_episodes_end() -> None:
    theirs, actions = lerobot_reads("chiliad"), open_dataset(OURS).column("action")
    horizon = theirs["chunk/action"].shape[1]
    steps = np.arange(len(actions))[:, None] + np.arange(horizon)
    end = np.repeat(np.cumsum(LENGTHS), LENGTHS)[:, None]
    np.testing.assert_array_equal(theirs["chunk/pad"], steps >= end)
    np.testing.assert_array_equal(theirs["chunk/action"], actions[np.minimum(steps, end - 1)])


def test_lerobot_reads_our_statistics_under_the_names_it_gives_its_own() -> None:
    theirs, own = lerobot_reads("chiliad"), lerobot_reads("lerobot_h264")
    shapes = [{k: v.shape for k, v in f.items() if k.startswith("stats/")} for f in (theirs, own)]
    assert shapes[0] == shapes[1]
    for feature, values in stats.compute(open_dataset(OURS)).items():
        for name, value in values.items():
            np.testing.assert_allclose(theirs[f"stats/{feature}/{name}"], value, rtol=1e-6)


def test_writes_the_columns_types_and_fields_that_lerobot_writes() -> None:
    ours, theirs = layout(OURS), layout(FIXTURES / "lerobot_h264")
    data, meta = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
    assert ours[data]["columns"] == theirs[data]["columns"]
    assert ours[meta]["columns"] == theirs[meta]["columns"]
    assert ours["meta/tasks.parquet"] == theirs["meta/tasks.parquet"]
    limits = dict.fromkeys(("data_files_size_in_mb", "video_files_size_in_mb"))
    assert ours["meta/info.json"] | limits == theirs["meta/info.json"] | limits
    assert ours["meta/stats.json"] == theirs["meta/stats.json"]
    video = "videos/observation.images.front/chunk-000/file-000.mp4"
    streams = [{k: v for k, v in d[video].items() if k != "keyframes"} for d in (ours, theirs)]
    assert streams[0] == streams[1], "LeRobot cannot join such videos with its own"


def lerobot_reads(name: str) -> dict[str, np.ndarray]:
    """Arrays [N, …] that LeRobot's reader returned for a fixture (make.py says which)."""
    return dict(np.load(FIXTURES / f"{name}.npz"))


def assert_same_frames(root: Path, theirs: dict[str, np.ndarray]) -> None:
    """All that our reader returns is bit for bit what LeRobot's reader returned, and as much."""
    dataset = open_dataset(root)
    assert dataset.lengths.tolist() == theirs["lengths"].tolist() == list(LENGTHS)
    assert set(dataset.cameras) == set(CAMERAS)
    ends = np.cumsum(dataset.lengths)
    for i, end in enumerate(ends):
        episode = dataset.episode(i)
        assert set(episode) == {k for k in theirs if "/" not in k} - {"lengths"}
        for name, values in episode.items():
            expected = theirs[name][end - dataset.lengths[i] : end]
            if name == "task":
                assert set(expected) == {values}
                continue
            assert values.dtype == expected.dtype, name
            np.testing.assert_array_equal(values, expected.reshape(values.shape), err_msg=name)


def layout(root: Path) -> dict[str, Any]:
    """Parts of each file of a dataset that a reader depends on, by the file's relative path."""
    describe = {".parquet": _parquet, ".json": _json, ".mp4": _video}
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): describe[path.suffix](path) for path in files}


def _parquet(path: Path) -> dict[str, Any]:
    file = pq.ParquetFile(path)
    schema, metadata = file.schema_arrow, file.schema_arrow.metadata or {}
    groups = range(file.metadata.num_row_groups)
    return {
        "columns": {f.name: str(f.type).replace("large_string", "string") for f in schema},
        "rows": [file.metadata.row_group(group).num_rows for group in groups],
        "index": json.loads(metadata.get(b"pandas", b"{}")).get("index_columns"),
    }


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if path.name == "info.json":
        return content
    return {f: {k: np.shape(v) for k, v in values.items()} for f, values in content.items()}


def _video(path: Path) -> dict[str, Any]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.pts is not None]
        return {
            "codec": stream.codec_context.name,
            "format": stream.format.name,
            "size": (stream.height, stream.width),
            "rate": stream.average_rate,
            "delay": (packets[0].pts - packets[0].dts) * stream.time_base,
            "keyframes": [(p.pts * p.time_base, p.is_keyframe) for p in packets],
        }
