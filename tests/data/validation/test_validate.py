import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.frames import Runs
from data.lerobot.format import LEROBOT
from data.validation.check_dataset import check_prompts
from data.validation.validate import require_valid, validate
from data.video.encoding import VideoEncoding, write_video
from tests.helpers.data import recording
from tests.helpers.data.damage import change, edit_column, rename_columns
from tests.helpers.data.recording import EPISODES, FRONT, PARQUET, WRIST, make_episode, write

RLDS = Path(__file__).parents[2] / "fixtures/rlds/tfrecord"
SUMS = shutil.ignore_patterns("checksums.json")  # of files that a test will change
TASKS = "meta/tasks.parquet"
INFO = "meta/info.json"
VIDEO = f"videos/{WRIST}/chunk-000/file-000.mp4"


def edit_info(root, **changes):
    info = json.loads((root / INFO).read_text()) | changes
    (root / INFO).write_text(json.dumps(info))


def drop_column(root, file, name):
    pq.write_table(pq.read_table(root / file).drop([name]), root / file)


def cut(root, file, part):
    whole = (root / file).read_bytes()
    (root / file).write_bytes(whole[: int(len(whole) * part)])


def empty(root):
    shutil.rmtree(root / "data")
    shutil.rmtree(root / "meta/episodes")
    edit_info(root, total_episodes=0, total_frames=0)


def nothing(values, kind):
    return [None] * len(values), kind


def no_number(values, kind):
    return [float("nan")] * len(values), kind


def replace_text(root, file, old, new):
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))


def declare(root, name, **changes):
    features = json.loads((root / INFO).read_text())["features"]
    features[name] |= changes
    edit_info(root, features=features)


