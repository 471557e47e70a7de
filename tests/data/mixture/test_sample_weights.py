"""Weights of samples from a column or a file: what becomes of them, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.dataset import Runs
from data.frames import STATE
from data.loader.loader import plan_source
from data.mixture.mixed import mix
from data.mixture.mixture import DatasetConfig, Mixture, read_mixture
from data.mixture.sample_weights import stored_column, streamed_column
from data.packing.weighted_runs import weighted_runs
from data.store.store import cached_store
from tests.helpers.data.memory_frames import MemoryFrames
from tests.helpers.models.processors import word_processor

A = MemoryFrames("first")
LENGTHS = A.lengths.tolist()
FRAMES = sum(LENGTHS)


def weighed(column) -> MemoryFrames:
    frames = replace(A)
    frames.columns["gripper"] = np.asarray(column, np.float32)[:, None]
    return frames


def written(tmp_path, value) -> DatasetConfig:
    file = tmp_path / "weights.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return DatasetConfig("a", weights=str(file))


def made(config, frames=A, **options):
    return mix(Mixture((config,)), [frames], 4, **options)


def source(mixed):
    feed = mixed.feeds[0]
    reader = word_processor(8, 3, 2, 4, "token", ("lift", "push"), mixed.embodiments)
    return plan_source(
        feed, reader, episodes=mixed.training[0].tolist(), weights=mixed.sample_weights[0]
    )


def by_frame(planned) -> dict[tuple[int, int], float]:
    """The weight of each sample of a source."""
    runs, weights = planned.runs, planned.weights
    return {
        (int(runs.episode[r]), int(frame)): float(weights[r])
        for r in range(len(weights))
        for frame in range(runs.first[r], runs.first[r] + runs.length[r])
    }


def test_a_column_tells_the_weight_of_each_frame():
    column = np.random.default_rng(0).integers(0, 3, FRAMES)
    planned = source(made(DatasetConfig("a", weights="gripper"), weighed(column)))
    episodes = np.repeat(np.arange(4), LENGTHS)
    frames = np.arange(FRAMES) - A.starts[episodes]
    told = zip(episodes.tolist(), frames.tolist(), column.tolist(), strict=True)
    assert by_frame(planned) == {(e, f): w for e, f, w in told if w}


def test_a_file_tells_them_by_episode_or_frame_and_the_rest_by_default(tmp_path):
    told = {"episodes": {"1": 3, "2": [0, 0, 1, 2, 2]}, "default": 0.5}
    weights = by_frame(source(made(written(tmp_path, told))))
    assert {weights[0, f] for f in range(7)} == {weights[3, f] for f in range(9)} == {0.5}
    assert {weights[1, f] for f in range(12)} == {3.0}
    assert [weights.get((2, f)) for f in range(5)] == [None, None, 1, 2, 2]
    alone = made(written(tmp_path, {"episodes": {"2": 1}, "default": 0}))
    assert alone.training[0].tolist() == [2]
    doubled = source(made(written(tmp_path, {"episodes": {"2": 2}})))
    assert set(by_frame(doubled).values()) == {1, 2}


def test_weights_go_with_every_and_with_the_frames_that_are_kept(tmp_path):
    config = written(tmp_path, {"episodes": {"0": [1, 2, 3, 4, 5, 6, 0], "3": 0}})
    weights = by_frame(source(made(replace(config, every=2))))
    assert {f: w for (e, f), w in weights.items() if e == 0} == {0: 1, 2: 3, 4: 5}
    kept = {"episodes": 4, "frames": FRAMES, "keep": {"0": [[1, 3]], "1": [], "2": [], "3": []}}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    config = replace(config, frames=str(tmp_path / "kept.json"))
    assert by_frame(source(made(config))) == {(0, 1): 2, (0, 2): 3}


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_alike_weights_change_nothing_at_all(tmp_path, weight):
    plain, alike = made(DatasetConfig("a")), made(written(tmp_path, {"default": weight}))
    assert alike.sample_weights == (None,)
    assert alike.digest == plain.digest
    of_column = made(DatasetConfig("a", weights="gripper"), weighed(np.full(FRAMES, weight)))
    assert of_column.sample_weights == (None,)


def test_an_episode_that_is_never_drawn_is_as_if_it_were_not_named(tmp_path):
    many = MemoryFrames(lengths=(5,) * 20)
    config = written(tmp_path, {"episodes": {str(e): 0 for e in range(8)}})
    unnamed = replace(config, weights="", episodes=((8, 20),))
    for holdout in (0.0, 0.2):
        weighted, chosen = made(config, many, holdout=holdout), made(unnamed, many, holdout=holdout)
        assert np.array_equal(weighted.training[0], chosen.training[0])
        assert np.array_equal(weighted.held_out[0], chosen.held_out[0])
        assert weighted.embodiments == chosen.embodiments
    assert source(made(config, many)).runs.episode.min() == 8


def test_weights_outside_of_the_episodes_chosen_do_not_count(tmp_path):
    config = replace(written(tmp_path, {"episodes": {"0": 5}}), episodes=((1, 4),))
    assert made(config).sample_weights == (None,)


def test_weights_are_in_the_digest(tmp_path):
    digests = {
        made(written(tmp_path, {"episodes": {"1": w}})).digest for w in (1, 2, 3, [1] * 11 + [2])
    }
    assert len(digests) == 4


def test_a_file_of_weights_lies_beside_the_mixture_and_a_column_nowhere(tmp_path):
    sets = [{"path": "a", "weights": "w.json"}, {"path": "b", "weights": "advantage"}]
    (tmp_path / "m.json").write_text(json.dumps({"datasets": sets}))
    read = read_mixture(tmp_path / "m.json").datasets
    assert [d.weights for d in read] == [f"{tmp_path}/w.json", "advantage"]


def test_runs_are_cut_where_weights_change_and_weights_of_gaps_do_not_matter():
    runs = Runs(*np.array([[0, 0, 2], [0, 3, 1], [3, 4, 3], [1, 0, 1]]))
    weights = np.array([1, 1, 2, 2, 2, 2, 0, 9, 9, 9, 9, 9, 5, 5, 7], float)
    parts, own = weighted_runs(runs, weights, np.array([0, 7, 11]))
    assert np.stack(parts, 1).tolist() == [
        [0, 0, 2, 1],
        [0, 2, 1, 1],
        [0, 3, 3, 0],
        [2, 1, 2, 1],
        [2, 3, 1, 1],
    ]
    assert own.tolist() == [1, 2, 2, 5, 7]


def test_no_runs_have_no_parts():
    parts, own = weighted_runs(Runs(*np.zeros((4, 0), np.int64)), np.ones(5), np.zeros(1, np.int64))
    assert len(own) == len(parts.length) == 0


@pytest.mark.parametrize("column", ["next.reward", "next.done", "timestamp"])
def test_a_column_is_the_same_before_and_after_a_dataset_is_decoded(tmp_path, column):
    dataset = open_dataset(Path(__file__).parents[2] / "fixtures" / "lerobot" / "chiliad")
    before = streamed_column(dataset)(column)
    assert before.shape == (dataset.lengths.sum(),)
    if column != "timestamp":  # which no store keeps
        store = cached_store(dataset, 16, "raw", tmp_path)
        assert np.array_equal(stored_column(store)(column), before)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", r"weights\.json, file: is not valid JSON .*; write it again"),
        ([1.0], r"weights\.json, file: is \[1\.0\]; expected \{\"episodes\""),
        ({"weights": {}}, r"weights\.json, file: is .*expected"),
        ({"default": "1"}, r"weights\.json, default: is '1'; give a number"),
        ({"default": True}, r"weights\.json, default: is True; give a number"),
        ({"episodes": [1.0]}, r"episodes: is \[1\.0\]; expected a table"),
        ({"episodes": {"4": 1}}, r"episodes\.'4': is not an episode; there are 0 to 3"),
        ({"episodes": {"-1": 1}}, r"episodes\.'-1': is not an episode"),
        ({"episodes": {"01": 1}}, r"episodes\.'01': is not an episode"),
        ({"episodes": {"1": None}}, r"episodes\.1: is None; give a number, or a list"),
        ({"episodes": {"1": [1, "2"]}}, r"episodes\.1: is \[1, '2'\]; give a number"),
        (
            {"episodes": {"1": [1] * 11}},
            r"episodes\.1: has 11 weights, but the episode has 12 frames",
        ),
        (
            {"episodes": {"1": -2}},
            r"weights: is -2 for episode 1, frame 0; give each frame 0 or more",
        ),
        ({"episodes": {"2": [1, 1, 1, -0.5, 1]}}, r"is -0\.5 for episode 2, frame 3"),
        ('{"episodes": {"1": NaN}}', r"weights: is nan for episode 1, frame 0"),
        ('{"episodes": {"1": 1e999}}', r"weights: is inf for episode 1, frame 0"),
        ({"default": 0}, r"weights: is 0 for all chosen frames; give some of them more"),
    ],
)
def test_a_mistake_in_a_file_of_weights_is_named_with_its_remedy(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        made(written(tmp_path, value))


def test_a_file_of_weights_that_is_missing_is_named():
    with pytest.raises(
        FileNotFoundError, match=r"none\.json: this file of weights does not exist; correct"
    ):
        made(DatasetConfig("a", weights="none.json"))


def test_a_column_of_weights_must_be_there_and_have_one_number_a_frame():
    for name in ("advantage", STATE):
        with pytest.raises(ValueError, match=rf"a: weights is '{name}', but .* are \['gripper'\]"):
            made(DatasetConfig("a", weights=name))


@pytest.mark.parametrize(("bad", "told"), [(-1.0, "-1"), (np.inf, "inf")])
def test_a_bad_number_in_a_column_is_named_by_its_frame(bad, told):
    column = np.ones(FRAMES)
    column[20] = bad
    named = rf"a, column 'gripper', named by 'weights': is {told} for episode 2, frame 1; give each"
    with pytest.raises(ValueError, match=named):
        made(DatasetConfig("a", weights="gripper"), weighed(column))
    with pytest.raises(ValueError, match=r"column 'gripper'.*: is 0 for all chosen frames"):
        made(DatasetConfig("a", weights="gripper"), weighed(np.zeros(FRAMES)))


def test_frames_that_all_weigh_nothing_after_every_choice_are_refused(tmp_path):
    config = written(tmp_path, {"episodes": {"0": [0, 1, 0, 1, 0, 1, 0]}, "default": 0})
    with pytest.raises(ValueError, match="first: all frames to draw have weight 0"):
        source(made(replace(config, every=2)))
