import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.errors import DatasetError, MissingFileError
from data.lerobot.upgrade import upgrade
from data.statistics.stats import compute
from data.validation.validate import validate
from tests.helpers.data.recording import (
    FEATURES,
    FRONT,
    LENGTHS,
    SHARED,
    TASKS,
    WRIST,
    assert_same_episodes,
)
from tests.helpers.data.v21 import edit_lines, parquet, video, write_v21


@pytest.fixture
def old(tmp_path, episodes):
    return write_v21(tmp_path / "old", episodes, FEATURES, 20)


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_an_older_dataset_reads_as_what_was_recorded(tmp_path, episodes, version):
    dataset = open_dataset(write_v21(tmp_path / "old", episodes, FEATURES, 20, version))
    assert dataset.lengths.tolist() == list(LENGTHS)
    assert dataset.episode_numbers.tolist() == list(range(len(LENGTHS)))
    assert set(dataset.tasks.values()) == set(TASKS)
    assert dataset.present.all()
    assert_same_episodes(dataset, episodes)


def test_both_versions_have_the_same_columns_runs_and_prompts(old, recorded):
    older, newer = open_dataset(old), open_dataset(recorded)
    assert older.column_names == newer.column_names
    for name in newer.column_names:
        np.testing.assert_array_equal(older.column(name), newer.column(name))
    assert older.prompts == newer.prompts
    for mine, other in zip(older.runs, newer.runs, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.fixture
def groots(old):
    """With 64-bit times, as info.json says, and no frame_index, as NVIDIA's datasets are."""
    info = json.loads((old / "meta/info.json").read_text())
    del info["features"]["frame_index"]
    info["features"]["timestamp"]["dtype"] = "float64"
    (old / "meta/info.json").write_text(json.dumps(info))
    for path in old.glob("data/*/*.parquet"):
        table = pq.read_table(path).drop_columns(["frame_index"])
        at = table.column_names.index("timestamp")
        times = table["timestamp"].cast(pa.float64())
        pq.write_table(table.set_column(at, "timestamp", times), path)
    return old


def test_wide_times_are_cast_and_frames_without_numbers_counted(groots, recorded, tmp_path):
    older, newer = open_dataset(groots), open_dataset(recorded)
    for name in newer.column_names:
        assert older.column(name).dtype == newer.column(name).dtype
        np.testing.assert_array_equal(older.column(name), newer.column(name))
    assert set(compute(older)) == set(compute(newer)) - {"frame_index"}
    (problem,) = validate(groots)
    assert problem.severity == "warning"
    assert "column 'frame_index': is missing, so frames are numbered" in problem.message
    upgrade(groots, tmp_path / "new")
    assert validate(tmp_path / "new") == []


def test_a_bookkeeping_column_of_a_wrong_type_is_told_without_words_of_info_json(old):
    table = pq.read_table(old / parquet(0))
    at = table.column_names.index("timestamp")
    times = table["timestamp"].cast(pa.float16())
    pq.write_table(table.set_column(at, "timestamp", times), old / parquet(0))
    with pytest.raises(
        DatasetError, match="holds halffloat, but every LeRobot dataset has float32; write the"
    ):
        open_dataset(old).columns(0)


def test_a_real_recording_reads_the_same_in_both_versions(metaworld):
    older, newer = open_dataset(SHARED / "data/metaworld_v21"), open_dataset(metaworld)
    assert older.cameras == newer.cameras
    assert older.prompts == newer.prompts
    assert older.lengths.tolist() == newer.lengths.tolist()
    for name in newer.column_names:
        np.testing.assert_array_equal(older.column(name), newer.column(name))
    for mine, other in zip(older.runs, newer.runs, strict=True):
        np.testing.assert_array_equal(mine, other)
    for camera in older.cameras:
        for i in (0, 13, 29):
            mine, other = (d.frames(i, camera).astype(float) for d in (older, newer))
            apart = [np.abs(mine[1:-1] - np.roll(other, k, 0)[1:-1]).mean() for k in (-1, 0, 1)]
            assert np.argmin(apart) == 1  # encoded again, but nearer than any neighbour


def test_a_camera_without_a_file_is_absent_from_that_episode(old, episodes):
    (old / video(WRIST, 2)).unlink()
    dataset = open_dataset(old)
    assert np.argwhere(~dataset.present).tolist() == [[2, 1]]
    assert set(dataset.episode(2)) >= {FRONT, "action"}
    assert WRIST not in dataset.episode(2)
    with pytest.raises(MissingFileError, match="episode 2 has no video from it"):
        dataset.frames(2, WRIST)
    assert len(dataset.frames(3, WRIST)) == LENGTHS[3]


def test_lines_in_any_order_with_unknown_keys_are_read(old, episodes):
    def edit(rows):
        return [{"extra": {"a": [1]}, **row} for row in reversed(rows)]

    edit_lines(old / "meta/episodes.jsonl", edit)
    assert_same_episodes(open_dataset(old), episodes)


def test_only_files_of_selected_episodes_are_needed(old, episodes):
    for number in (0, 2, 3, 5):
        (old / parquet(number)).unlink()
        (old / video(FRONT, number)).unlink()
    dataset = open_dataset(old, episodes=[4, 1])
    assert dataset.episode_numbers.tolist() == [1, 4]
    assert_same_episodes(dataset, [episodes[1], episodes[4]])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / parquet(3)).unlink(),
            r"episode_000003\.parquet, file: is missing",
        ),
        (
            lambda root: shutil.copy(root / parquet(2), root / parquet(3)),
            r"episode_000003\.parquet, column 'episode_index': holds 2 to 2, expected 3 in every",
        ),
        (
            lambda root: pq.write_table(
                pq.read_table(root / parquet(1)).slice(2), root / parquet(1)
            ),
            "episode 1 has length 12, but the data files hold 10 rows",
        ),
        (
            lambda root: edit_lines(root / "meta/episodes.jsonl", lambda rows: rows + rows[:1]),
            r"episodes\.jsonl, episode_index, length: .*listed twice",
        ),
        (
            lambda root: edit_lines(
                root / "meta/tasks.jsonl", lambda rows: [*rows, rows[0] | {"task": "other"}]
            ),
            r"tasks\.jsonl, task_index 0: has two texts, .* and 'other'",
        ),
        (
            lambda root: (root / "meta/episodes.jsonl").write_text('{"episode_index": "a"}\n'),
            r"episodes\.jsonl, file: does not hold JSON lines",
        ),
        (
            lambda root: edit_lines(
                root / "meta/episodes.jsonl",
                lambda rows: [{"episode_index": row["episode_index"]} for row in rows],
            ),
            r"episodes\.jsonl, key 'length': is missing in one or more of",
        ),
        (
            lambda root: (root / "meta/tasks.jsonl").unlink(),
            r"tasks\.jsonl, file: is missing",
        ),
    ],
)
def test_damage_is_named_by_file(old, damage, message):
    damage(old)
    with pytest.raises(DatasetError, match=message):
        read_all(open_dataset(old))


