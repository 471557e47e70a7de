"""Mixtures: what each dataset becomes in them, the statistics of a robot, and errors by field."""

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from data.dataset import Runs
from data.frames import ACTION, STATE
from data.mixture.embodiments import embodiment_stats
from data.mixture.mixed import mix
from data.mixture.mixture import DatasetConfig, Mixture, RobotConfig, read_mixture
from data.mixture.relabelled import RelabelledFrames
from data.mixture.trust import always
from data.statistics.scaling import normalizer
from data.statistics.stats import describe
from models import Embodiment
from models.config import from_json, to_json
from tests.helpers.data.memory_frames import MemoryFrames
from tests.helpers.models.processors import word_processor

A = MemoryFrames("first", cameras=("observation.images.front", "observation.images.wrist"))
B = MemoryFrames("second", lengths=(30, 41), fps=50, cameras=("cam_high",), digest="b")
ARM = RobotConfig("arm", ("front", "wrist"))
OF_A = DatasetConfig("a", "arm")
OF_B = DatasetConfig("b", "arm", cameras={"front": "cam_high"})


def pair(robot: RobotConfig, **changes) -> Mixture:
    return Mixture((OF_A, replace(OF_B, **changes)), (robot,))


def columns(frames: MemoryFrames) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(int(frames.lengths.sum()))
    return frames.column(STATE, rows), frames.column(ACTION, rows)


def assert_same(stats, values) -> None:
    for name, expected in describe(values).items():
        np.testing.assert_allclose(stats[name], expected, rtol=1e-12, err_msg=name)


def test_a_single_dataset_is_taken_as_its_store_has_it():
    made = mix(Mixture((DatasetConfig("a"),)), [A], 4)
    (robot,), (feed,) = made.embodiments, made.feeds
    assert (robot.name, robot.cameras) == ("first", A.cameras)
    assert feed.frames is A
    assert (feed.cameras, feed.ahead) == (A.cameras, (0, 1, 2, 3))
    assert robot.actions == normalizer(A.stats[ACTION], ACTION)
    np.testing.assert_array_equal(made.training[0], np.arange(4))
    assert not len(made.held_out[0])


def test_a_robots_scaling_stands_before_the_runs():
    robot = replace(ARM, state_scaling="min-max")
    made = mix(
        Mixture((OF_A,), (robot,)), [A], 4, state_scaling="z-score", action_scaling="z-score"
    )
    (arm,), (stats,) = made.embodiments, made.stats
    assert arm.state == normalizer(stats.state, "state", "min-max")
    assert arm.actions == normalizer(stats.actions, "action", "z-score")


def test_a_mixture_that_says_no_scaling_keeps_the_digest_of_runs_saved_before_there_was_any():
    assert mix(Mixture((OF_A,), (ARM,)), [A], 4).digest == "243c974f3beef63b"
    chosen = replace(ARM, action_scaling="z-score")
    assert mix(Mixture((OF_A,), (chosen,)), [A], 4).digest != "243c974f3beef63b"


def test_columns_end_to_end_have_their_statistics_end_to_end():
    config = DatasetConfig("a", state=(STATE, "gripper"), actions=("gripper", ACTION))
    (robot,) = mix(Mixture((config,)), [A], 4).embodiments
    rows = np.arange(33)
    state = np.concatenate([A.column(STATE, rows), A.column("gripper", rows)], axis=1)
    assert robot.state == normalizer(describe(state), "state")
    assert len(robot.actions.offset) == 3


def test_cameras_go_by_short_full_or_given_names_and_absent_ones_are_none():
    made = mix(pair(replace(ARM, seconds=0.4)), [A, B], 4)
    assert made.feeds[0].cameras == A.cameras
    assert made.feeds[1].cameras == ("cam_high", None)
    assert [feed.embodiment for feed in made.feeds] == [0, 0]
    assert made.embodiments[0].cameras == ("front", "wrist")


