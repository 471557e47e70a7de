"""Edited datasets: frames that stay are the old ones to the bit, whatever interrupts the work."""

import errno
import json
import resource
import shutil
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit, Trim
from data.errors import DatasetError
from data.files.exchange import exchange
from data.lerobot.meta_writer import write_tasks
from data.lerobot.writer import DatasetWriter
from data.statistics.difference import difference
from data.validation.validate import validate
from data.video.encoding import VideoEncoding
from data.video.video import encode_mp4
from models.families.groot.modality import read_modality
from tests.helpers.data.damage import edit_column
from tests.helpers.data.pictures import encode
from tests.helpers.data.recording import (
    FEATURES,
    FRONT,
    LENGTHS,
    PARQUET,
    TASKS,
    WRIST,
    make_episode,
    psnr,
    write,
)
from tests.helpers.data.v21 import video, write_v21

DONE = "next.success"
FIXTURES = Path(__file__).parents[2] / "fixtures/lerobot"
LONG_GROUPS = (
    ("libx264", {"g": "40", "x264-params": "bframes=3:open-gop=1:keyint=40:min-keyint=5"}),
    ("libx265", {"x265-params": "keyint=5:open-gop=1:bframes=3:pools=1:log-level=none"}),
    ("libsvtav1", {"g": "8", "svtav1-params": "lp=1"}),
)


def assert_taken(new, i, old, j, at=slice(None)):
    """Episode i of the new dataset is what was at these frames of episode j of the old one."""
    for camera in old.cameras:
        np.testing.assert_array_equal(new.frames(i, camera), old.frames(j, camera)[at])
    mine, other = new.columns(i), old.columns(j)
    for name in set(mine) - {"timestamp", "frame_index", "episode_index", "index", "task_index"}:
        np.testing.assert_array_equal(mine[name], other[name][at])


def files(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["lerobot_av1", "lerobot_h264", "lerobot_png"])
def test_what_stays_is_the_old_dataset_to_the_bit(name, tmp_path):
    edit = Edit(delete=(1,), order=(2,), trims=(Trim((2,), 3, 6),))
    edit_dataset([FIXTURES / name], tmp_path / "new", edit)
    old, new = open_dataset(FIXTURES / name), open_dataset(tmp_path / "new")
    assert new.lengths.tolist() == [3, 6]
    assert_taken(new, 0, old, 2, slice(3, 6))
    assert_taken(new, 1, old, 0)
    assert new.column("index").tolist() == list(range(9))
    assert validate(tmp_path / "new") == []


@pytest.mark.parametrize("encoder", LONG_GROUPS, ids=lambda e: e[0])
def test_frames_within_a_group_of_pictures_are_cut_out_without_encoding(
    encoder, episodes, tmp_path
):
    """Also where pictures refer to some that are left behind, and of one file for all episodes."""
    old = write_v21(tmp_path / "v21", episodes, FEATURES, 20)
    for i, episode in enumerate(episodes):
        encode(old / video(FRONT, i), episode.frames[FRONT], *encoder)
    edit_dataset([old], tmp_path / "one", Edit())
    trims = Trim((1,), 6, 11), Trim((3,), 2, 3), Trim((4,), 0, 4)
    edit_dataset([tmp_path / "one"], tmp_path / "new", Edit(delete=(0, 2), trims=trims))
    before, new = open_dataset(old), open_dataset(tmp_path / "new")
    assert new.lengths.tolist() == [5, 1, 4, 8]
    for i, (j, at) in enumerate(
        [(1, slice(6, 11)), (3, slice(2, 3)), (4, slice(0, 4)), (5, slice(None))]
    ):
        assert_taken(new, i, before, j, at)
    assert [p for p in validate(tmp_path / "new") if p.severity == "error"] == []