def read_all(dataset):
    return dataset.runs, [dataset.columns(i) for i in range(dataset.num_episodes)]


def test_instructions_that_no_frame_refers_to_are_other_wordings(old):
    further = {1: ["reach the green block", "touch the green one"], 3: ["lift the red block", "up"]}

    def edit(rows):
        return [row | {"tasks": further.get(row["episode_index"], row["tasks"])} for row in rows]

    edit_lines(old / "meta/episodes.jsonl", edit)
    dataset = open_dataset(old)
    told = [dataset.prompts[task] for task in dataset.runs.task]
    assert told[1] == ("reach the green block", "touch the green one")
    assert told[3] == ("lift the red block", "up")
    assert told[0] == ("lift the red block",)
    assert dataset.task(1) == "reach the green block"


def test_a_task_that_changes_within_an_episode_is_two_runs(old):
    table = pq.read_table(old / parquet(1))
    changed = pa.array([1] * 5 + [2] * 7)
    at = table.column_names.index("task_index")
    pq.write_table(table.set_column(at, "task_index", changed), old / parquet(1))
    tasks = ["reach the green block", "push it", "reach it, then push"]
    edit_lines(
        old / "meta/episodes.jsonl",
        lambda rows: [r | {"tasks": tasks} if r["episode_index"] == 1 else r for r in rows],
    )
    dataset = open_dataset(old)
    runs = np.stack(dataset.runs, axis=1)
    assert runs[runs[:, 0] == 1][:, 1:3].tolist() == [[0, 5], [5, 7]]
    told = [dataset.prompts[t] for t in runs[runs[:, 0] == 1][:, 3]]
    assert told == [
        ("reach the green block", "reach it, then push"),
        ("push it", "reach it, then push"),
    ]
    assert dataset.runs.length.sum() == dataset.num_frames