HOSTILE = {
    "no start time of a camera": (
        lambda r: edit_column(r, EPISODES, TIMES, no_number),
        f"camera '{WRIST}'",
        "is missing in all episodes",
    ),
    "no place of a camera": (
        lambda r: edit_column(r, EPISODES, f"videos/{WRIST}/file_index", nothing),
        f"camera '{WRIST}'",
        "is missing in all episodes",
    ),
    "no videos": (lambda r: shutil.rmtree(r / "videos"), "file", "is missing"),
    "statistics nested deep": (
        lambda r: (r / "meta/stats.json").write_text("[" * 10**5),
        "file",
        "is not valid JSON (it is nested too deep",
    ),
    "statistics beyond numbers": (
        lambda r: edit_statistics(r, "action", mean=10**400),
        "'action', 'mean'",
        "does not have 3 numbers",
    ),
    "spread beyond numbers": (
        lambda r: edit_statistics(r, FRONT, std=[10**400]),
        f"'{FRONT}', 'std'",
        "does not have 3 numbers",
    ),
    "rate of 5000 digits": (
        lambda r: replace_text(r, INFO, '"fps": 20', f'"fps": 2{"0" * 4999}'),
        "file",
        "is not valid JSON (Exceeds the limit",
    ),
    "rate of 4000 digits": (
        lambda r: replace_text(r, INFO, '"fps": 20', f'"fps": 2{"0" * 3999}'),
        "fps",
        "expected a positive number",
    ),
    "type that is no text": (
        lambda r: declare(r, "action", dtype="\ud800"), "feature 'action'", "is missing"
    ),
    "type of several numbers": (
        lambda r: declare(r, "action", dtype="(2,)f4"), "feature 'action'", "is missing"
    ),
    "shape beyond memory": (
        lambda r: declare(r, "action", shape=[2**31 - 1] * 5), "features", "expected features with"
    ),
    "shape of a thousand axes": (
        lambda r: declare(r, "action", shape=[1] * 1000), "features", "expected features with"
    ),
    "sums of another form": (
        lambda r: (r / "meta/checksums.json").write_text(
            json.dumps({"sha256": {INFO: {"size": 1, "sum": 2}}})
        ),
        "sha256",
        "does not list the files",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_whatever_the_files_hold_the_answer_is_a_list(copy, case):
    make, field, expected = HOSTILE[case]
    make(copy)
    problems = validate(copy)
    found = [p for p in problems if p.field == field and expected in p.message]
    assert found, problems
    assert all(p.message.endswith(".") and len(p.message) < 2000 for p in problems)


def test_an_older_dataset_without_any_video_of_a_camera_is_an_error(older):
    edit_info(older, total_videos=0)
    shutil.rmtree(older / f"videos/chunk-000/{WRIST}")
    (problem,) = validate(older)
    assert problem.severity == "error"
    assert problem.field == f"camera '{WRIST}'"
    with pytest.raises(ValueError, match="is missing in all episodes"):
        require_valid(older)


NAN_ROW = [0.0, float("nan"), 0.0]
DAMAGES = {
    "missing video": (lambda r: (r / VIDEO).unlink(), VIDEO, "missing"),
    "truncated video": (lambda r: cut(r, VIDEO, 0.6), VIDEO, "frames: holds"),
    "video without index": (lambda r: cut(r, VIDEO, 0.01), VIDEO, "not a readable video"),
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
    "parquet cut off": (lambda r: cut(r, PARQUET, 0.5), PARQUET, "not a readable parquet"),
    "wrong width": (
        lambda r: edit_column(
            r, PARQUET, "action", lambda v, k: ([x[:2] for x in v], pa.list_(pa.float32()))
        ),
        PARQUET,
        "column 'action': has 0 empty values and 106 values in all for 53 rows",
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
        "task_index 1: is the task of episode 1 but has no text",
    ),
    "unknown task": (
        lambda r: edit_column(r, PARQUET, "task_index", lambda v, k: ([9] * len(v), pa.int64())),
        TASKS,
        "task_index 9: is the task of episode 0 but has no text",
    ),
    "fewer frames than promised": (
        lambda r: edit_info(r, total_frames=99),
        INFO,
        "total_frames: is 99",
    ),
    "broken JSON": (lambda r: cut(r, INFO, 0.5), INFO, "is not valid JSON"),
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


def test_several_tasks_in_an_episode_are_sound(copy):
    edit_column(copy, PARQUET, "task_index", change(3, 2))
    assert validate(copy) == []


def rewrite(root, name, edit):
    """Changes a column of the rows; the dataset is otherwise sound, its statistics file gone."""

    def edited(values, kind):
        array = np.array(values)
        edit(array)
        return array.tolist(), kind

    edit_column(root, PARQUET, name, edited)
    (root / "meta/stats.json").unlink(missing_ok=True)


def smooth(number, length=60):
    """An episode whose state and action move steadily, as a robot's do."""
    episode = make_episode(number, length)
    time = np.arange(length)[:, None] / 10 + number
    for name, size in (("observation.state", 4), ("action", 3)):
        wave = np.sin(time + np.arange(size)) + 0.01 * episode.columns[name]
        episode.columns[name] = wave.astype(np.float32)
    return episode


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    return write(tmp_path_factory.mktemp("steady") / "d", [smooth(n) for n in range(12)])


@pytest.fixture
def moving(steady, tmp_path):
    return shutil.copytree(steady, tmp_path / "copy", ignore=SUMS)


def put(row, dim, value):
    def edit(array):
        array[row, dim] = value

    return edit


def scale(rows, factor):
    def edit(array):
        array[rows] *= factor

    return edit


OUTLIERS = {
    "value": ("action", put(70, 1, 3e4), "warning", "from its median in dimension 1 at step 10"),
    "huge value": ("action", put(70, 1, -3e9), "error", "from its median in dimension 1 at step"),
    "huge state": ("observation.state", put(0, 0, 1e30), "error", "in dimension 0 at step 0 of"),
    "jump": ("action", put(70, 2, 9.0), "warning", "in dimension 2 at step 11 of episode 1, "),
    "lost frames": (
        "observation.state",
        lambda array: put(slice(200, 240), 0, array[20:60, 0] + 2.5)(array),
        "warning",
        "jumps by",
    ),
    "degrees": ("action", scale(slice(120, 180), 57.3), "warning", "of episode 2, "),
}


def test_steady_movement_is_sound(steady):
    assert validate(steady) == []


@pytest.mark.parametrize("case", OUTLIERS)
def test_values_far_outside_the_usual_are_found_where_they_are(moving, case):
    name, edit, severity, expected = OUTLIERS[case]
    rewrite(moving, name, edit)
    (problem,) = validate(moving)
    assert problem.severity == severity
    assert problem.field == f"column '{name}'"
    assert expected in problem.message
    assert problem.file == str(moving / PARQUET)


COLUMNS = {
    "openpi's": ({"observation.state": "state", "action": "actions"}, ()),
    "parts": ({"observation.state": "observation.state.joint", "action": "action.joint"}, ()),
    "a mixture's": ({"observation.state": "joint", "action": "command"}, ("joint", "command")),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_of_other_names_are_checked_as_those_of_lerobots(steady, moving, tmp_path, case):
    names, columns = COLUMNS[case]
    rewrite(moving, "action", lambda x: np.copyto(x[60:120], x[:60]))
    rewrite(moving, "observation.state", lambda x: np.copyto(x[60:120], x[:60]))
    rewrite(moving, "action", put(slice(None), 2, 0.5))
    rewrite(moving, "action", put(400, 1, 3e4))
    rewrite(moving, "observation.state", put(200, 0, np.nan))
    told = [(p.severity, p.field, p.message.partition("': ")[2]) for p in validate(moving)]
    assert [severity for severity, *_ in told] == ["error", *["warning"] * 3]
    fields = {f"column '{old}'": f"column '{new}'" for old, new in names.items()}
    renamed = rename_columns(moving, tmp_path / "renamed", names)
    found = validate(renamed, columns=columns)
    assert [(p.severity, p.field, p.message.partition("': ")[2]) for p in found] == [
        (severity, fields.get(field, field), sentence) for severity, field, sentence in told
    ]
    assert validate(rename_columns(steady, tmp_path / "sound", names), columns=columns) == []
    (problem,) = validate(moving, columns=["command"])
    assert problem.severity == "error"
    assert "column 'command': is none of ['observation.state'" in problem.message


def test_a_gripper_that_closes_and_rare_use_of_a_joint_are_sound(tmp_path):
    episodes = [smooth(n, 40) for n in range(22)]
    for number, episode in enumerate(episodes):
        episode.columns["action"][:, 2] = 0
        episode.columns["action"][20:25, 2] = 1
        episode.columns["observation.state"][:, 3] *= 1.0 if number == 7 else 1e-4
    assert validate(write(tmp_path / "d", episodes)) == []


def edit_statistics(root, name, **changes):
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats[name] |= changes
    path.write_text(json.dumps(stats))


STATISTICS = {
    "picture spread of 0": (FRONT, {"std": [[[0.0]], [[0.1]], [[0.1]]]}, "is 0 in channel 0"),
    "averaged quantiles": ("action", {"q01": [-0.5, -0.5, -0.5]}, "averages the quantiles of"),
    "minimum of other rows": ("action", {"min": [-9, -1, -1]}, "is -9 in dimension 0, but in the"),
    "mean of other rows": ("observation.state", {"mean": [0, 0, 9, 0]}, "is 9 in dimension 2"),
    "nothing": ("action", {"mean": None}, "does not have 3 numbers"),
    "text": (FRONT, {"std": "wide"}, "does not have 3 numbers"),
}


@pytest.mark.parametrize("case", STATISTICS)
def test_wrong_written_statistics_are_a_warning(copy, case):
    name, changes, expected = STATISTICS[case]
    edit_statistics(copy, name, **changes)
    (problem,) = validate(copy)
    assert problem.severity == "warning"
    assert problem.file == str(copy / "meta/stats.json")
    assert expected in problem.message


@pytest.fixture(scope="module")
def in_files(tmp_path_factory, episodes):
    """A dataset of a parquet file for each episode."""
    return write(tmp_path_factory.mktemp("files") / "d", episodes, data_megabytes=0.001)


def test_a_converters_wrong_file_numbers_are_a_warning_and_read_right(in_files, tmp_path, episodes):
    root = shutil.copytree(in_files, tmp_path / "d", ignore=SUMS)
    numbers = pq.read_table(root / EPISODES)["data/file_index"].to_pylist()
    first = numbers.index(1)
    edit_column(root, EPISODES, "data/file_index", change(first, 0))
    (problem,) = validate(root)
    assert problem.severity == "warning"
    assert f"says data/chunk-000/file-000.parquet for episode {first}" in problem.message
    assert "file-001.parquet" in problem.message
    columns = open_dataset(root).columns(first)
    assert np.array_equal(columns["action"], episodes[first].columns["action"])


def test_scrambled_row_ranges_are_a_warning(copy):
    edit_column(copy, EPISODES, "dataset_from_index", change(2, 3))
    (problem,) = validate(copy)
    assert problem.severity == "warning"
    assert "column 'dataset_from_index': is 3 for episode 2, but its rows say 19" in problem.message


TIMES = f"videos/{WRIST}/from_timestamp"
STARTS = {
    "a third of a frame off": (
        2,
        0.95 + 0.017,
        "warning",
        "is 0.34 frames away from the first frame",
    ),
    "two frames early": (2, 0.95 - 0.1, "error", "the start of episode 2 2 frames before"),
    "late": (5, 2.25 + 0.2, "error", "ends 4 frames before episode 5 does"),
}


@pytest.mark.parametrize("case", STARTS)
def test_wrong_times_of_episodes_in_a_video_are_found(copy, case):
    episode, start, severity, expected = STARTS[case]
    edit_column(copy, EPISODES, TIMES, change(episode, start))
    problem = next(p for p in validate(copy) if p.file == str(copy / VIDEO))
    assert problem.severity == severity
    assert expected in problem.message


@pytest.mark.parametrize("start", [1e300, -0.5])
def test_a_place_that_no_video_has_is_an_error_of_the_metadata(copy, start):
    edit_column(copy, EPISODES, TIMES, change(2, start))
    problem = next(p for p in validate(copy) if "from_timestamp" in p.field)
    assert problem.severity == "error"
    assert f"{start:g}" in problem.message


def test_a_recording_that_was_killed_leaves_a_parquet_without_footer(copy):
    (copy / PARQUET).write_bytes((copy / PARQUET).read_bytes()[:-8])
    errors = [p for p in validate(copy) if p.severity == "error"]
    assert any("not a readable parquet" in p.message for p in errors)


def test_what_one_column_lacks_does_not_hide_what_others_do(copy):
    drop_column(copy, PARQUET, "observation.state")
    edit_column(copy, PARQUET, "action", change(10, NAN_ROW))
    messages = " ".join(p.message for p in validate(copy))
    assert "column 'observation.state': is missing" in messages
    assert "column 'action': is not finite" in messages


@pytest.fixture
def older(recorded, episodes, tmp_path):
    """The recording as v2.1 keeps it: files for each episode, listed in JSON lines."""
    root = tmp_path / "v21"
    table = pq.read_table(recorded / PARQUET)
    info = json.loads((recorded / INFO).read_text()) | {
        "codebase_version": "v2.1",
        "total_videos": 2 * len(episodes),
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/"
        "episode_{episode_index:06d}.mp4",
    }
    (root / "data/chunk-000").mkdir(parents=True)
    lines = []
    for number, episode in enumerate(episodes):
        rows = table.filter(pc.equal(table["episode_index"], number))
        pq.write_table(rows, root / f"data/chunk-000/episode_{number:06d}.parquet")
        lines.append({"episode_index": number, "tasks": [episode.task], "length": len(rows)})
        for camera, frames in episode.frames.items():
            path = root / f"videos/chunk-000/{camera}/episode_{number:06d}.mp4"
            write_video(path, frames, 20, VideoEncoding())
    tasks = [{"task_index": i, "task": task} for i, task in enumerate(recording.TASKS)]
    (root / "meta").mkdir()
    (root / INFO).write_text(json.dumps(info))
    for name, content in (("episodes", lines), ("tasks", tasks)):
        text = "\n".join(map(json.dumps, content))
        (root / f"meta/{name}.jsonl").write_text(text)
    return root


OLDER = f"videos/chunk-000/{FRONT}/episode_000002.mp4"


def test_a_sound_dataset_of_the_older_version_has_no_problems(older):
    assert validate(older) == []


def test_a_video_missing_from_a_dataset_that_counts_all_is_an_error(older):
    (older / OLDER).unlink()
    (problem,) = validate(older)
    assert problem.severity == "error"
    assert (
        f"camera '{FRONT}': is missing in 1 of 6 episodes, the first of them 2" in problem.message
    )


def test_a_camera_that_some_episodes_lack_is_a_warning(older):
    (older / OLDER).unlink()
    edit_info(older, total_videos=11)
    (problem,) = validate(older)
    assert problem.severity == "warning"
    assert "the first of them 2, which are trained without it" in problem.message


def test_a_video_longer_than_its_episode_is_a_warning(older):
    shutil.copy(older / OLDER.replace("000002", "000003"), older / OLDER)
    (problem,) = validate(older)
    assert problem.severity == "warning"
    assert problem.file == str(older / OLDER)
    assert "but episode 2 has 5; the extra frames are not read" in problem.message


def test_a_video_shorter_than_its_episode_is_an_error(older):
    shutil.copy(older / OLDER, older / OLDER.replace("000002", "000003"))
    (problem,) = validate(older)
    assert problem.severity == "error"
    assert "holds 5 of the 9 frames that its episodes have" in problem.message


def test_an_rlds_dataset_is_checked_alike():
    problems = validate(RLDS)
    assert {p.severity for p in problems} == {"warning"}
    absent, wordless = sorted(p.message for p in problems)
    assert "camera 'observation.wrist_image_left': is missing in 1 of 5 episodes" in absent
    assert "instructions: are empty in 1 of " in wordless


@pytest.mark.parametrize(("tasks", "severity"), [((0, 1, 0), "warning"), ((1, 1, 1), "error")])
def test_episodes_without_any_instruction_are_counted(tasks, severity):
    runs = Runs(*np.array([[0, 0, 5], [1, 0, 4], [1, 4, 3]]).T, np.array(tasks))
    dataset = SimpleNamespace(root="rlds", prompts=(("push it",), ("", " ")), runs=runs)
    (problem,) = check_prompts(dataset)
    assert problem.severity == severity
    assert f"are empty in {sum(tasks)} of 3 runs of frames, the first" in problem.message


def test_random_damage_to_any_file_never_raises(recorded, tmp_path):
    rng = np.random.default_rng(0)
    files = sorted(p.relative_to(recorded) for p in recorded.rglob("*") if p.is_file())
    for trial in range(40):
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


@pytest.mark.parametrize("version", ["metaworld_v30", "metaworld_v21"])
def test_nothing_but_what_is_wrong_is_found_in_lerobots_own_recordings(metaworld, version):
    problems = validate(metaworld.with_name(version))
    assert {p.severity for p in problems} == {"warning"}
    doubled, *statistics = problems
    assert "doubled" in doubled.message
    fields = [p.field for p in statistics if p.file.endswith("meta/stats.json")]
    cameras = [f"'observation.images.{name}', 'std'" for name in ("corner", "wrist")]
    expected = ["'observation.state', 'q01'", *cameras] if version == "metaworld_v30" else []
    assert fields == expected
    assert len(fields) == len(statistics)


@pytest.mark.parametrize("name", ["chiliad", "lerobot_av1", "lerobot_h264", "lerobot_png"])
def test_nothing_but_lerobots_wrong_statistics_is_found_in_fixtures(name):
    problems = validate(RLDS.parents[1] / "lerobot" / name)
    assert {p.severity for p in problems} <= {"warning"}
    found = [p.field for p in problems]
    assert found == (
        []
        if name == "chiliad"
        else [
            "'observation.state', 'q01'",
            "'observation.images.front', 'std'",
            "'observation.images.wrist', 'std'",
        ]
    )


def test_a_format_of_ones_own_without_columns_is_named(recorded, monkeypatch):
    mine = replace(LEROBOT, name="mine", validate=lambda dataset, report: [])
    monkeypatch.setattr("data.validation.validate.find_format", lambda path: mine)
    (problem,) = validate(recorded)
    assert problem.severity == "error"
    assert problem.field == "format 'mine'"
    assert "add `columns` as its third parameter" in problem.message


def test_checking_says_what_it_does_and_how_far_it_is(recorded):
    said = []
    validate(recorded, lambda *what: said.append(what))
    steps = {what: (done, total) for what, done, total in said}
    assert steps["Values and numbering"] == (53, 53)
    assert steps[f"Videos of {WRIST}"] == (6, 6)
    assert f"Images of {FRONT}" in steps
