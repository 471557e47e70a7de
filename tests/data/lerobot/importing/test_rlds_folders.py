"""RLDS as TFDS wrote it (tests/fixtures/rlds) becomes LeRobot datasets of the same steps."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.rlds.dataset import open_rlds
from data.validation.validate import validate

FIXTURES = Path(__file__).parents[3] / "fixtures/rlds"
EXTERIOR = "observation.exterior_image_1_left"
LAYOUT = {
    "like": "rlds",
    "columns": {
        "observation.state": ["observation.pose", "observation.gripper_position"],
        "action": {"from": "action", "dims": [6, 0]},
        "ticks": "observation.ticks",
    },
    "cameras": {"observation.images.front": EXTERIOR},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def layout(tmp_path, told="", **changed):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT | changed))
    return read_layout(str(path), task=told, fps=15)


def shards(tmp_path, first, lengths):
    """Some of the fixture's shards, as a dataset of their own."""
    folder = tmp_path / "robot/1.0.0"
    folder.mkdir(parents=True)
    info = json.loads((FIXTURES / "tfrecord/dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = lengths
    (folder / "dataset_info.json").write_text(json.dumps(info))
    shutil.copy(FIXTURES / "tfrecord/features.json", folder)
    for k in range(len(lengths)):
        source = FIXTURES / f"tfrecord/robot-train.tfrecord-0000{first + k}-of-00004"
        shutil.copy(source, folder / f"robot-train.tfrecord-0000{k}-of-0000{len(lengths)}")
    return folder.parent


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_steps_become_frames_with_the_values_and_pictures_of_rlds(tmp_path, kind):
    found = import_dataset([FIXTURES / kind], tmp_path / "out", layout(tmp_path, "do <it>"))
    old, new = open_rlds(FIXTURES / kind, 15), open_dataset(tmp_path / "out")
    assert (found.recordings, found.episodes, new.fps) == (1, 5, 15)
    assert new.lengths.tolist() == old.lengths.tolist()
    assert new.prompts == (("do <it>",),)
    for i in range(5):
        mine, theirs = new.columns(i), old.columns(i)
        pose = theirs["observation.pose"].reshape(-1, 6)
        state = np.concatenate([pose, theirs["observation.gripper_position"]], axis=1)
        np.testing.assert_array_equal(mine["observation.state"], state.astype(np.float32))
        np.testing.assert_array_equal(mine["action"], theirs["action"][:, [6, 0]])
        np.testing.assert_array_equal(mine["ticks"], theirs["observation.ticks"])
        seen = new.frames(i, "observation.images.front").astype(int)
        assert np.abs(seen - old.frames(i, EXTERIOR)).mean() < 6
    assert [p for p in validate(tmp_path / "out") if p.severity == "error"] == []


def test_the_known_layout_takes_all_numbers_and_pictures_and_each_episodes_words(tmp_path):
    source = shards(tmp_path, 1, ["1"])
    import_dataset([source], tmp_path / "out", read_layout("rlds", fps=15))
    old, new = open_rlds(source, 15), open_dataset(tmp_path / "out")
    assert new.prompts == (("put the pen in the cup",),)
    assert new.cameras == tuple(
        f"observation.images.{c.removeprefix('observation.')}" for c in old.cameras
    )
    numbers = {n for n in old.column_names if not n.startswith("language_")}
    assert set(new.column_names) == numbers
    np.testing.assert_array_equal(new.column("mode"), old.column("mode"))
    assert new.column("is_last").ravel().tolist() == [False] * 5 + [True]


def test_an_interrupted_import_goes_on_to_the_same_dataset(tmp_path):
    told = layout(tmp_path, "go")
    import_dataset([FIXTURES / "tfrecord"], tmp_path / "whole", told)

    def stop(what, done, total):
        if (what, done) == ("Importing", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_dataset([FIXTURES / "tfrecord"], tmp_path / "out", told, progress=stop)
    assert open_dataset(tmp_path / "out").num_episodes == 3
    import_dataset([FIXTURES / "tfrecord"], tmp_path / "out", told, resume=True)
    assert open_dataset(tmp_path / "out").digest == open_dataset(tmp_path / "whole").digest


@pytest.mark.parametrize(
    ("changed", "task", "message"),
    [
        ({}, "", "episode 0: names no instruction in 'language_instruction'; give one for all"),
        ({"task": {"from": "words"}}, "", "'words': is not a text column of the steps, which are"),
        (
            {"cameras": {"observation.images.hand": "observation.wrist_image_left"}},
            "go",
            "'observation.wrist_image_left': is missing in episode 3, but every episode needs",
        ),
        ({"columns": {"action": "actions"}}, "go", "'actions': is missing, but the layout takes"),
        ({"columns": {"words": "language_instruction"}}, "go", "'language_.*': is missing, but"),
        ({"time": "reward"}, "go", "time: is given, but RLDS has steps at a steady rate"),
    ],
)
def test_what_cannot_be_imported_is_said_before_anything_is_written(
    tmp_path, changed, task, message
):
    with pytest.raises(ValueError, match=message):
        import_dataset([FIXTURES / "tfrecord"], tmp_path / "out", layout(tmp_path, task, **changed))
    assert not (tmp_path / "out").exists()


def test_an_episode_of_several_instructions_has_the_first_and_it_is_said(tmp_path, caplog):
    source = shards(tmp_path, 2, ["2"])
    old = open_rlds(source, 15)
    assert np.bincount(old.runs.episode).tolist() == [2, 1]
    import_dataset([source], tmp_path / "out", layout(tmp_path))
    assert open_dataset(tmp_path / "out").task(0) == "close the drawer"
    assert "1 episodes have several instructions, one after the other (first: episode 0)" in (
        caplog.text
    )
    with pytest.raises(
        ValueError, match="rlds: layout: fps is 0; give 1 to 1000 frames per second"
    ):
        read_layout("rlds")


def test_a_layout_may_name_the_field_of_the_instruction(tmp_path):
    source, second = shards(tmp_path, 1, ["1"]), {"from": "language_instruction_2"}
    import_dataset([source], tmp_path / "out", layout(tmp_path, task=second))
    assert open_dataset(tmp_path / "out").task(0) == "pen into the cup, please"
