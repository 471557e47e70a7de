"""The command that records a dataset."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from data import open_dataset
from models.files.terminal import Console
from sim.environments.device_slots import DeviceSlots
from sim.environments.tabletop import Tabletop
from sim.protocol import EVAL_SEEDS, TRAIN_SEEDS
from sim.suites import load_suite
from tests.helpers.sim.point_suite import TWO_TASKS
from tools.record import RecordConfig, main, record_dataset


def test_a_recorded_dataset_opens_with_its_episodes_words_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("sim.environments.tabletop.Tabletop", partial(Tabletop, group_size=16))
    calls = []
    config = RecordConfig(tmp_path / "demos", suite="tabletop-reach", episodes=6, seed=2)
    summary = record_dataset(config, lambda done, total: calls.append((done, total)))
    dataset = open_dataset(tmp_path / "demos")
    assert calls == [(i, 6) for i in range(1, 7)]
    assert (summary["kept"], summary["frames"]) == (6, dataset.num_frames)
    assert summary["tried"] >= 6
    assert dataset.cameras == ("observation.images.front",)
    assert dataset.fps == 20
    episode = dataset.episode(0)
    assert episode["action"].shape == episode["observation.state"].shape
    assert episode["observation.images.front"].shape[1:] == (48, 48, 3)
    assert np.ptp(episode["observation.images.front"]) > 100
    assert any(colour in episode["task"] for colour in ("red", "green", "blue"))


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ValueError, match="already exists and is not empty"):
        record_dataset(RecordConfig(tmp_path, episodes=1))
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_numbers_that_make_no_recording_are_named(tmp_path):
    with pytest.raises(ValueError, match="episodes = 0"):
        record_dataset(RecordConfig(tmp_path / "none", episodes=0))
    for option in ({"draw_every": 2}, {"antialias": False}):
        with pytest.raises(ValueError, match="'tabletop-lift' cannot draw more cheaply"):
            record_dataset(RecordConfig(tmp_path / "none", **option))
    assert not (tmp_path / "none").exists()


def test_a_users_suite_is_recorded_by_its_expert_task_by_task(tmp_path):
    """Tasks that cannot share slots follow one another."""
    file = tmp_path / "mine.py"
    file.write_text(TWO_TASKS)
    config = RecordConfig(tmp_path / "demos", f"{file}:MINE", episodes=4, noise=0.3, slots=3)
    summary = record_dataset(config)
    dataset = open_dataset(tmp_path / "demos")
    assert (summary["kept"], summary["failed"], dataset.num_episodes) == (8, 0, 8)
    assert dataset.cameras == ("top",)
    assert dataset.episode(5)["top"].shape[1:] == (32, 32, 3)
    with pytest.raises(ValueError, match=r"has no task \['absent'\], only \['near', 'far'\]"):
        record_dataset(replace(config, out=tmp_path / "none", tasks=("absent",)))
    assert not (tmp_path / "none").exists()


def test_a_suite_of_any_name_is_recorded_to_what_opens(tmp_path):
    """As gym:ALE/Pong-v5 is called."""
    file = tmp_path / "mine.py"
    file.write_text(TWO_TASKS.replace('"mine"', '"gym:own/Point-v0"'))
    record_dataset(RecordConfig(tmp_path / "demos", f"{file}:MINE", tasks=("near",), episodes=1))
    assert open_dataset(tmp_path / "demos").robot_type == "gym:own-Point-v0"


def test_noise_that_is_not_given_is_the_suites(tmp_path):
    (tmp_path / "mine.py").write_text(TWO_TASKS)
    record = partial(RecordConfig, suite=f"{tmp_path / 'mine.py'}:MINE", tasks=("near",))
    for name, given in (("usual", {}), ("same", {"noise": 0.4}), ("none", {"noise": 0.0})):
        record_dataset(record(tmp_path / name, episodes=2, **given))
    seen = [
        open_dataset(tmp_path / name).episode(1)["observation.state"]
        for name in ("usual", "same", "none")
    ]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0][:3], seen[2][:3])


def test_a_recording_never_begins_where_policies_are_judged(tmp_path):
    """LIBERO's published initial states are the seeds below its `recorded_from`."""
    text = TWO_TASKS.replace("noise=0.4", "noise=0.0, recorded_from=1_000_003")
    (tmp_path / "mine.py").write_text(text + "\nOTHER = replace(MINE, recorded_from=3)\n")
    for name, suite, seed in (("a", "MINE", 0), ("b", "OTHER", 1), ("c", "OTHER", 0)):
        suite = f"{tmp_path / 'mine.py'}:{suite}"
        record_dataset(RecordConfig(tmp_path / name, suite, ("near",), episodes=1, seed=seed))
    a, b, c = (open_dataset(tmp_path / name).episode(0)["observation.state"] for name in "abc")
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_a_recording_of_starts_that_policies_are_judged_by_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        TWO_TASKS + "\nLEARNT = replace(MINE, first_seed=0)\n"
        "NEAR = replace(MINE, first_seed=2_000_007)\n"
    )
    record = partial(RecordConfig, tmp_path / "none", tasks=("near",), episodes=1)
    with pytest.raises(ValueError, match="judged by seeds 0 … 7, and recordings begin with seed 0"):
        record_dataset(record(f"{tmp_path / 'mine.py'}:LEARNT"))
    with pytest.raises(ValueError, match=r"Recording 2 .*evaluated on, 2000007 … 2000014; choose"):
        record_dataset(record(f"{tmp_path / 'mine.py'}:NEAR", seed=2))
    with pytest.raises(ValueError, match=r"may try seeds 0 … 2000019, .*or fewer --episodes"):
        record_dataset(replace(record(f"{tmp_path / 'mine.py'}:NEAR"), episodes=100_001))
    assert not (tmp_path / "none").exists()