def test_the_same_seconds_at_another_fps_cover_the_same_time():
    a, b = mix(pair(replace(ARM, seconds=0.8)), [A, B], 4).feeds
    assert (a.ahead, b.ahead) == ((0, 2, 4, 6), (0, 10, 20, 30))
    third = mix(pair(replace(ARM, seconds=0.3)), [A, B], 4).feeds[0]
    assert third.ahead == (0, 1, 2, 2), "0, 0.75, 1.5 and 2.25 frames"
    with pytest.raises(ValueError, match=r"'arm': its datasets have 10, 50 fps.*'seconds'"):
        mix(pair(ARM), [A, B], 4)
    made = mix(pair(ARM, fps=10.0), [A, B], 4)
    assert made.feeds[1].ahead == (0, 1, 2, 3)
    begun = mix(pair(ARM, fps=10.0), [A, B], 4, before=1)
    assert begun.feeds[1].ahead == (-1, 0, 1, 2)
    assert begun.embodiments == made.embodiments, "statistics are of present actions"


def test_increments_are_summed_over_a_step_and_other_dims_are_picked():
    robot = replace(ARM, seconds=1.2, increments=(1,))
    made = mix(Mixture((replace(OF_A, episodes=()),), (robot,)), [A], 4)
    (feed,) = made.feeds
    assert feed.ahead == (0, 3, 6, 9)
    actions = columns(A)[1]
    rows = np.array([[7, 10], [16, 18]])
    found = feed.frames.column(ACTION, rows)
    np.testing.assert_array_equal(found[..., 0], actions[rows, 0])
    expected = [
        [actions[7:10, 1].sum(), actions[10:13, 1].sum()],
        [actions[16:19, 1].sum(), actions[18, 1]],
    ]
    np.testing.assert_allclose(found[..., 1], expected, rtol=1e-6)


def test_increments_over_parts_of_a_frame_move_by_that_part():
    half = RelabelledFrames(A, A.prompts, {ACTION: (0,)}, 2.5)
    actions = columns(A)[1]
    expected = actions[0, 0] + actions[1, 0] + actions[2, 0] / 2
    np.testing.assert_allclose(half.column(ACTION, np.array([0]))[0, 0], expected, rtol=1e-6)
    tenth = RelabelledFrames(A, A.prompts, {ACTION: (0,)}, 0.1)
    moved = tenth.column(ACTION, np.array([4]))[0]
    np.testing.assert_allclose(moved, [actions[4, 0] / 10, actions[4, 1]], rtol=1e-6)


@pytest.mark.parametrize("step", [0.1, 0.4, 0.75, 1.4, 2.5, 1 / 3, 5 / 3, 3.0, 0.5])
def test_increments_of_a_chunk_add_up_to_the_movement_over_its_time(step):
    long = MemoryFrames("long", lengths=(9, 60))
    robot = replace(ARM, seconds=step * 8 / long.fps, increments=(1,))
    (feed,) = mix(Mixture((OF_A,), (robot,)), [long], 8).feeds
    moves = columns(long)[1][:, 1].astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(moves)])
    own = np.array([0, 9, 12, 68])
    ends = long.starts[[0, 1, 1, 1]] + long.lengths[[0, 1, 1, 1]]
    steps = own[:, None] + np.array(feed.ahead)
    rows = np.minimum(steps, ends[:, None] - 1)
    found = feed.frames.column(ACTION, rows)
    begins = own[:, None] + step * np.arange(8)
    at = np.minimum(np.stack([begins, begins + step]), ends[:, None])
    low, high = np.interp(at, np.arange(len(sums)), sums)
    inside = steps < ends[:, None]
    np.testing.assert_allclose(found[..., 1][inside], (high - low)[inside], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[..., 0], columns(long)[1][rows, 0])
    held = feed.frames.column(ACTION, ends - 1)[:, None, 1]
    np.testing.assert_array_equal(np.where(inside, 0, found[..., 1] - held), 0)


