import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.validate import require_valid, validate
from tests.data.conftest import FRONT, WRIST, make_episode, write

PARQUET = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
INFO = "meta/info.json"
VIDEO = f"videos/{WRIST}/chunk-000/file-000.mp4"


def edit_info(root, **changes):
    info = json.loads((root / INFO).read_text()) | changes
    (root / INFO).write_text(json.dumps(info))


def edit_column(root, file, name, edit):
    table = pq.read_table(root / file)
    values, kind = edit(table[name].to_pylist(), table[name].type)
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, pa.array(values, kind)), root / file)


def drop_column(root, file, name):
    pq.write_table(pq.read_table(root / file).drop([name]), root / file)


def cut(root, file, part):
    whole = (root / file).read_bytes()
    (root / file).write_bytes(whole[: int(len(whole) * part)])


def change(position, value):
    def edit(values, kind):
        values[position] = value
        return values, kind

    return edit


def empty(root):
    shutil.rmtree(root / "data")
    shutil.rmtree(root / "meta/episodes")
    edit_info(root, total_episodes=0, total_frames=0)


NAN_ROW = [0.0, float("nan"), 0.0]
DAMAGES = {
    "missing video": (lambda r: (r / VIDEO).unlink(), VIDEO, "missing"),
    "truncated video": (lambda r: cut(r, VIDEO, 0.6), VIDEO, "frames: holds"),
    "video without index": (lambda r: cut(r, VIDEO, 0.02), VIDEO, "no readable video"),
    "empty dataset": (empty, INFO, "total_episodes: is 0"),
    "doubles for floats": (
        lambda r: edit_column(r, PARQUET, "action", lambda v, k: (v, pa.list_(pa.float64(), 3))),
        PARQUET,
        "column 'action': holds fixed_size_list<element: double>",
    ),
    "text for floats": (
        lambda r: edit_column(
            r, PARQUET, "action", lambda v, k: ([str(x) for x in v], pa.string())
        ),
        PARQUET,
        "column 'action': holds string",
    ),
    "missing column": (
        lambda r: drop_column(r, PARQUET, "observation.state"),
        PARQUET,
        "column 'observation.state': is missing",
    ),
    "parquet cut off": (lambda r: cut(r, PARQUET, 0.5), PARQUET, "no readable parquet"),
    "wrong width": (
        lambda r: edit_column(
            r, PARQUET, "action", lambda v, k: ([x[:2] for x in v], pa.list_(pa.float32()))
        ),
        PARQUET,
        "column 'action': has 0 empty values and 106 values in 53 rows",
    ),
    "empty value": (
        lambda r: edit_column(r, PARQUET, "timestamp", change(3, None)),
        PARQUET,
        "column 'timestamp': has 1 empty values",
    ),
    "action of NaN": (
        lambda r: edit_column(r, PARQUET, "action", change(10, NAN_ROW)),
        PARQUET,
        "column 'action': is not finite (NaN or infinite) at step 3 of episode 1",
    ),
    "length too long": (
        lambda r: edit_column(r, EPISODES, "length", change(2, 6)),
        "meta/episodes",
        "column 'length': episode 2 has length 6",
    ),
    "index with a gap": (
        lambda r: edit_column(
            r, PARQUET, "index", lambda v, k: ([x + (x > 20) for x in v], pa.int64())
        ),
        PARQUET,
        "column 'index': is 22 where 21",
    ),
    "frames doubled": (
        lambda r: edit_column(r, PARQUET, "frame_index", change(4, 3)),
        PARQUET,
        "column 'frame_index': is 3 where 4",
    ),
    "another rate": (lambda r: edit_info(r, fps=30), PARQUET, "column 'timestamp': is 0.05 s"),
    "rate that is text": (lambda r: edit_info(r, fps="20"), INFO, "fps: is '20'"),
    "task without text": (
        lambda r: edit_column(r, TASKS, "__index_level_0__", change(1, "")),
        TASKS,
        "task_index 1: has no text",
    ),
    "unknown task": (
        lambda r: edit_column(r, PARQUET, "task_index", lambda v, k: ([9] * len(v), pa.int64())),
        TASKS,
        "task_index 9: has no text",
    ),
    "fewer frames than promised": (
        lambda r: edit_info(r, total_frames=99),
        INFO,
        "total_frames: is 99",
    ),
    "broken JSON": (lambda r: cut(r, INFO, 0.5), INFO, "is no JSON"),
    "JSON of another kind": (lambda r: (r / INFO).write_text("[1]"), INFO, "codebase_version"),
    "older version": (lambda r: edit_info(r, codebase_version="v1.6"), INFO, "is 'v1.6'"),
    "features without shape": (
        lambda r: edit_info(r, features={"action": {"dtype": "float32"}}),
        INFO,
        "features: is",
    ),
    "no template": (lambda r: edit_info(r, video_path=None), INFO, "video_path: is None"),
    "no metadata": (lambda r: shutil.rmtree(r / "meta"), INFO, "is missing"),
    "no tasks": (lambda r: (r / TASKS).unlink(), TASKS, "is missing"),
}


def test_a_sound_dataset_has_no_problems(recorded):
    assert validate(recorded) == []
    assert require_valid(recorded) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_sentence_that_names_file_and_field(copy, damage):
    make, file, expected = DAMAGES[damage]
    make(copy)
    errors = [p for p in validate(copy) if p.severity == "error"]
    found = [p for p in errors if p.file == str(copy / file) and expected in p.message]
    assert found, errors
    message = found[0].message
    assert message.startswith(f"{copy / file}, {found[0].field}: ")
    assert message.endswith(".")
    assert "\n" not in message
    with pytest.raises(ValueError, match=r"copy"):
        require_valid(copy)


def test_doubled_episodes_and_still_dimensions_are_warnings(tmp_path):
    first, second = make_episode(0, 6), make_episode(1, 8)
    first.columns["action"][:, 2] = second.columns["action"][:, 2] = 0.5
    write(tmp_path / "d", [first, second, first])
    problems = validate(tmp_path / "d")
    assert {p.severity for p in problems} == {"warning"}
    messages = " ".join(p.message for p in problems)
    assert "the same in episodes 0 and 2 (1 doubled" in messages
    assert "column 'action': never changes in dimension 2" in messages
    assert require_valid(tmp_path / "d") == problems


def test_several_tasks_in_an_episode_are_a_warning(copy):
    edit_column(copy, PARQUET, "task_index", change(3, 2))
    (problem,) = validate(copy)
    assert problem.severity == "warning"
    assert "changes at step 3 of episode 0" in problem.message


def test_random_damage_to_any_file_never_raises(recorded, tmp_path):
    rng = np.random.default_rng(0)
    files = sorted(p.relative_to(recorded) for p in recorded.rglob("*") if p.is_file())
    for trial in range(60):
        root = tmp_path / str(trial)
        shutil.copytree(recorded, root)
        path = root / files[trial % len(files)]
        content = bytearray(path.read_bytes())
        for at in rng.integers(0, len(content), 1 + trial // 10):
            content[at] = rng.integers(0, 256)
        path.write_bytes(bytes(content))
        for problem in validate(root):
            assert problem.message.endswith(".")
        shutil.rmtree(root)


def test_recordings_of_lerobot_have_no_errors(metaworld):
    assert {p.severity for p in validate(metaworld)} <= {"warning"}
    assert any("doubled" in p.message for p in validate(metaworld))


def test_checking_says_what_it_does(recorded):
    said = []
    validate(recorded, said.append)
    assert {"metadata", "tasks", FRONT, WRIST} <= set(said)
