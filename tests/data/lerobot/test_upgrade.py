import json
import resource
import shutil
from itertools import cycle

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.errors import DatasetError
from data.lerobot.upgrade import upgrade
from data.validation.validate import validate
from tests.helpers.data.pictures import encode, png
from tests.helpers.data.recording import FEATURES, FRONT, LENGTHS, SHARED, WRIST
from tests.helpers.data.v21 import edit_lines, parquet, video, write_v21

ENCODERS = (
    ("libx264", {"g": "10", "x264-params": "bframes=3:log-level=none"}),
    ("libx265", {"x265-params": "keyint=5:open-gop=1:bframes=3:pools=1:log-level=none"}),
    ("libsvtav1", {"g": "2", "svtav1-params": "lp=1"}),
)


@pytest.fixture
def old(tmp_path, episodes):
    return write_v21(tmp_path / "old", episodes, FEATURES, 20)


def assert_same(new, old):
    """All that is read is the same, bit for bit."""
    assert new.info["codebase_version"] == "v3.0"
    assert new.cameras == old.cameras
    assert new.lengths.tolist() == old.lengths.tolist()
    assert new.episode_numbers.tolist() == list(range(old.num_episodes))
    np.testing.assert_array_equal(new.present, old.present)
    for name in set(old.column_names) - {"episode_index", "index", "task_index"}:
        np.testing.assert_array_equal(new.column(name), old.column(name), err_msg=name)
    np.testing.assert_array_equal(new.column("index"), np.arange(old.num_frames))
    for i in range(old.num_episodes):
        assert new.task(i) == old.task(i)
        assert new.instructions(i) == old.instructions(i)
        for camera in np.array(old.cameras)[old.present[i]]:
            np.testing.assert_array_equal(new.frames(i, camera), old.frames(i, camera))


def packets(path):
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def test_an_upgraded_dataset_is_the_old_one_bit_for_bit(old, tmp_path):
    told = []
    new = upgrade(old, tmp_path / "new", progress=lambda *done: told.append(done))
    assert_same(new, open_dataset(old))
    assert told[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert len(told) == len(LENGTHS)
    file = pq.ParquetFile(tmp_path / "new/data/chunk-000/file-000.parquet")
    rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert rows == list(LENGTHS)
    assert validate(tmp_path / "new") == []


def test_files_of_others_in_meta_are_taken_along(old, tmp_path):
    parts = {"video": {"wrist": {"original_key": WRIST}, "front": {"original_key": FRONT}}}
    (old / "meta/modality.json").write_text(json.dumps(parts))
    (old / "meta/notes.txt").write_text("by hand")
    (old / "meta/stats_gr00t.json").write_text("of the old frames")
    upgrade(old, tmp_path / "new")
    meta = tmp_path / "new/meta"
    assert json.loads((meta / "modality.json").read_text()) == parts
    assert (meta / "notes.txt").read_text() == "by hand"
    assert {path.name for path in meta.iterdir()} == {
        *("info.json", "stats.json", "tasks.parquet", "checksums.json", "episodes"),
        *("modality.json", "notes.txt"),
    }
    assert validate(tmp_path / "new") == []


def test_no_frame_is_encoded_again(old, tmp_path):
    before = [packets(old / video(FRONT, i)) for i in range(len(LENGTHS))]
    upgrade(old, tmp_path / "new")
    (file,) = (tmp_path / f"new/videos/{FRONT}").rglob("*.mp4")
    assert packets(file) == [packet for episode in before for packet in episode]


def test_episodes_begin_at_whole_frames(old, tmp_path):
    upgrade(old, tmp_path / "new")
    table = pq.read_table(tmp_path / "new/meta/episodes/chunk-000/file-000.parquet")
    ends = np.cumsum(LENGTHS)
    for camera in (FRONT, WRIST):
        starts = table[f"videos/{camera}/from_timestamp"].to_numpy()
        assert starts.tolist() == ((ends - LENGTHS) / 20).tolist()
        np.testing.assert_allclose(table[f"videos/{camera}/to_timestamp"], ends / 20)


def test_files_end_at_the_limit_of_size(old, tmp_path):
    new = upgrade(old, tmp_path / "new", data_megabytes=0.001, video_megabytes=0.004)
    assert new.metadata.num_data_files > 2
    assert len(list((tmp_path / f"new/videos/{WRIST}").rglob("*.mp4"))) > 1
    assert_same(new, open_dataset(old))


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda e: e[0])
def test_every_codec_is_joined_as_it_is(old, episodes, tmp_path, encoder):
    for i, episode in enumerate(episodes):
        encode(old / video(FRONT, i), episode.frames[FRONT], *encoder)
    new = upgrade(old, tmp_path / "new")
    assert len(list((tmp_path / f"new/videos/{FRONT}").rglob("*.mp4"))) == 1
    assert_same(new, open_dataset(old))


def test_a_new_file_begins_where_the_codec_changes(old, episodes, tmp_path):
    for i, (episode, encoder) in enumerate(zip(episodes, cycle(ENCODERS), strict=False)):
        encode(old / video(FRONT, i), episode.frames[FRONT], *encoder)
    new = upgrade(old, tmp_path / "new")
    assert len(list((tmp_path / f"new/videos/{FRONT}").rglob("*.mp4"))) == len(episodes)
    assert_same(new, open_dataset(old))