def test_digests_are_others_than_before_where_steps_begin_within_frames_alone(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.py").write_text(TRANSFORM)
    cases = [(1.2, (1,), ""), (0.3, (), ""), (0.3, (1,), ""), (1.0, (1,), "mine.py:double")]

    def made() -> tuple[list[str], list[str]]:
        digests = []
        for seconds, increments, function in cases:
            config = replace(OF_A, transform=function and f"{tmp_path}/{function}")
            robot = replace(ARM, seconds=seconds, increments=increments)
            made = mix(Mixture((config,), (robot,)), [A], 4, cache=tmp_path)
            digests.append(made.digest)
        return digests, sorted(path.name for path in tmp_path.glob("statistics-*"))

    with monkeypatch.context() as before:
        before.setattr(RelabelledFrames, "sums_parts", lambda *_: False)
        earlier, kept = made()
    now, all_kept = made()
    assert [a == b for a, b in zip(now, earlier, strict=True)] == [True, True, False, False]
    assert len(all_kept) == len(kept) + 1, "chunks that a transform may join were summed otherwise"


def test_samples_are_of_every_nth_frame_of_an_episode_and_chunks_of_all():
    ranges = ((0, 3), (3, 4))
    every, all_frames = (
        mix(Mixture((replace(OF_A, episodes=ranges, every=n),), (ARM,)), [A], 4) for n in (3, 1)
    )
    (feed,), (whole,) = every.feeds, all_frames.feeds
    shown = {tuple(run) for run in np.stack(feed.frames.runs[:2], 1).tolist()}
    lengths = enumerate(A.lengths.tolist())
    assert shown == {(e, f) for e, length in lengths for f in range(0, length, 3)}
    assert set(feed.frames.runs.length.tolist()) == {1}
    assert feed.ahead == whole.ahead == (0, 1, 2, 3)
    assert every.digest != all_frames.digest
    assert all_frames.feeds[0].frames is A
    with pytest.raises(ValueError, match="a: every is 0"):
        mix(Mixture((replace(OF_A, every=0),), (ARM,)), [A], 4)


def test_runs_of_several_tasks_keep_their_task_in_every_nth_frame():
    runs = Runs(np.array([0, 0, 1]), np.array([0, 4, 0]), np.array([4, 1, 6]), np.array([0, 1, 0]))
    told = RelabelledFrames(SimpleNamespace(runs=runs), A.prompts, {}, 1.0, every=3)
    expected = [[0, 0, 1, 0], [0, 3, 1, 0], [1, 0, 1, 0], [1, 3, 1, 0]]
    assert np.stack(told.runs, 1).tolist() == expected


def test_datasets_of_one_robot_have_joint_statistics_each_frame_counting_once():
    robot = mix(pair(replace(ARM, seconds=0.4)), [A, B], 4)
    together = [np.concatenate(parts) for parts in zip(columns(A), columns(B), strict=True)]
    assert_same(robot.stats[0].state, together[0])
    assert_same(robot.stats[0].actions, together[1])


def test_relative_statistics_are_of_differences_over_whole_chunks():
    robot = replace(ARM, relative=(2, -1))
    found = mix(Mixture((OF_A,), (robot,)), [A], 4).stats[0]
    state, actions = columns(A)
    differences = [
        actions[start + frame + k, 0] - state[start + frame, 2]
        for start, length in zip(A.starts, A.lengths, strict=True)
        for frame in range(length)
        for k in range(4)
        if frame + k < length
    ]
    relative = {name: values[:1] for name, values in found.actions.items()}
    relative["count"] = np.array([len(differences)])
    assert_same(relative, np.array(differences)[:, None])
    assert_same({n: v[-1:] for n, v in found.actions.items()}, actions[:, 1:])


def test_held_out_episodes_are_left_out_of_computed_statistics():
    made = mix(Mixture((OF_A,), (replace(ARM, relative=(-1, -1)),)), [A], 4, holdout=0.3)
    assert len(made.held_out[0])
    assert not set(made.held_out[0]) & set(made.training[0])
    state = columns(A)[0]
    spans = zip(A.starts[made.training[0]], A.lengths[made.training[0]], strict=True)
    assert_same(made.stats[0].state, np.concatenate([state[s : s + n] for s, n in spans]))


TRANSFORM = """
import numpy as np

def double(state, actions):
    return np.concatenate([state, state[:, :1]], axis=1), 2 * actions

def torn(state, actions):
    return state[1:], actions
"""


def test_a_transform_changes_dims_and_statistics_and_reaches_other_processes(tmp_path):
    (tmp_path / "mine.py").write_text(TRANSFORM)
    config = replace(OF_A, transform=f"{tmp_path}/mine.py:double")
    made = mix(Mixture((config,)), [A], 4)
    (robot,), transform = made.embodiments, made.feeds[0].transform
    assert len(robot.state.offset) == 4
    assert robot.actions == normalizer(describe(2 * columns(A)[1]), "action")
    chunk = np.ones((2, 4, 2), np.float32)
    state, actions = pickle.loads(pickle.dumps(transform))(chunk[:, 0], chunk)
    assert state.shape == (2, 3)
    assert (actions == 2).all()
    with pytest.raises(ValueError, match=r"mine\.py: torn returned arrays of shape"):
        mix(Mixture((replace(config, transform=f"{tmp_path}/mine.py:torn"),)), [A], 4)
    with pytest.raises(ValueError, match=r"mine\.py has no function 'absent'"):
        mix(Mixture((replace(config, transform=f"{tmp_path}/mine.py:absent"),)), [A], 4)
    with pytest.raises(FileNotFoundError, match=r"none\.py"):
        mix(Mixture((replace(config, transform=f"{tmp_path}/none.py:double"),)), [A], 4)


def test_computed_statistics_are_kept_until_anything_they_depend_on_changes(tmp_path):
    (tmp_path / "mine.py").write_text(TRANSFORM)
    read = []

    class Watched(MemoryFrames):
        def column(self, name, rows):
            read.append(name)
            return super().column(name, rows)

    def start(mixture: Mixture) -> Embodiment:
        read.clear()
        return mix(mixture, [Watched("first", cameras=A.cameras)], 4, cache=tmp_path).embodiments[0]

    config = replace(OF_A, transform=f"{tmp_path}/mine.py:double")
    first = start(Mixture((config,), (ARM,)))
    assert read
    assert start(Mixture((config,), (ARM,))) == first
    assert not read
    assert start(Mixture((config,), (replace(ARM, relative=(0, 1)),))) != first
    assert read
    (tmp_path / "mine.py").write_text(TRANSFORM.replace("2 * actions", "actions"))
    assert start(Mixture((replace(config, episodes=((0, 3),)),), (ARM,))) != first
    assert read


def test_paraphrases_are_added_and_an_empty_prompt_is_replaced(tmp_path):
    file = tmp_path / "told.json"
    file.write_text(json.dumps({"push": ["shove it", "push"], "another set's": ["x"]}))
    silent = replace(A, prompts=(("",), ("push",)))
    config = replace(OF_A, prompts=str(file), prompt="do as shown")
    (feed,) = mix(Mixture((config,)), [silent], 4).feeds
    assert feed.frames.prompts == (("do as shown",), ("push", "shove it"))
    again = pickle.loads(pickle.dumps(feed))
    assert again.frames.prompts == feed.frames.prompts
    np.testing.assert_array_equal(again.frames.column(STATE, np.arange(3)), columns(A)[0][:3])
    file.write_text(json.dumps({"pull": ["tug"]}))
    with pytest.raises(ValueError, match=r"told\.json: has none of .*'push'"):
        mix(Mixture((config,)), [silent], 4)
    file.write_text(json.dumps({"push": "shove"}))
    with pytest.raises(ValueError, match=r"told\.json: expected a table"):
        mix(Mixture((config,)), [silent], 4)


def test_chosen_episodes_are_all_that_is_trained_on_and_held_out():
    many = replace(A, lengths=(5,) * 20)
    config = replace(OF_A, episodes=((2, 8), (10, 18)))
    made = mix(Mixture((config,)), [many], 4, holdout=0.2)
    chosen = sorted({*made.training[0], *made.held_out[0]})
    assert chosen == [*range(2, 8), *range(10, 18)]
    with pytest.raises(ValueError, match=r"a: episodes has the range \[18, 21\]"):
        mix(Mixture((replace(config, episodes=((18, 21),)),)), [many], 4)


def test_the_digest_names_settings_and_content_but_not_places():
    def digest(config: DatasetConfig, frames: MemoryFrames = A) -> str:
        return mix(Mixture((config,), (ARM,)), [frames], 4).digest

    plain = digest(OF_A)
    assert digest(replace(OF_A, path="elsewhere")) == plain
    others = [
        digest(replace(OF_A, weight=2.0)),
        digest(replace(OF_A, episodes=((0, 2),))),
        digest(OF_A, replace(A, digest="other")),
        digest(OF_A, replace(A, prompts=(("lift",), ("push",)))),
    ]
    assert len({plain, *others}) == 5


def test_a_mixture_reads_from_json_and_toml_with_paths_beside_it(tmp_path):
    value = {
        "datasets": [
            {"path": "sets/a", "embodiment": "arm", "prompts": "told.json", "weight": 2},
            {"path": "hf://me/b", "cameras": {"front": "cam_high"}, "transform": "mine.py:f"},
            {"path": "/data/c", "episodes": [[0, 5]], "weight": [[0, 1], [2000, 0.5]]},
        ],
        "embodiments": [{"name": "arm", "cameras": ["front"], "relative": [0, -1], "seconds": 1}],
    }
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps(value))
    with pytest.raises(FileNotFoundError, match=r"mine\.py: no such file, needed for transform"):
        read_mixture(file, always)
    (tmp_path / "mine.py").write_text("def f(state, actions): ...")
    made = read_mixture(file, always)
    assert [d.path for d in made.datasets] == [f"{tmp_path}/sets/a", "hf://me/b", "/data/c"]
    assert made.datasets[0].prompts == f"{tmp_path}/told.json"
    assert made.datasets[1].transform == f"{tmp_path}/mine.py:f"
    assert made.datasets[2].episodes == ((0, 5),)
    assert [d.weight for d in made.datasets] == [2, 1, ((0, 1), (2000, 0.5))]
    assert from_json(Mixture, to_json(made)) == made
    assert made.embodiments == (RobotConfig("arm", ("front",), (0, -1), 1),)
    toml = tmp_path / "mixture.toml"
    toml.write_text(
        '[[datasets]]\npath = "sets/a"\nembodiment = "arm"\n'
        '[[embodiments]]\nname = "arm"\ncameras = ["front"]\n'
    )
    assert read_mixture(toml).datasets[0].path == f"{tmp_path}/sets/a"
    assert to_json(read_mixture("hf://me/b"))["datasets"][0]["path"] == "hf://me/b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"m\.json: is not valid JSON"),
        ("{}", r"m\.json does not describe a Mixture: .*missing fields \['datasets'\]"),
        ('{"datasets": {}}', r"m\.json\.datasets is \{\}, expected list"),
        ('{"datasets": [{}]}', r"m\.json\.datasets\[0\] .*missing fields \['path'\]"),
        (
            '{"datasets": [{"path": "a"}, {"path": "b", "weight": "2"}]}',
            r"m\.json\.datasets\[1\]\.weight is '2', expected float",
        ),
        (
            '{"datasets": [{"path": "a", "weight": [[0.5, 1]]}]}',
            r"datasets\[0\]\.weight\[0\]\[0\] is 0\.5, expected int",
        ),
        (
            '{"datasets": [{"path": "a", "weight": [0, 1]}]}',
            r"datasets\[0\]\.weight\[0\] is 0, expected list",
        ),
        (
            '{"datasets": [{"path": "a", "cameras": {"front": 1}}]}',
            r"m\.json\.datasets\[0\]\.cameras\.front is 1, expected str",
        ),
        ('{"datasets": [{"path": "a", "wieght": 2}]}', r"unknown fields \['wieght'\]"),
        (
            '{"datasets": [{"path": "a", "episodes": [[1]]}]}',
            r"datasets\[0\]\.episodes\[0\] is \[1\], expected list of 2",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_field(tmp_path, text, message):
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_mixture(file)


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        (Mixture(()), "no datasets"),
        (Mixture((replace(OF_A, weight=0.0),)), "a: weight is 0.0"),
        (
            Mixture((replace(OF_A, weight=((9, 1.0), (8, 0.0))),)),
            r"a: weight is \(\(9, 1\.0\), \(8, 0\.0\)\); give points .* increasing steps, from 0",
        ),
        (
            Mixture((replace(OF_A, weight=((9, 0.0),)),)),
            "a: weight is .*; give weights of 0 or more, at",
        ),
        (
            Mixture((replace(OF_A, weight=((0, 1.0), (9, 0.0))),)),
            "All datasets have weight 0 at step 9; give one of them more there",
        ),
        (Mixture((replace(OF_A, state=("qpos",)),)), r"a: state is \['qpos'\].*gripper"),
        (Mixture((replace(OF_A, cameras={"front": "top"}),), (ARM,)), r"a: cameras .*'top'"),
        (Mixture((replace(OF_A, cameras={"side": "front"}),), (ARM,)), r"cameras .*'side'"),
        (Mixture((OF_A,), (RobotConfig("arm", ("top",)),)), r"a: cameras is \{\}"),
        (Mixture((OF_A,), (ARM, RobotConfig("leg"))), r"embodiments lists \['arm', 'leg'\]"),
        (Mixture((OF_A,), (replace(ARM, relative=(0,)),)), r"relative is \[0\].* 2 action dims"),
        (Mixture((OF_A,), (replace(ARM, relative=(0, 3)),)), r"relative is \[0, 3\].*below 3"),
        (Mixture((OF_A,), (replace(ARM, seconds=0.0),)), r"'arm': seconds is 0\.0"),
        (
            Mixture((OF_A,), (replace(ARM, relative=(-1, 0), increments=(1,)),)),
            r"'arm': action dims \[1\] are increments",
        ),
        (
            Mixture((OF_A,), (replace(ARM, seconds=1.0, increments=(2,)),)),
            r"increments is \[2\].*0 to 1",
        ),
    ],
)
def test_what_does_not_go_together_is_named(mixture, message):
    with pytest.raises(ValueError, match=message):
        mix(mixture, [A] * len(mixture.datasets), 4)