def test_a_suite_that_tells_no_seeds_is_not_judged_by_what_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(TWO_TASKS)
    suite, begin, begun = f"{tmp_path / 'mine.py'}:MINE", DeviceSlots.begin, []

    def noted(slots, slot, start):
        begun.append(start.seed)
        begin(slots, slot, start)

    monkeypatch.setattr(DeviceSlots, "begin", noted)
    record_dataset(RecordConfig(tmp_path / "set", suite, ("near",), episodes=4))
    assert min(begun) == TRAIN_SEEDS.start
    assert max(begun) < TRAIN_SEEDS.stop
    assert load_suite(suite).judged(4) == EVAL_SEEDS[:4]


def test_a_folder_that_looks_like_markup_is_recorded_into(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    file = tmp_path / "mine.py"
    file.write_text(TWO_TASKS)
    out = tmp_path / "a[/b]c"
    main(RecordConfig(out, f"{file}:MINE", episodes=1), Console())
    assert f"{out}: 2 episodes" in capsys.readouterr().out


def test_resuming_a_recording_that_is_whole_says_so_and_invents_no_counts(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(TWO_TASKS)
    config = RecordConfig(tmp_path / "set", f"{tmp_path / 'mine.py'}:MINE", ("near",), episodes=2)
    frames = record_dataset(config)["frames"]
    again = record_dataset(replace(config, resume=True))
    assert (again["tried"], again["kept"], again["failed"]) == (None, 2, None)
    main(replace(config, resume=True), Console(width=300))
    said = capsys.readouterr().out
    assert f"set: 2 episodes, {frames} frames; the recording was already complete." in said
    assert "tried" not in said


def test_a_recording_interrupted_before_its_files_are_joined_has_all_episodes(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.py").write_text(TWO_TASKS)
    config = RecordConfig(tmp_path / "set", f"{tmp_path / 'mine.py'}:MINE", episodes=3)

    def interrupt(writer, root):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data.lerobot.writer.DatasetWriter._join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            record_dataset(config)
    assert open_dataset(tmp_path / "set").num_episodes == 6
    with pytest.raises(ValueError, match=r"was recorded with noise None, but now it is 0\.2"):
        record_dataset(replace(config, noise=0.2, resume=True))
    summary = record_dataset(replace(config, resume=True))
    whole = record_dataset(replace(config, out=tmp_path / "whole"))
    assert [summary[k] for k in ("tried", "kept", "frames")] == [
        whole[k] for k in ("tried", "kept", "frames")
    ]
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            other = tmp_path / "set" / path.relative_to(tmp_path / "whole")
            assert other.read_bytes() == path.read_bytes()


def test_a_recording_that_an_edit_has_replaced_but_not_put_away_is_not_removed(tmp_path):
    (tmp_path / "mine.py").write_text(TWO_TASKS)
    config = RecordConfig(tmp_path / "set", f"{tmp_path / 'mine.py'}:MINE", episodes=1)
    record_dataset(config)
    (tmp_path / "set/edit.jsonl").touch()
    recording = tmp_path / "set.partial/meta/recording.jsonl"
    recording.parent.mkdir(parents=True)
    recording.touch()
    with pytest.raises(ValueError, match="set: its edit --in-place was interrupted; run the same"):
        record_dataset(replace(config, resume=True))
    assert recording.is_file()
