"""Idle stretches: what stands still or was recorded twice, and training without it."""

import json

import numpy as np
import pytest

from data import open_dataset
from data.dataset import Runs
from data.frames import usual_columns
from data.lerobot.writer import DatasetWriter
from data.mixture.frame_filter import FrameFilter, read_filter, runs_within
from data.mixture.mixed import mix
from data.mixture.mixture import read_mixture
from data.statistics.difference import difference
from data.statistics.episodes import episode_facts
from data.statistics.idle import (
    IdleLimits,
    digest_of_lengths,
    find_idle,
    noisy_dims,
    ranges,
    to_json,
)
from data.view.idle_page import write_idle_page
from data.view.view import _columns
from tests.helpers.data.damage import rename_columns
from tests.helpers.data.memory_frames import MemoryFrames
from tools.datasets.idle import idle_command
from tools.serving.replay import open_replay

FPS = 10
FEATURES = {
    name: {"dtype": "float32", "shape": (2,), "names": None}
    for name in ("observation.state", "action")
}


def walk(moving):
    """A path that goes on where `moving` and stays, but for a sensor's noise, where not."""
    rng = np.random.default_rng(len(moving))
    at = np.cumsum(np.where(moving, 0.05, 0.0))
    noise = rng.normal(scale=1e-4, size=(len(moving), 2))
    return (np.stack([at, -at], axis=1) + noise).astype(np.float32)


def write(path, paths):
    with DatasetWriter(path, fps=FPS, features=FEATURES) as writer:
        for values in paths:
            writer.add_episode(dict.fromkeys(FEATURES, values), {}, "<b>go</b>")
    return open_dataset(path)


@pytest.fixture
def dataset(tmp_path):
    waits = np.ones(80, bool)
    waits[:15] = waits[40:55] = False
    twice = walk(np.ones(60, bool))
    twice[21:40:2] = twice[20:40:2]
    return write(tmp_path / "set", [walk(waits), walk(np.ones(70, bool)), twice])


def test_still_and_doubled_stretches_are_found_where_they_are(dataset):
    found = list(find_idle(dataset, IdleLimits()))
    still = ranges(found[0].still)
    assert len(still) == 2
    for (first, stop), (begin, end) in zip(still, ((0, 15), (40, 55)), strict=True):
        assert abs(first - begin) <= 2
        assert abs(stop - end) <= 2
    assert not found[1].still.any()
    assert not found[1].doubled.any()
    assert np.flatnonzero(found[2].doubled).tolist() == list(range(21, 40, 2))


def test_a_noisy_dimension_is_named_with_its_noise(tmp_path, capsys):
    waits = np.ones(400, bool)
    waits[100:200] = waits[300:] = False
    values = [walk(waits) for _ in range(4)]
    extent = np.ptp(values[0][:, 1])
    for n, each in enumerate(values):
        each[:, 1] += np.random.default_rng(n).normal(scale=0.02 * extent, size=400)
    dataset, limits = write(tmp_path / "set", values), IdleLimits()
    found = list(find_idle(dataset, limits))
    assert not any(idle.still.any() for idle in found)
    noisy = noisy_dims(dataset, limits, found)
    assert {(one.column, one.dim) for one in noisy} == {(name, 1) for name in FEATURES}
    assert all(0.014 < one.noise < 0.026 for one in noisy)
    least = IdleLimits(still=1.2 * noisy[0].quietest)
    assert sum(int(idle.still.sum()) for idle in find_idle(dataset, least)) > 0
    idle_command(str(dataset.root))
    said = " ".join(capsys.readouterr().out.split())
    assert "never still: observation.state '1', which passes through" in said
    assert "2 noisy dimensions may hide what else stands still; give --still" in said
    quiet = write(tmp_path / "quiet", [walk(waits)])
    assert noisy_dims(quiet, limits, list(find_idle(quiet, limits))) == []


def test_a_pause_shorter_than_asked_for_is_no_stretch(dataset):
    assert not any(idle.still.any() for idle in find_idle(dataset, IdleLimits(seconds=2.0)))


@pytest.mark.parametrize(
    "names",
    [("state", "actions"), ("observation.state.joint_position", "action.joint_position")],
)
def test_state_and_actions_are_known_by_the_names_of_the_field(dataset, tmp_path, names):
    mapping = dict(zip(FEATURES, names, strict=True))
    renamed = open_dataset(rename_columns(dataset.root, tmp_path / "renamed", mapping))
    limits = IdleLimits()
    for ours, theirs in zip(find_idle(dataset, limits), find_idle(renamed, limits), strict=True):
        assert np.array_equal(ours.moved, theirs.moved)
    facts = [episode_facts(one, limits, (), lambda *_: None) for one in (dataset, renamed)]
    assert np.array_equal(facts[0].jerk, facts[1].jerk)
    assert list(facts[1].stats) == list(names)
    told = difference(dataset, renamed, lambda *_: None)
    assert told.findings == ()
    assert [(d.column, d.outside) for d in told.dims] == [(n, 0.0) for n in FEATURES for _ in "xy"]
    assert list(_columns(renamed, 0)) == list(names)
    actions = [dataset.columns(1)["action"], open_replay(renamed.root, 1, 5)._actions]
    assert np.array_equal(*actions)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["actions", "state", "timestamp"], (("state",), ("actions",))),
        (["state", "observation.state", "action.a"], (("observation.state",), ("action.a",))),
        (
            ["observation.states.joint.position", "actions.head.position", "actions.end.position"],
            (
                ("observation.states.joint.position",),
                ("actions.head.position", "actions.end.position"),
            ),
        ),
        (
            [
                *("observation.state.q", "observation.state.timestamp", "observation.state.index"),
                *("action.q", "action.is_pad", "action.done"),
            ],
            (("observation.state.q",), ("action.q",)),
        ),
        (["joint_position", "action_mask", "stateful"], ((), ())),
    ],
)
def test_usual_columns_are_whole_ones_or_else_all_parts(names, found):
    assert usual_columns(names) == found