def test_robots_of_different_dims_live_in_one_mixture_but_not_under_one_name():
    wide = MemoryFrames("wide", action_dim=5, cameras=("observation.images.front",))
    mixture = Mixture((OF_A, DatasetConfig("w", "wide")))
    made = mix(mixture, [A, wide], 4)
    assert [len(robot.actions.offset) for robot in made.embodiments] == [2, 5]
    reader = word_processor(8, 4, 6, 4, "token", ("lift",), made.embodiments)
    for number, frames in enumerate((A, wide)):
        state, actions = columns(frames)
        mask = reader.numbers(state[:4], actions[None, :4].repeat(4, 0), embodiment=number)[2]
        assert mask.sum(-1).tolist() == [[(2, 5)[number]] * 4] * 4
    with pytest.raises(
        ValueError, match=r"differ in their state and action dims: first has 3 and 2"
    ):
        mix(Mixture((OF_A, DatasetConfig("w", "arm")), (ARM,)), [A, wide], 4)


def test_statistics_of_relative_actions_come_in_blocks_of_any_size(monkeypatch):
    feed = mix(Mixture((OF_A,)), [A], 4).feeds[0]
    whole = embodiment_stats([feed], [np.arange(4)], (1, -1))
    monkeypatch.setattr("data.mixture.blocks._ROWS", 8)
    parts = embodiment_stats([feed], [np.arange(4)], (1, -1))
    for one, other in zip(whole, parts, strict=True):
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=1e-12)
