import io
import json
from itertools import product
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data import open_dataset
from data.errors import DatasetError
from data.video.seek import SeekTable
from tests.helpers.data.recording import (
    EPISODES,
    FRONT,
    LENGTHS,
    PARQUET,
    TASKS,
    WRIST,
    assert_same_episodes,
    psnr,
    write,
)

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lerobot"


def test_written_episodes_read_back_frame_for_frame(recorded, episodes):
    dataset = open_dataset(recorded)
    assert dataset.num_episodes == len(LENGTHS)
    assert dataset.num_frames == sum(LENGTHS)
    assert dataset.cameras == (FRONT, WRIST)
    assert dataset.fps == 20
    assert dataset.lengths.dtype == np.int64
    assert dataset.lengths.tolist() == list(LENGTHS)
    assert sorted(dataset.tasks.values()) == sorted(TASKS)
    assert_same_episodes(dataset, episodes)


def test_episodes_are_found_in_several_files_and_in_any_order(tmp_path, episodes):
    path = write(tmp_path / "split", episodes, data_megabytes=0.001, video_megabytes=0.004)
    assert len(list(path.glob("data/*/*.parquet"))) > 2
    assert len(list(path.glob(f"videos/{WRIST}/*/*.mp4"))) > 1
    dataset = open_dataset(path)
    for i in reversed(range(len(episodes))):
        assert_same_episodes_at(dataset, i, episodes[i])


def assert_same_episodes_at(dataset, i, episode):
    assert np.array_equal(dataset.columns(i)["action"], episode.columns["action"])
    assert psnr(dataset.frames(i, FRONT), episode.frames[FRONT]) > 32


def test_wrong_data_file_index_is_not_trusted(copy, episodes):
    table = pq.read_table(copy / EPISODES)
    wrong = pa.array([7] * len(episodes), pa.int64())
    at = table.column_names.index("data/file_index")
    pq.write_table(table.set_column(at, "data/file_index", wrong), copy / EPISODES)
    assert_same_episodes(open_dataset(copy), episodes)


def test_rows_in_another_order_are_sorted(copy, episodes):
    table = pq.read_table(copy / PARQUET)
    order = np.random.default_rng(0).permutation(len(table))
    pq.write_table(table.take(order), copy / PARQUET)
    assert_same_episodes(open_dataset(copy), episodes)


def test_vectors_stored_as_plain_lists_are_the_same(copy, episodes):
    table = pq.read_table(copy / PARQUET)
    for name in ("observation.state", "action"):
        at = table.column_names.index(name)
        plain = pa.array(table[name].to_pylist(), pa.list_(pa.float32()))
        table = table.set_column(at, name, plain)
    pq.write_table(table, copy / PARQUET)
    assert_same_episodes(open_dataset(copy), episodes)


def test_unknown_keys_and_other_forms_of_names_are_ignored(copy, episodes):
    path = copy / "meta/info.json"
    info = json.loads(path.read_text())
    info["storage_format"] = "parquet"
    info["features"]["action"] |= {"fps": 20, "names": {"motors": ["a", "b", "c"]}}
    info["features"][WRIST] |= {"shape": [3, 48, 48], "names": ["c", "h", "w"]}
    info["features"]["language_events"] = {"dtype": "language", "shape": [1], "names": None}
    path.write_text(json.dumps(info))
    assert_same_episodes(open_dataset(copy), episodes)


def test_task_text_may_be_a_column_named_task(copy, episodes):
    path = copy / "meta/tasks.parquet"
    table = pq.read_table(path).rename_columns(["task_index", "task"])
    pq.write_table(table.replace_schema_metadata(None), path)
    assert open_dataset(copy).task(1) == episodes[1].task