def test_columns_that_tell_nothing_are_named(dataset):
    with pytest.raises(ValueError, match="no numeric column 'wheels'"):
        list(find_idle(dataset, IdleLimits(), ["wheels"]))
    with pytest.raises(ValueError, match=r"still is 1 and seconds 1; give"):
        IdleLimits(still=1)


def test_a_mixture_draws_no_frame_that_is_left_out(dataset, tmp_path):
    found = list(find_idle(dataset, IdleLimits()))
    (tmp_path / "idle.json").write_text(json.dumps(to_json(dataset, IdleLimits(), found)))
    text = {"datasets": [{"path": "set", "frames": "idle.json"}, {"path": "set"}]}
    (tmp_path / "mixture.json").write_text(json.dumps(text))
    mixture = read_mixture(tmp_path / "mixture.json")
    shown = MemoryFrames(lengths=dataset.lengths, fps=FPS)
    mixed = mix(mixture, [shown, shown], 4)
    drawn = [set(), set()]
    for feed, frames in zip(mixed.feeds, drawn, strict=True):
        for episode, first, length, _ in zip(
            *map(np.ndarray.tolist, feed.frames.runs), strict=True
        ):
            frames |= {(episode, frame) for frame in range(first, first + length)}
    idle = {
        (i, frame)
        for i, one in enumerate(found)
        for frame in np.flatnonzero(one.still | one.doubled).tolist()
    }
    assert drawn[1] - drawn[0] == idle
    assert len(idle) > 30
    whole = {"datasets": [{"path": "set"}, {"path": "set"}]}
    (tmp_path / "mixture.json").write_text(json.dumps(whole))
    assert mix(read_mixture(tmp_path / "mixture.json"), [shown, shown], 4).digest != mixed.digest


def test_runs_are_cut_where_ranges_end():
    lengths = np.array([10, 6, 4])
    runs = Runs(*np.array([[0, 0, 4, 0], [0, 4, 6, 1], [1, 0, 6, 0], [2, 0, 4, 1]]).T)
    keep = np.array([[0, 2, 5], [0, 5, 6], [0, 8, 10], [2, 0, 4]]).T
    cut = runs_within(runs, FrameFilter(*keep), np.cumsum(lengths) - lengths)
    rows = np.stack(cut, axis=1).tolist()
    frames = [(e, f, t) for e, first, n, t in rows for f in range(first, first + n)]
    assert frames == [
        *((0, f, 0 if f < 4 else 1) for f in (2, 3, 4, 5, 8, 9)),
        *((2, f, 1) for f in range(4)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": 5}, "was made for a dataset with 5 frames, but this one has 14"),
        (
            {"lengths": digest_of_lengths(np.array([6, 8]))},
            "was made for a dataset with as many frames but other episode lengths",
        ),
        ({"keep": []}, "has no table 'keep'"),
        ({"keep": {"0": [[3, 9]]}}, "keep has .* for episode '0'"),
        ({"keep": {"0": [[3, 2]]}}, "keep has"),
        ({"keep": {"<b>": []}}, "keep has"),
        ({"keep": {"0": [], "1": []}}, "keeps no frame at all"),
    ],
)
def test_a_file_of_frames_that_does_not_fit_is_refused(change, message, tmp_path):
    path = tmp_path / "idle.json"
    path.write_text(json.dumps({"episodes": 2, "frames": 14, "keep": {}} | change))
    with pytest.raises(ValueError, match=message):
        read_filter(str(path), np.array([8, 6]))
    with pytest.raises(FileNotFoundError, match="this file of frames does not exist"):
        read_filter(str(tmp_path / "none"), np.array([8, 6]))


def test_the_page_draws_every_stretch_and_says_the_limits(dataset, tmp_path):
    found = list(find_idle(dataset, IdleLimits()))
    write_idle_page(dataset, IdleLimits(), found, tmp_path / "idle.html")
    page = (tmp_path / "idle.html").read_text()
    assert page.count('class="still"') == 2
    assert page.count('class="doubled"') == 10
    assert "1 % of its range for 1 s" in page
