"""Open-loop evaluation: a policy fitted to a recording beats the baselines on held-out episodes,
what it uses and ignores is found out, and what cannot be compared is refused before anything is
predicted."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from data import open_dataset
from data.mixture.mixture import DatasetConfig
from models.config import to_json
from models.files.terminal import Console
from parallel.checkpoint import CheckpointWriter
from sim.open_loop import AGAIN, BLIND, HOLD, MEAN, POLICY, STILL, TOLD, without
from tests.helpers.models.linear_model import fitted, write_reaching
from tools.recipes.bound_recording import bound
from tools.recipes.open_loop import (
    OpenLoopConfig,
    chosen_episodes,
    covered_parts,
    evaluate_recording,
    heat_of,
    run,
)
from tools.recipes.policy import PolicyOptions

HELD_OUT = [8, 9, 10, 11]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_reaching(tmp_path_factory.mktemp("data") / "reaching")


@pytest.fixture(scope="module")
def policy(data):
    return fitted(data, range(8))


def evaluated(data, policy, tmp_path, settings=None, **options):
    config = OpenLoopConfig(str(data), tmp_path, tmp_path, **{"shown": 1, **options})
    recording = bound(policy, settings or DatasetConfig(str(data)), open_dataset(data))
    return evaluate_recording(config, recording, HELD_OUT)


@pytest.fixture(scope="module")
def found(data, policy, tmp_path_factory):
    return evaluated(data, policy, tmp_path_factory.mktemp("out"))


def saved(policy, out, **config):
    values = {"model": to_json(policy.model.config)} | config
    assets = {"processor": to_json(policy.processor)}
    with CheckpointWriter(out / "checkpoints", values, assets) as writer:
        writer.save(1, {"ema": policy.params}, {})
    return out


@pytest.mark.slow
def test_a_policy_fitted_to_other_episodes_beats_the_baselines(found):
    errors = found[0].errors
    assert errors[POLICY].mean < 0.02
    for name in (HOLD, MEAN, BLIND, TOLD, STILL, without("front")):
        assert errors[name].mean > 5 * errors[POLICY].mean, name


def test_baselines_are_those_of_the_dataset_read_by_hand(data, found):
    result, dataset = found[0], open_dataset(data)
    whole = {e: dataset.episode(e)["action"] for e in HELD_OUT}
    frames = zip(result.recorded.episode.tolist(), result.recorded.frame.tolist(), strict=True)
    for row, (e, t) in enumerate(frames):
        inside = whole[e][t : t + 5]
        assert result.recorded.valid[row].sum() == len(inside)
        assert np.allclose(result.recorded.actions[row, : len(inside)], inside)
        if t:
            assert np.allclose(result.recorded.held[row], whole[e][t - 1])


def test_the_camera_that_shows_nothing_of_the_task_is_the_one_finding(found):
    (said,) = found[0].findings()
    assert "camera 'wrist' black" in said
    assert found[0].changes[without("front")] > 100 * found[0].changes[without("wrist")]


@pytest.mark.slow
def test_a_policy_that_ignores_its_prompt_or_cameras_is_found_out(data, policy, tmp_path):
    weights = np.array(policy.params["weight"])
    weights[2:-2] = weights[2:-2].mean(0)
    deaf = replace(policy, params={"weight": weights})
    said = " ".join(evaluated(data, deaf, tmp_path, shown=0)[0].findings())
    assert "another task's prompt" in said
    blind = fitted(data, range(8), blind_to="front")
    said = " ".join(evaluated(data, blind, tmp_path, shown=0)[0].findings())
    assert "camera 'front' black" in said


def test_pictures_matter_where_the_model_looks(found):
    (shown,) = found[1]
    front, wrist = shown.looks
    assert (front.camera, wrist.camera) == ("front", "wrist")
    corner, rest = front.heat[:4, :4].min(), front.heat[5:, 5:].max()
    assert corner > 20 * rest
    assert wrist.heat.max() < 0.05 * front.heat.max()


def test_a_shown_episode_is_the_worst_with_all_its_frames(data, found):
    result, (shown,) = found
    assert shown.episode == result.worst[0]
    assert shown.pictures.shape == (20, 160, 320, 3)
    actions = open_dataset(data).episode(shown.episode)["action"]
    assert np.allclose(shown.actions, actions)


def test_noise_is_fixed_by_episode_and_frame(data, policy, found, tmp_path):
    """Other batches, and other observations beside it, leave a chunk as it was."""
    first = found[0]
    again = evaluated(data, policy, tmp_path, shown=0, batch=3, observations=20)[0]
    rows = {(e, t): i for i, (e, t) in enumerate(_keys(first))}
    for i, key in enumerate(_keys(again)):
        own = first.predicted[POLICY][rows[key]]
        assert np.allclose(again.predicted[POLICY][i], own, atol=1e-6)
    assert 0 < first.changes[AGAIN] < 0.05
    assert len(again.recorded.frame) < len(first.recorded.frame)


def _keys(result):
    return list(zip(result.recorded.episode.tolist(), result.recorded.frame.tolist(), strict=True))


def test_the_command_writes_figures_and_a_page_of_the_held_out_episodes(data, policy, tmp_path):
    held = {"data": {"holdout": 0.25}, "trainer": {"seed": 0}}
    checkpoint = saved(policy, tmp_path / "run", **held)
    out = tmp_path / "open"
    config = OpenLoopConfig(str(data), checkpoint, out, shown=1, observations=16)
    result = run(config, Console(quiet=True))
    written = json.loads((out / "open_loop.json").read_text())
    assert written["result"]["errors"][POLICY]["mean"] == result.errors[POLICY].mean
    assert len(result.recorded.episodes) == 4  # two of each task's six
    assert "held out" in written["episodes"]
    page = (out / "report.html").read_text()
    assert "wrist" in page
    assert "data:video/mp4" in page
    assert len(result.recorded.frame) <= 16


def test_episodes_of_a_run_that_held_out_none_are_all_and_this_is_said(data, policy, tmp_path):
    checkpoint = saved(policy, tmp_path / "run")
    config = OpenLoopConfig(str(data), checkpoint, tmp_path, most_episodes=5)
    episodes, choice = chosen_episodes(config, open_dataset(data))
    assert episodes == [0, 3, 6, 8, 11]
    assert "may have trained on them" in choice
    chosen, _ = chosen_episodes(replace(config, episodes=(7, 2, 7)), open_dataset(data))
    assert chosen == [2, 7]
    with pytest.raises(ValueError, match="no episode 12; choose from 0 to 11"):
        chosen_episodes(replace(config, episodes=(12,)), open_dataset(data))


def test_cameras_of_other_names_are_asked_for_and_can_be_told(data, policy, tmp_path):
    robot = replace(policy.processor.embodiments[0], cameras=("base", "hand"))
    other = replace(policy, processor=replace(policy.processor, embodiments=(robot,)))
    with pytest.raises(ValueError, match=re.escape("expects ['base', 'hand']")):
        evaluated(data, other, tmp_path)
    named = DatasetConfig(str(data), cameras={"base": "front", "hand": "wrist"})
    result = evaluated(data, other, tmp_path, named, shown=0)[0]
    assert result.errors[POLICY].mean < 0.02
    alone = DatasetConfig(str(data), cameras={"base": "front"})
    result, (shown,) = evaluated(data, other, tmp_path, alone)
    assert result.errors[POLICY].mean < 0.2
    assert [look.camera for look in shown.looks] == ["base"]


def test_cameras_that_may_be_absent_are_but_never_all(data, policy, tmp_path):
    def seeing(*cameras, absent):
        robot = replace(policy.processor.embodiments[0], cameras=cameras, absent=absent)
        return replace(policy, processor=replace(policy.processor, embodiments=(robot,)))

    _, (shown,) = evaluated(data, seeing("front", "hand", absent=("hand",)), tmp_path)
    assert [look.camera for look in shown.looks] == ["front"]
    with pytest.raises(ValueError, match=re.escape("expects ['base', 'hand']")):
        evaluated(data, seeing("base", "hand", absent=("base", "hand")), tmp_path)


def test_cameras_are_told_on_the_command_line_as_everywhere(data, policy, tmp_path):
    """ROBOT=POLICY, here DATASET=POLICY; the policy's others keep their names."""
    robot = replace(policy.processor.embodiments[0], cameras=("base", "wrist"))
    other = replace(policy, processor=replace(policy.processor, embodiments=(robot,)))
    config = OpenLoopConfig(str(data), saved(other, tmp_path / "run"), tmp_path / "open")
    config = replace(config, episodes=(8,), observations=4, shown=0)
    with pytest.raises(ValueError, match="--cameras front=base"):
        run(config, Console(quiet=True))
    told = replace(config, options=PolicyOptions(cameras=("front=base",)))
    assert run(told, Console(quiet=True)).errors[POLICY].mean < 0.02