def test_an_edit_interrupted_anywhere_goes_on_and_comes_to_the_same_bytes(recorded, tmp_path):
    edit = Edit(delete=(3,), tasks=(((0,), "<b>lift</b>"),))
    limits = {"data_megabytes": 0.001, "video_megabytes": 0.004}
    calls = []
    edit_dataset(
        [recorded], tmp_path / "whole", edit, progress=lambda *x: calls.append(x), **limits
    )
    assert len(list((tmp_path / "whole/videos" / WRIST).rglob("*.mp4"))) > 1
    for last in range(0, len(calls), 4):
        out, called = tmp_path / f"cut{last}", 0

        def interrupt(done, total, last=last):
            nonlocal called
            called += 1
            if called > last:
                raise (OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt())[last % 8 // 4]

        with pytest.raises((OSError, KeyboardInterrupt)):
            edit_dataset([recorded], out, edit, progress=interrupt, **limits)
        assert not out.exists()
        edit_dataset([recorded], out, edit, **limits)
        assert files(out) == files(tmp_path / "whole")
        assert not out.with_name(out.name + ".partial").exists()
        shutil.rmtree(out)


def test_the_journal_tells_a_task_once_and_the_form_that_repeated_all_is_read(recorded, tmp_path):
    limits = {"data_megabytes": 0.001, "video_megabytes": 0.004}
    edit_dataset([recorded], tmp_path / "whole", Edit(), **limits)
    frames = sum(LENGTHS)

    def interrupt(done, total):
        if done > frames:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        edit_dataset([recorded], tmp_path / "new", Edit(), progress=interrupt, **limits)
    journal = tmp_path / "new.partial/edit.jsonl"
    header, *lines = map(json.loads, journal.read_text().splitlines())
    entries = [entry for line in lines if line["track"] == "rows" for entry in line["entries"]]
    told = [text for entry in entries for text in entry["known"]]
    assert len(entries) == len(LENGTHS)
    assert sorted(told) == sorted(TASKS)
    for number, entry in enumerate(entries):
        entry["known"] = [text for before in entries[:number] for text in before["known"]]
        entry["known"] = list(dict.fromkeys([*entry["known"], *told[number : number + 1]]))
    journal.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    edit_dataset([recorded], tmp_path / "new", Edit(), **limits)
    assert files(tmp_path / "new") == files(tmp_path / "whole")


def test_frames_before_the_first_that_is_kept_are_not_seen_or_warned_of(recorded, tmp_path):
    edit_dataset([recorded], tmp_path / "new", Edit(keep=(4,), trims=(Trim(None, 5, None),)))
    with av.open(str(next((tmp_path / "new/videos" / FRONT).rglob("*.mp4")))) as file:
        assert file.streams.video[0].frames == 8  # from the keyframe at 4 on
    assert_taken(open_dataset(tmp_path / "new"), 0, open_dataset(recorded), 4, slice(5, None))
    assert validate(tmp_path / "new") == []


def test_a_recording_that_is_not_ended_can_be_edited(episodes, tmp_path):
    with DatasetWriter(tmp_path / "set", fps=20, features=FEATURES) as writer:
        for episode in episodes[:3]:
            writer.add_episode(*episode)
        edit_dataset([tmp_path / "set"], tmp_path / "new", Edit(delete=(1,)))
    assert open_dataset(tmp_path / "new").lengths.tolist() == [LENGTHS[0], LENGTHS[2]]
    assert not (tmp_path / "new/meta/recording.jsonl").exists()


@contextmanager
def interrupted(after):
    """A progress that ends an edit by Ctrl-C after some calls."""
    calls = count()

    def interrupt(done, total):
        if next(calls) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        yield interrupt


def test_another_edit_does_not_go_on_where_one_was_interrupted(recorded, tmp_path):
    with interrupted(8) as progress:
        edit_dataset([recorded], tmp_path / "new", Edit(delete=(0,)), progress=progress)
    with pytest.raises(ValueError, match=r"new\.partial: holds another unfinished edit"):
        edit_dataset([recorded], tmp_path / "new", Edit(delete=(1,)))
    (tmp_path / "new.partial/edit.jsonl").unlink()
    with pytest.raises(ValueError, match=r"new\.partial: is in the way"):
        edit_dataset([recorded], tmp_path / "new", Edit(delete=(0,)))


@pytest.mark.parametrize("splits", [(), (("a", 0.5), ("b", 0.5))])
def test_an_edit_of_which_nothing_is_finished_leaves_nothing(splits, recorded, tmp_path):
    with interrupted(2) as progress:
        edit_dataset([recorded], tmp_path / "new", Edit(splits=splits), progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_first_line_leaves_nothing(recorded, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            edit_dataset([recorded], tmp_path / "new", Edit())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_splits_that_are_finished_stay(recorded, tmp_path):
    edit, out = Edit(splits=(("a", 0.5), ("b", 0.5))), tmp_path / "new"
    with interrupted(10) as progress:
        edit_dataset([recorded], out, edit, progress=progress)
    kept = files(tmp_path / "new.partial/a")
    assert any(name.startswith("meta/") for name in kept)
    edit_dataset([recorded], out, edit)
    assert kept.items() - {("edit.jsonl", kept["edit.jsonl"])} <= files(out / "a").items()
    assert sorted(p.name for p in out.iterdir()) == ["a", "b"]


def test_two_processes_do_not_edit_into_one_folder(recorded, tmp_path):
    def second(done, total):
        with pytest.raises(ValueError, match=r"new\.partial: another process is making this edit"):
            edit_dataset([recorded], tmp_path / "new", Edit(delete=(0,)))

    edit_dataset([recorded], tmp_path / "new", Edit(delete=(0,)), progress=second)
    assert open_dataset(tmp_path / "new").num_episodes == 5


def test_frames_whose_times_go_back_are_refused_unless_they_are_left_out(copy, tmp_path):
    path = copy / PARQUET
    table = pq.read_table(path)
    times = table["timestamp"].to_numpy().copy()
    times[9:12] = times[9:12][::-1]  # frames 2 to 4 of episode 1
    at = table.column_names.index("timestamp")
    pq.write_table(table.set_column(at, "timestamp", pa.array(times)), path)
    message = r"column 'timestamp': goes back from 0\.2 s to 0\.15 s after frame 2 of episode 1;"
    with pytest.raises(DatasetError, match=message):
        edit_dataset([copy], tmp_path / "new", Edit())
    assert {path.name for path in tmp_path.iterdir()} <= {copy.name}
    edit_dataset([copy], tmp_path / "new", Edit(trims=(Trim((1,), 4, None),)))
    assert open_dataset(tmp_path / "new").lengths[1] == LENGTHS[1] - 4


def test_in_place_the_old_dataset_stays_beside_the_new(recorded, tmp_path):
    mine = Path(shutil.copytree(recorded, tmp_path / "mine"))
    before = files(mine)
    edit_dataset([mine], mine, Edit(keep=(5, 0)))
    assert open_dataset(mine).lengths.tolist() == [LENGTHS[0], LENGTHS[5]]
    assert files(tmp_path / "mine.old") == before
    with pytest.raises(ValueError, match=r"mine\.old: is left over from an earlier edit"):
        edit_dataset([mine], mine, Edit(keep=(0,)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "mine.old"]


@pytest.mark.parametrize("place", ["in place", "elsewhere", "splits"])
def test_an_edit_killed_when_the_new_dataset_is_in_its_place_is_not_made_twice(
    place, recorded, tmp_path, monkeypatch
):
    mine = Path(shutil.copytree(recorded, tmp_path / "mine"))
    out = mine if place == "in place" else tmp_path / "out"
    splits = (("a", 0.5), ("b", 0.5)) if place == "splits" else ()
    edit, before = Edit(delete=(0,), splits=splits), files(mine)

    def killed(move):
        def ends(*paths):
            move(*paths)
            raise Killed

        return ends

    with monkeypatch.context() as patch:
        patch.setattr("data.edit.edit.exchange", killed(exchange))
        patch.setattr(Path, "rename", killed(Path.rename))
        with pytest.raises(Killed):
            edit_dataset([mine], out, edit)
    assert edit_dataset([mine], out, edit)
    edit_dataset([recorded], tmp_path / "whole", edit)
    assert files(out) == files(tmp_path / "whole")
    assert files(tmp_path / "mine.old" if place == "in place" else mine) == before
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match=r"mine\.old: is left over|out: already exists"):
        edit_dataset([mine], out, edit)


class Killed(BaseException):
    """Stands for the end of the process."""


def test_in_place_takes_the_folder_that_one_is_in(recorded, tmp_path, monkeypatch):
    mine = Path(shutil.copytree(recorded, tmp_path / "mine"))
    monkeypatch.chdir(mine)
    edit_dataset(["."], ".", Edit(keep=(5, 0)))
    assert open_dataset(mine).lengths.tolist() == [LENGTHS[0], LENGTHS[5]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "mine.old"]


@pytest.mark.parametrize(
    "text", ["拿起\u3000杯子", "lift\u00a0it", "wave \U0001f468\u200d\U0001f469"]
)
def test_instructions_of_any_script_are_taken(text, recorded, tmp_path):
    edit_dataset([recorded], tmp_path / "new", Edit(keep=(0,), tasks=((None, text),)))
    assert open_dataset(tmp_path / "new").prompts == ((text,),)


def test_v21_becomes_v30(episodes, tmp_path):
    old = write_v21(tmp_path / "old", episodes, FEATURES, 20)
    edit_dataset([old], tmp_path / "new", Edit(delete=(0,)))
    new = open_dataset(tmp_path / "new")
    assert new.info["codebase_version"] == "v3.0"
    assert_taken(new, 1, open_dataset(old), 2)
    assert validate(tmp_path / "new") == []


def test_splits_are_datasets_of_their_own(recorded, tmp_path):
    plans = edit_dataset(
        [recorded], tmp_path / "new", Edit(splits=(("train", 0.7), ("val", 0.3)), delete=(0,))
    )
    assert {name: len(plan.parts) for name, plan in plans.items()} == {"train": 3, "val": 2}
    old = open_dataset(recorded)
    for name, of_old in (("train", (1, 2, 3)), ("val", (4, 5))):
        new = open_dataset(tmp_path / "new" / name)
        assert new.lengths.tolist() == [LENGTHS[j] for j in of_old]
        assert_taken(new, 1, old, of_old[1])
        assert validate(new.root) == []


def test_joined_datasets_share_their_tasks(tmp_path, recorded):
    other = write(tmp_path / "other", [make_episode(7, 4), make_episode(8, 6)])
    edit_dataset([other, recorded], tmp_path / "new", Edit())
    new, first, second = (open_dataset(p) for p in (tmp_path / "new", other, recorded))
    assert_taken(new, 1, first, 1)
    assert_taken(new, 4, second, 2)
    assert len(new.tasks) == 3
    for i in range(new.num_episodes):
        assert new.task(i) == (first.task(i) if i < 2 else second.task(i - 2))


def test_names_tasks_and_cameras_change(recorded, tmp_path):
    edit = Edit(
        names=((FRONT, "observation.images.top"), ("next.success", "done")),
        drop=(WRIST,),
        task_names=(("push it", '<script>alert("x")</script>'),),
        tasks=((None, "ignored"), ((0,), "hold it")),
        robot="arm",
    )
    edit_dataset([recorded], tmp_path / "a", edit)
    new = open_dataset(tmp_path / "a")
    assert (new.cameras, new.robot_type) == (("observation.images.top",), "arm")
    assert [new.task(i) for i in range(3)] == ["hold it", "ignored", "ignored"]
    np.testing.assert_array_equal(
        new.frames(3, new.cameras[0]), open_dataset(recorded).frames(3, FRONT)
    )
    assert {path.name for path in (tmp_path / "a/videos").iterdir()} == {"observation.images.top"}
    edit_dataset([recorded], tmp_path / "b", Edit(task_names=edit.task_names))
    assert open_dataset(tmp_path / "b").task(2) == '<script>alert("x")</script>'
    assert [p for p in validate(tmp_path / "b") if p.severity == "error"] == []


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_pictures_are_encoded_as_asked(codec, recorded, tmp_path):
    edit = Edit(keep=(0, 1), encoding=VideoEncoding(codec, crf=10, keyframe_interval=4))
    edit_dataset([recorded], tmp_path / "new", edit)
    old, new = open_dataset(recorded), open_dataset(tmp_path / "new")
    assert new.features[FRONT]["info"]["video.codec"] == codec
    for i in (0, 1):
        assert psnr(new.frames(i, FRONT), old.frames(i, FRONT)) > 32
    with av.open(str(next((tmp_path / "new/videos" / FRONT).rglob("*.mp4")))) as file:
        stream = file.streams.video[0]
        keys = [p.is_keyframe for p in file.demux(stream) if p.size]
        assert stream.codec_context.name.replace("libdav1d", "av1") == codec
    assert sum(keys) == 2 + 3  # of 7 and of 12 frames
    assert validate(tmp_path / "new") == []


def test_pictures_in_the_parquet_become_videos_where_a_codec_is_named(tmp_path):
    source = open_dataset(FIXTURES / "lerobot_png")
    edit_dataset([FIXTURES / "lerobot_png"], tmp_path / "new", Edit(encoding=VideoEncoding()))
    new = open_dataset(tmp_path / "new")
    for camera in source.cameras:
        assert new.features[camera]["dtype"] == "video"
        assert psnr(new.frames(1, camera), source.frames(1, camera)) > 25
    assert validate(tmp_path / "new") == []


def test_pictures_that_no_video_can_have_are_named_before_anything_is_written(tmp_path):
    mine = Path(shutil.copytree(FIXTURES / "lerobot_png", tmp_path / "mine"))
    info = json.loads((mine / "meta/info.json").read_text())
    camera = open_dataset(mine).cameras[0]
    info["features"][camera] |= {"shape": [3, 15, 17], "names": ["channels", "height", "width"]}
    (mine / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=rf"'{camera}' has images of 15 × 17 pixels, but a vid"):
        edit_dataset([mine], tmp_path / "new", Edit(encoding=VideoEncoding()))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_lower_rate_keeps_the_nearest_frames(recorded, tmp_path):
    edit_dataset([recorded], tmp_path / "new", Edit(fps=8, keep=(1, 4)))
    old, new = open_dataset(recorded), open_dataset(tmp_path / "new")
    at = [0, 3, 5, 8, 10]  # 20 / 8 = 2.5 frames apart
    assert (new.fps, new.lengths.tolist()) == (8, [5, 5])
    np.testing.assert_array_equal(new.columns(1)["action"], old.columns(4)["action"][at])
    np.testing.assert_allclose(new.columns(1)["timestamp"], np.arange(5) / 8, rtol=1e-6)
    for step, frame in enumerate(at):
        apart = [psnr(new.frames(1, FRONT)[step], one) for one in old.frames(4, FRONT)]
        assert int(np.argmax(apart)) == frame
    assert validate(tmp_path / "new") == []


def test_subtasks_travel_and_are_numbered_anew_where_datasets_are_joined(tmp_path):
    features = {"action": {"dtype": "float32", "shape": (1,), "names": None}}

    def record(name, words):
        with DatasetWriter(tmp_path / name, fps=10, features=features, subtasks=True) as writer:
            values = np.zeros((len(words), 1), np.float32)
            writer.add_episode({"action": values}, {}, "do it", words)
        return tmp_path / name

    paths = record("a", ["reach", "lift"]), record("b", ["lift", "turn"])
    edit_dataset(paths, tmp_path / "new", Edit())
    told = open_dataset(tmp_path / "new").subtasks
    assert [told.texts[task] for task in told.runs.task] == ["reach", "lift", "lift", "turn"]


PHASE = {"dtype": "int64", "shape": (1,), "names": None}


def counted(path, words, told):
    """A dataset whose own column counts the texts of its table."""
    features = {"action": PHASE | {"dtype": "float32"}, "phase": PHASE}
    with DatasetWriter(path, fps=10, features=features) as writer:
        for numbers in told:
            values = {"action": np.zeros((len(numbers), 1), np.float32), "phase": np.array(numbers)}
            writer.add_episode(values, {}, "do it")
    write_tasks(path, words, "subtask")
    (path / "meta/checksums.json").unlink()
    return path


def spelt(path, column):
    told = open_dataset(path).with_subtask_column(column).subtasks
    return [told.texts[task] for task in told.runs.task]


def test_subtasks_that_a_column_of_another_name_counts_keep_their_texts(tmp_path):
    path = counted(tmp_path / "a", ["reach", "grasp", "lift"], [[0, 0, 1], [1], [2, 0]])
    edit_dataset([path], tmp_path / "new", Edit(delete=(0,)))
    assert spelt(tmp_path / "new", "phase") == ["grasp", "lift", "reach"]
    edit_dataset([path, tmp_path / "new"], tmp_path / "joined", Edit(keep=(1, 4)))
    assert spelt(tmp_path / "joined", "phase") == ["grasp", "lift", "reach"]


def test_subtasks_under_a_new_name_keep_their_texts(tmp_path):
    features = {"action": PHASE | {"dtype": "float32"}}
    for name, told in (("a", ["reach", "lift"]), ("b", ["lift", "turn"])):
        with DatasetWriter(tmp_path / name, fps=10, features=features, subtasks=True) as writer:
            writer.add_episode({"action": np.zeros((2, 1), np.float32)}, {}, "do it", told)
    paths, renamed = [tmp_path / "a", tmp_path / "b"], Edit(names=(("subtask_index", "phase"),))
    edit_dataset(paths, tmp_path / "new", renamed)
    assert spelt(tmp_path / "new", "phase") == ["reach", "lift", "lift", "turn"]


def test_columns_that_count_unlike_tables_are_joined_under_lerobots_name_alone(tmp_path):
    paths = [
        counted(tmp_path / "a", ["reach", "lift"], [[0, 1]]),
        counted(tmp_path / "b", ["lift", "turn"], [[0, 1]]),
    ]
    with pytest.raises(ValueError, match=r"/a and .*/b cannot be joined: their meta/subtasks\.par"):
        edit_dataset(paths, tmp_path / "new", Edit())
    assert not (tmp_path / "new").exists()
    edit_dataset(paths, tmp_path / "new", Edit(names=(("phase", "subtask_index"),)))
    assert spelt(tmp_path / "new", "subtask_index") == ["reach", "lift", "lift", "turn"]


def test_files_of_others_in_meta_travel(recorded, tmp_path):
    mine = Path(shutil.copytree(recorded, tmp_path / "mine"))
    (mine / "meta/modality.json").write_text('{"state": {}}')
    for cache in ("stats_gr00t.json", "steps_data_index.pkl"):
        (mine / "meta" / cache).write_text("of the old frames")
    edit_dataset([mine], tmp_path / "new", Edit(delete=(0,)))
    assert (tmp_path / "new/meta/modality.json").read_text() == '{"state": {}}'
    assert not {*(tmp_path / "new/meta").glob("ste*"), *(tmp_path / "new/meta").glob("*gr00t*")}


PARTS = {
    "state": {"arm": {"start": 0, "end": 4, "absolute": True}},
    "action": {"arm": {"start": 0, "end": 3, "original_key": "action"}},
    "video": {"ego": {"original_key": FRONT}, WRIST.removeprefix("observation.images."): {}},
    "annotation": {"task": {"original_key": "task_index"}, "success": {"original_key": DONE}},
}


def test_groots_names_follow_those_of_columns_and_cameras(recorded, tmp_path):
    mine = Path(shutil.copytree(recorded, tmp_path / "mine"))
    (mine / "meta/modality.json").write_text(json.dumps(PARTS))
    renamed = (("observation.state", "proprio"), (FRONT, "cam"), (WRIST, "hand"))
    splits = (("a", 0.5), ("b", 0.5))
    edit_dataset([mine], tmp_path / "new", Edit(names=renamed, drop=(DONE,), splits=splits))
    for name in "ab":
        assert json.loads((tmp_path / "new" / name / "meta/modality.json").read_text()) == {
            "state": {"arm": PARTS["state"]["arm"] | {"original_key": "proprio"}},
            "action": PARTS["action"],
            "video": {
                "ego": {"original_key": "cam"},
                WRIST.removeprefix("observation.images."): {"original_key": "hand"},
            },
            "annotation": {"task": {"original_key": "task_index"}},
        }
    edit_dataset([mine], tmp_path / "one", Edit(drop=(FRONT,)))
    assert list(read_modality(tmp_path / "one/meta/modality.json").video.values()) == [WRIST]
    edit_dataset([mine], tmp_path / "none", Edit(drop=(FRONT, WRIST)))
    assert not (tmp_path / "none/meta/modality.json").exists()


def test_a_modality_that_cannot_be_renamed_is_named(recorded, tmp_path):
    mine = Path(shutil.copytree(recorded, tmp_path / "mine"))
    (mine / "meta/modality.json").write_text('{"video": []}')
    with pytest.raises(DatasetError, match=r"modality\.json, video: is not a JSON object; correct"):
        edit_dataset([mine], tmp_path / "new", Edit(drop=(FRONT,)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit(delete=(0, 1, 2, 3, 4, 5)), "removes all 6 episodes"),
        (Edit(delete=(6,)), "delete names episode 6; there are 6, numbered 0 to 5"),
        (Edit(keep=(1, 1)), "keep names episode 1 twice"),
        (Edit(delete=(1,), order=(1,)), "order names episode 1, which the edit removes"),
        (Edit(trims=(Trim((0,), 7, None),)), "Episode 0 has frames 0 to 6, but trim keeps 7"),
        (Edit(splits=(("a", (0,)), ("b", (0,)))), "Episode 0 is in two splits"),
        (Edit(splits=(("a", 0.7), ("b", 0.7))), "shares of the splits add up to 1.4"),
        (Edit(splits=(("../a", 0.7),)), "cannot be used as a file name"),
        (Edit(drop=("action.x",)), "drop names 'action.x', but the columns and cameras are"),
        (Edit(drop=("timestamp",)), "every LeRobot dataset has the columns"),
        (Edit(names=((FRONT, WRIST),)), f"two columns named '{WRIST}'"),
        (Edit(names=((FRONT, "a/b"),)), "rename: 'a/b' cannot be used as a file name"),
        (Edit(robot="arm/left"), "robot: 'arm/left' cannot be used as a file name"),
        (Edit(trims=(Trim(None, 0, 0),)), "but trim keeps 0 to -1; keep at least one"),
        (Edit(tasks=((None, " "),)), "A task would become ' '"),
        (Edit(tasks=((None, "a\u2028b"),)), "has no line breaks or control characters"),
        (Edit(tasks=((None, "a\x1bb"),)), "has no line breaks or control characters"),
        (Edit(task_names=(("nothing", "x"),)), "There is no task 'nothing' to rename"),
        (Edit(fps=40), "fps is 40, but a dataset has 20"),
    ],
)
def test_an_edit_that_does_not_fit_is_one_sentence_and_writes_nothing(
    edit, message, recorded, tmp_path
):
    with pytest.raises(ValueError, match=message) as raised:
        edit_dataset([recorded], tmp_path / "new", edit)
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("action"), "only one of them has 'action'"),
        (lambda f: f["action"].update(shape=(2,)), r"'action' has shape \(3,\) in one"),
        (lambda f: f["action"].update(dtype="float64"), "'action' is float32 in one and"),
        (lambda f: f["observation.state"].update(names=["x", "z", "y", "grip"]), "the dimensions"),
    ],
)
def test_unlike_datasets_are_not_joined(change, message, recorded, tmp_path):
    features = {name: dict(feature) for name, feature in FEATURES.items() if name != FRONT}
    features = {FRONT: FEATURES[FRONT], **features}
    change(features)
    episode = make_episode(0, 5)
    columns = {
        name: episode.columns[name][..., : features[name]["shape"][0]]
        if name == "action"
        else episode.columns[name]
        for name in episode.columns
        if name in features
    }
    with DatasetWriter(tmp_path / "b", fps=20, features=features, robot_type="test") as writer:
        writer.add_episode(columns, episode.frames, "x")
    with pytest.raises(ValueError, match=message):
        edit_dataset([recorded, tmp_path / "b"], tmp_path / "new", Edit())
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("names", [[["x", "y", "z", "grip"]], {"motors": ["x", "y", "z", "grip"]}])
def test_datasets_that_write_the_same_names_in_other_ways_are_joined(names, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "other")
    info = json.loads((tmp_path / "other/meta/info.json").read_text())
    info["features"]["observation.state"]["names"] = names
    (tmp_path / "other/meta/info.json").write_text(json.dumps(info))
    edit_dataset([tmp_path / "other", recorded], tmp_path / "new", Edit())
    new, old = open_dataset(tmp_path / "new"), open_dataset(recorded)
    assert np.array_equal(new.column("action"), np.concatenate([old.column("action")] * 2))
    told = difference(open_dataset(tmp_path / "other"), old, lambda *_: None)
    assert [d.name for d in told.dims][:4] == ["x", "y", "z", "grip"]
    assert "x, y, z, grip" in new._repr_html_()