def test_pictures_stored_in_the_parquet_are_read(copy, tmp_path, episodes):
    def png(picture):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    table = pq.read_table(copy / PARQUET)
    pictures = [png(p) for episode in episodes for p in episode.frames[FRONT]]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = table.append_column(FRONT, pa.array(pictures, kind))
    pq.write_table(table, copy / PARQUET, row_group_size=10)
    path = copy / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][FRONT]["dtype"] = "image"
    path.write_text(json.dumps(info))
    dataset = open_dataset(copy)
    for i, episode in enumerate(episodes):
        assert np.array_equal(dataset.frames(i, FRONT), episode.frames[FRONT])


@pytest.mark.parametrize("name", ["chiliad", "lerobot_av1", "lerobot_h264", "lerobot_png"])
def test_some_frames_are_those_of_the_whole_episode(name):
    dataset = open_dataset(FIXTURES / name)
    for i, camera in product(range(dataset.num_episodes), dataset.cameras):
        whole, last = dataset.frames(i, camera), int(dataset.lengths[i]) - 1
        for at in ([last], [0, last], [last, 0, last // 2, 0], [], list(range(last + 1))):
            chosen = dataset.frames_at(i, camera, np.array(at, np.int64))
            assert chosen.dtype == np.uint8
            np.testing.assert_array_equal(chosen, whole[at] if at else chosen[:0])


def test_frames_between_those_asked_for_are_not_decoded(recorded, monkeypatch):
    dataset, read = open_dataset(recorded), []
    packet = SeekTable._packet
    monkeypatch.setattr(SeekTable, "_packet", lambda t, k: read.append(k) or packet(t, k))
    longest = int(dataset.lengths.argmax())
    dataset.frames_at(longest, FRONT, np.array([1, dataset.lengths[longest] - 1]))
    assert 2 <= len(read) <= 4, "our groups have two pictures"


def test_a_frame_of_the_next_episode_is_refused(recorded):
    dataset = open_dataset(recorded)
    for at in (-1, dataset.lengths[0]):
        with pytest.raises(
            IndexError, match=rf"episode 0 has {LENGTHS[0]} frames; of frames {at} to"
        ):
            dataset.frames_at(0, WRIST, np.array([at]))


def test_some_frames_of_a_video_that_is_no_mp4_are_read_from_its_beginning(copy):
    dataset = open_dataset(copy)
    path, _ = dataset.video(2, FRONT)
    expected = dataset.frames(2, FRONT)[[3, 1]]
    with av.open(str(path)) as source, av.open(str(copy / "a.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    path.write_bytes((copy / "a.mkv").read_bytes())
    again = open_dataset(copy).frames_at(2, FRONT, np.array([3, 1]))
    np.testing.assert_array_equal(again, expected)


def test_another_version_is_refused_by_its_name(copy):
    path = copy / "meta/info.json"
    path.write_text(path.read_text().replace("v3.0", "v1.6"))
    with pytest.raises(DatasetError, match=r"info\.json, codebase_version: is 'v1\.6'"):
        open_dataset(copy)


def test_a_recording_of_lerobot_reads_frame_for_frame(metaworld):
    dataset = open_dataset(metaworld)
    assert dataset.num_episodes == 30
    assert dataset.num_frames == 2071
    assert len(dataset.tasks) == 5
    for camera in dataset.cameras:
        path, _ = dataset.video(0, camera)
        with av.open(str(path)) as container:
            every = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
        ends = np.cumsum(dataset.lengths)
        for i in (29, 0, 13):
            expected = every[ends[i] - dataset.lengths[i] : ends[i]]
            assert np.abs(dataset.frames(i, camera).astype(int) - expected).max() <= 2


@pytest.mark.parametrize("template", ["", "/data/file-{file_index}.parquet", "{no}", 3])
def test_a_template_that_names_no_file_of_the_dataset_is_refused(copy, template):
    info = json.loads((copy / "meta/info.json").read_text()) | {"data_path": template}
    (copy / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(
        DatasetError, match=r"info.json, data_path: is .*, expected a template with"
    ):
        open_dataset(copy).column("action")