def test_other_dims_and_robots_are_refused_with_those_of_both(data, policy, tmp_path):
    two = DatasetConfig(str(data), state=("observation.state", "action"))
    with pytest.raises(ValueError, match=r"has 4 dims .* with 2 and 2"):
        evaluated(data, policy, tmp_path, two)
    other = DatasetConfig(str(data), embodiment="humanoid")
    with pytest.raises(
        ValueError, match=r"is of robot 'humanoid', but .* trained on \['reaching'\]"
    ):
        evaluated(data, policy, tmp_path, other)
    with pytest.raises(ValueError, match="without a processor"):
        evaluated(data, replace(policy, processor=None), tmp_path)


@pytest.mark.parametrize(("field", "value"), [("observations", 0), ("batch", 0), ("shown", -1)])
def test_sizes_that_make_no_sense_are_refused(data, tmp_path, field, value):
    config = replace(OpenLoopConfig(str(data), tmp_path, tmp_path), **{field: value})
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        run(config, Console(quiet=True))


def test_every_part_of_a_picture_is_covered_and_heat_lies_where_it_was():
    picture = np.arange(50 * 70 * 3).reshape(50, 70, 3).astype(np.uint8)
    parts = [(part != picture).any(-1) for part in covered_parts(picture)]
    assert len(parts) == 49
    assert np.any(parts, axis=0).all()
    change = np.array([part[:6, :8].any() for part in parts], float)
    heat = heat_of(change)
    assert heat[0, 0] == 1
    assert heat[2:, 2:].max() == 0