def test_videos_longer_than_their_episodes_do_not_shift_the_next(old, episodes, tmp_path):
    frames = episodes[4].frames[FRONT]
    encode(old / video(FRONT, 2), frames, *ENCODERS[0])
    for i in (1, 3):
        encode(old / video(FRONT, i), episodes[i].frames[FRONT], *ENCODERS[0])
    assert_same(upgrade(old, tmp_path / "new"), open_dataset(old))


def test_gaps_absent_cameras_and_other_wordings_survive(old, episodes, tmp_path):
    (old / video(WRIST, 0)).unlink()
    (old / video(WRIST, 2)).unlink()
    tasks = {1: ["reach the green block", "touch it"], 3: ["lift the red block", "up", "push it"]}
    edit_lines(
        old / "meta/episodes.jsonl",
        lambda rows: [
            r | {"tasks": tasks.get(r["episode_index"], r["tasks"])}
            for r in rows
            if r["episode_index"] != 4
        ],
    )
    sparse = {0: 3, 1: 7, 2: 90}
    edit_lines(
        old / "meta/tasks.jsonl",
        lambda rows: [r | {"task_index": sparse[r["task_index"]]} for r in rows],
    )
    for i in range(len(episodes)):
        table = pq.read_table(old / parquet(i))
        at = table.column_names.index("task_index")
        index = pa.array([sparse[k] for k in table["task_index"].to_pylist()])
        pq.write_table(table.set_column(at, "task_index", index), old / parquet(i))
    before, new = open_dataset(old), upgrade(old, tmp_path / "new")
    assert_same(new, before)
    assert sorted(new.tasks) == [0, 1, 2]
    assert new.prompts == before.prompts
    for mine, other in zip(new.runs, before.runs, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_cameras_statistics_count_the_frames_that_have_it(old, tmp_path):
    (old / video(WRIST, 0)).unlink()
    upgrade(old, tmp_path / "new")
    found = json.loads((tmp_path / "new/meta/stats.json").read_text())
    assert found[FRONT]["count"] == [sum(LENGTHS)]
    assert found[WRIST]["count"] == [sum(LENGTHS[1:])]


def test_pictures_in_files_are_taken_into_the_parquet(old, episodes, tmp_path):
    camera = "observation.images.top"
    for i, episode in enumerate(episodes):
        cells = []
        for step, picture in enumerate(episode.frames[FRONT]):
            name = f"images/{camera}/episode_{i:06d}/frame_{step:06d}.png"
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            (old / name).write_bytes(png(picture))
            cells.append({"bytes": None, "path": name} if i != 3 else None)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pq.read_table(old / parquet(i)).append_column(camera, pa.array(cells, kind))
        pq.write_table(table, old / parquet(i))
    info = json.loads((old / "meta/info.json").read_text())
    info["features"][camera] = {"dtype": "image", "shape": [48, 64, 3], "names": None}
    (old / "meta/info.json").write_text(json.dumps(info))
    new = upgrade(old, tmp_path / "new")
    shutil.rmtree(old / "images")
    assert np.argwhere(~new.present).tolist() == [[3, 2]]
    for i in (0, 5):
        np.testing.assert_array_equal(new.frames(i, camera), episodes[i].frames[FRONT])


def test_statistics_are_those_of_the_new_dataset(old, recorded, tmp_path):
    """The recording of the same episodes has them from its frames before they were encoded."""
    upgrade(old, tmp_path / "new")
    files = (root / "meta/stats.json" for root in (tmp_path / "new", recorded))
    mine, other = (json.loads(file.read_text()) for file in files)
    assert mine.keys() == other.keys()
    for name, values in other.items():
        pictures = name in (FRONT, WRIST)
        for key in ("mean", "std", "count") if pictures else values:
            np.testing.assert_allclose(
                mine[name][key], values[key], atol=0.02 if pictures else 1e-9
            )


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_upgrade_leaves_nothing(old, tmp_path, error):
    def interrupt(done, total):
        if done > 10:
            raise error

    with pytest.raises(error):
        upgrade(old, tmp_path / "new", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_full_disk_is_not_taken_for_a_damaged_video(old, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*new\.partial/videos"):
            upgrade(old, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def cut_after(path, frames):
    """Cuts the file in the middle of the next one."""
    with av.open(str(path)) as file:
        packets = [packet for packet in file.demux(video=0) if packet.size]
    cut = packets[frames]
    path.write_bytes(path.read_bytes()[: cut.pos + cut.size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: cut_after(p, 1), "frames: holds only 1 intact frames of 5"),
        (lambda p: p.write_bytes(p.read_bytes()[:200]), "file: cannot be copied"),
        (
            lambda p: shutil.copy(p, p.with_name("episode_000003.mp4")),
            "frames: holds only 5 intact frames of 9",
        ),
    ],
)
def test_damaged_videos_stop_it_by_name(old, tmp_path, damage, message):
    damage(old / video(FRONT, 2))
    with pytest.raises(DatasetError, match=rf"episode_00000[23]\.mp4, {message}"):
        upgrade(old, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_what_needs_no_upgrade_or_is_in_the_way_is_said(old, recorded, tmp_path):
    with pytest.raises(ValueError, match=r"is v3\.0 already"):
        upgrade(recorded, tmp_path / "new")
    with pytest.raises(ValueError, match="already exists and is not empty"):
        upgrade(old, old)


@pytest.mark.slow
def test_a_real_dataset_upgrades_bit_for_bit(metaworld, tmp_path):
    old = open_dataset(SHARED / "data/metaworld_v21")
    new = upgrade(old.root, tmp_path / "new")
    assert_same(new, old)