@pytest.mark.parametrize("kind", [pa.float64(), pa.float16(), pa.int32()])
def test_a_column_of_another_type_than_declared_is_cast(kind, recorded, tmp_path):
    wrong = Path(shutil.copytree(recorded, tmp_path / "wrong"))
    (wrong / "meta/checksums.json").unlink()
    edit_column(wrong, PARQUET, "action", lambda v, _: (
        [[np.float16(round(x)) for x in row] for row in v], pa.list_(kind)
    ))  # fmt: skip
    (problem,) = [p for p in validate(wrong) if p.severity == "error"]
    assert "as `python -m tools.data edit --cast action float32` does." in problem.message
    edit_dataset([wrong], tmp_path / "new", Edit(casts=(("action", "float32"),)))
    new, old = open_dataset(tmp_path / "new"), open_dataset(recorded)
    assert validate(new.root) == []
    assert new.features["action"]["dtype"] == "float32"
    assert np.array_equal(new.column("action"), old.column("action").round())
    assert np.array_equal(new.column("observation.state"), old.column("observation.state"))


def test_a_cast_changes_no_number_and_lets_datasets_be_joined(recorded, tmp_path):
    doubles = (("action", "float64"), ("next.success", "int64"))
    edit_dataset([recorded], tmp_path / "doubles", Edit(casts=doubles))
    new, old = open_dataset(tmp_path / "doubles"), open_dataset(recorded)
    assert new.column("action").dtype == np.float64
    assert np.array_equal(new.column("action"), old.column("action"))
    back = Edit(casts=(("action", "float32"), ("next.success", "bool")))
    edit_dataset([recorded, tmp_path / "doubles"], tmp_path / "both", back)
    both = open_dataset(tmp_path / "both")
    for name in ("action", "next.success"):
        assert both.column(name).dtype == old.column(name).dtype
        assert np.array_equal(both.column(name), np.concatenate([old.column(name)] * 2))
    with pytest.raises(DatasetError, match=r"column 'action': is .* at step 0 .* int8 cannot hold"):
        edit_dataset([recorded], tmp_path / "x", Edit(casts=(("action", "int8"),)))
    for casts in ((FRONT, "float32"), ("action", "string"), ("action", "float33")):
        with pytest.raises(ValueError, match="name a column of numbers, and a type such as"):
            edit_dataset([recorded], tmp_path / "y", Edit(casts=(casts,)))


def test_other_rates_and_robots_are_not_joined(recorded, tmp_path):
    for name, change in (("fast", {"fps": 10}), ("other", {"robot_type": "another"})):
        mine = Path(shutil.copytree(recorded, tmp_path / name))
        info = json.loads((mine / "meta/info.json").read_text())
        (mine / "meta/info.json").write_text(json.dumps(info | change))
    with pytest.raises(ValueError, match=r"The datasets have 10, 20 fps; give a rate"):
        edit_dataset([recorded, tmp_path / "fast"], tmp_path / "new", Edit())
    with pytest.raises(ValueError, match=r"shows the robot 'test' and .* 'another'"):
        edit_dataset([recorded, tmp_path / "other"], tmp_path / "new", Edit())


def test_packets_that_are_gone_stop_an_edit_by_name(copy, tmp_path):
    path = next((copy / "videos" / WRIST).rglob("*.mp4"))
    path.write_bytes(encode_mp4(make_episode(0, 9).frames[WRIST], 20, {"g": "2"}))
    with pytest.raises(DatasetError, match=r"file-000\.mp4, frame \d+: "):
        edit_dataset([copy], tmp_path / "new", Edit())
    assert not (tmp_path / "new").exists()
