"""Statistics kept from a checkpoint when it is fine-tuned: whose they are, how far the data lies
outside, and what is refused before anything is decoded."""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import Normalizer
from models.checkpoints import own
from models.checkpoints.safetensors_format import write_file
from models.files.foreign_json import read_json
from models.files.terminal import Console
from tests.helpers.data.v21 import write_v21
from tests.helpers.models.openpi_numbers import FIXTURES
from tests.helpers.tools.small_run import SMALL, one_device, write_dataset
from tools import train
from tools.recipes.prepare import prepare
from tools.recipes.presets import RunConfig

QUIET = Console(quiet=True)
FIRST = np.array([0.5, -1.0, 2.0])
SECOND = np.array([2.0, 3.0, 4.0])


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Three state dims and two action dims, normally distributed."""
    return write_dataset(tmp_path_factory.mktemp("data") / "arm")


def scaled_by(scaling: str) -> RunConfig:
    return replace(
        SMALL, data=replace(SMALL.data, state_scaling=scaling, action_scaling=scaling, holdout=0)
    )


def numbers(low: str, high: str, dims: int) -> dict[str, list[float]]:
    return {low: FIRST[:dims].tolist(), high: SECOND[:dims].tolist()}


def openpi(path: Path, **kinds: str) -> Path:
    """An openpi checkpoint's assets, for each robot by name."""
    for name in kinds or {"arm": ""}:
        folder = path / "assets" / name
        folder.mkdir(parents=True)
        features = {
            feature: numbers("mean", "std", dims) | numbers("q01", "q99", dims)
            for feature, dims in (("state", 3), ("actions", 2))
        }
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": features}))
    return path


def lerobot_stats(path: Path, names: Sequence[str] = ("observation.state", "action")) -> Path:
    path.mkdir(parents=True)
    values = {names[0]: numbers("min", "max", 3), names[1]: numbers("min", "max", 2)}
    (path / "stats.json").write_text(json.dumps(values))
    return path / "stats.json"


def lerobot_policy(path: Path, mode: str = "MEAN_STD") -> Path:
    path.mkdir(parents=True)
    features = {"observation.state": {"type": "STATE"}, "action": {"type": "ACTION"}}
    config = {"eps": 1e-8, "features": features, "norm_map": {"STATE": mode, "ACTION": mode}}
    step = {"registry_name": "normalizer_processor", "config": config, "state_file": "stats"}
    (path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    arrays = {}
    for name, dims in (("observation.state", 3), ("action", 2)):
        for kind, values in {"mean": FIRST, "std": SECOND, "q10": FIRST, "q90": SECOND}.items():
            arrays[f"{name}.{kind}"] = ((dims,), lambda v=values[:dims]: v.astype(np.float32))
    write_file(path / "stats", arrays, np.dtype(np.float32), {})
    return path


def kept(dataset: Path, out: Path, config: RunConfig, statistics: Path, console=QUIET):
    """The robot's scales."""
    ready = prepare(str(dataset), out, config, console, statistics=statistics)
    (robot,) = ready.processor.embodiments
    return robot.state, robot.actions


def assert_scales(found: tuple[Normalizer, Normalizer], offset, scale) -> None:
    for normal, dims in zip(found, (3, 2), strict=True):
        np.testing.assert_allclose(normal.offset, offset[:dims], atol=1e-5)
        np.testing.assert_allclose(normal.scale, scale[:dims], atol=1e-5)


def test_each_kind_of_file_gives_the_scales_that_it_holds(dataset, tmp_path):
    checkpoint = openpi(tmp_path / "pi")
    middle, half = (FIRST + SECOND) / 2, (SECOND - FIRST) / 2
    for path in (checkpoint, checkpoint / "assets/arm", checkpoint / "assets/arm/norm_stats.json"):
        assert_scales(kept(dataset, tmp_path, scaled_by("z-score"), path), FIRST, SECOND)
        assert_scales(kept(dataset, tmp_path, scaled_by("quantile"), path), middle, half)
    stats = lerobot_stats(tmp_path / "lerobot/meta")
    renamed = lerobot_stats(tmp_path / "renamed/meta", ("state", "actions"))
    for path in (stats, stats.parent.parent, renamed):
        assert_scales(kept(dataset, tmp_path, scaled_by("min-max"), path), middle, half)
    policy = lerobot_policy(tmp_path / "policy")
    assert_scales(kept(dataset, tmp_path, scaled_by("z-score"), policy), FIRST, SECOND)


@pytest.mark.parametrize("still", [0.0, 1.0])
def test_statistics_that_openpi_padded_to_the_models_width_are_cut_to_the_robots(
    dataset, tmp_path, still
):
    file = openpi(tmp_path / "pi") / "assets/arm/norm_stats.json"
    stats = read_json(file)
    for feature in stats["norm_stats"].values():
        for kind, values in feature.items():
            feature[kind] = values + [still if kind == "std" else 0.0] * (32 - len(values))
    file.write_text(json.dumps(stats))
    for path in (file, tmp_path / "pi"):
        assert_scales(kept(dataset, tmp_path, scaled_by("z-score"), path), FIRST, SECOND)
    policy = lerobot_policy(tmp_path / "policy")
    wide = {f"action.{kind}": np.ones(32, np.float32) for kind in ("mean", "std")}
    save_file(load_file(policy / "stats") | wide, policy / "stats")
    with pytest.raises(ValueError, match="statistics have 32 action dims, but its data has 2"):
        kept(dataset, tmp_path, scaled_by("z-score"), policy)


@pytest.mark.parametrize("names", [("observation.state", "action"), ("state", "actions")])
def test_statistics_of_a_dataset_that_keeps_them_by_episode_are_computed(dataset, tmp_path, names):
    rng = np.random.default_rng(0)
    columns = [
        {names[0]: rng.normal(size=(8, 3)), names[1]: rng.normal(size=(8, 2))} for _ in range(3)
    ]
    features = {
        name: {"dtype": "float32", "shape": [dims], "names": None}
        for name, dims in zip(names, (3, 2), strict=True)
    }
    episodes = [({n: x.astype(np.float32) for n, x in own.items()}, {}, "go") for own in columns]
    other = write_v21(tmp_path / "v21", episodes, features, 10)
    found = kept(dataset, tmp_path, scaled_by("z-score"), other)
    for scale, name in zip(found, features, strict=True):
        values = np.concatenate([own[name] for own in columns])
        np.testing.assert_allclose(scale.offset, values.mean(0), atol=1e-6)
        np.testing.assert_allclose(scale.scale, values.std(0), rtol=1e-5)


def test_a_dataset_without_states_of_a_usual_name_has_no_scales(dataset, tmp_path):
    columns = {"pose": np.zeros((8, 3), np.float32), "action": np.zeros((8, 2), np.float32)}
    features = {
        name: {"dtype": "float32", "shape": list(x.shape[1:]), "names": None}
        for name, x in columns.items()
    }
    other = write_v21(tmp_path / "v21", [(columns, {}, "go")], features, 10)
    with pytest.raises(ValueError, match="none of a usual name for states; give a file of stat"):
        kept(dataset, tmp_path, scaled_by("z-score"), other)


def test_without_statistics_a_run_takes_those_of_its_data_by_the_kind_that_it_says(
    dataset, tmp_path
):
    config = replace(
        SMALL, data=replace(SMALL.data, state_scaling="z-score", action_scaling="min-max")
    )
    ready = prepare(str(dataset), tmp_path, config, QUIET)
    (robot,), (stats,) = ready.processor.embodiments, ready.mixed.stats
    np.testing.assert_allclose(robot.state(stats.state["mean"] + stats.state["std"]), 1, rtol=1e-5)
    np.testing.assert_allclose(robot.actions(stats.actions["min"]), -1, rtol=1e-5)


def test_a_table_tells_how_far_the_data_lies_outside(dataset, tmp_path):
    shown = io.StringIO()
    console = Console(file=shown, width=160)
    config = scaled_by("quantile")
    kept(dataset, tmp_path, config, openpi(tmp_path / "pi"), console)
    ready = prepare(str(dataset), tmp_path, config, QUIET)
    (feed,) = ready.mixed.feeds
    rows = np.arange(int(feed.frames.lengths.sum()))
    away = np.abs(feed.frames.column("observation.state", rows)[:, 0] - 1.25) / 0.75
    (line,) = [row for row in shown.getvalue().splitlines() if "state[0]" in row]
    assert "0.5..2 " in line
    assert f"{(away > 1).mean():.1%}" in line
    assert f"{away.max() - 1:.3g}" in line


def test_dims_that_the_statistics_never_saw_move_are_refused_by_name(dataset, tmp_path):
    path = openpi(tmp_path / "pi")
    file = path / "assets/arm/norm_stats.json"
    stats = read_json(file)
    stats["norm_stats"]["actions"] |= {"mean": [0.0, 7.0], "std": [1.0, 0.0]}
    file.write_text(json.dumps(stats))
    with pytest.raises(
        ValueError, match=r"action\[1\] of 'arm' is .*hardly changed there \(around 7\)"
    ) as caught:
        kept(dataset, tmp_path, scaled_by("z-score"), path)
    assert "state[" not in str(caught.value)
    assert "action[0]" not in str(caught.value)
    assert "without --statistics" in str(caught.value)


def test_statistics_of_another_kind_are_refused_before_anything_is_decoded(dataset, tmp_path):
    out = tmp_path / "run"
    policy = lerobot_policy(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"scales the state by z-score.*--data.state-scaling z-sc"):
        kept(dataset, out, scaled_by("quantile"), policy)
    tenths = lerobot_policy(tmp_path / "tenths", "QUANTILE10")
    with pytest.raises(ValueError, match="by QUANTILE10, not quantile; known are MEAN_STD"):
        kept(dataset, out, scaled_by("quantile"), tenths)
    with pytest.raises(ValueError, match="has no min of state"):
        kept(dataset, out, scaled_by("min-max"), openpi(tmp_path / "pi"))
    with pytest.raises(ValueError, match="7 state dims, but its data has 3"):
        kept(dataset, out, scaled_by("z-score"), FIXTURES / "pi0")
    with pytest.raises(FileNotFoundError, match="has no statistics"):
        kept(dataset, out, SMALL, FIXTURES / "pi05")
    assert not out.exists()


def test_of_several_robots_the_one_of_the_same_name_is_taken(dataset, tmp_path):
    both = openpi(tmp_path / "both", arm="", other="")
    assert_scales(kept(dataset, tmp_path, scaled_by("z-score"), both), FIRST, SECOND)
    others = openpi(tmp_path / "others", left="", right="")
    with pytest.raises(ValueError, match=r"\['left', 'right'\], but none of 'arm'"):
        kept(dataset, tmp_path, scaled_by("z-score"), others)


@pytest.mark.slow
def test_a_run_keeps_the_scales_of_ours_and_resumes_with_no_others(dataset, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    config = replace(
        scaled_by("quantile"),
        trainer=replace(SMALL.trainer, train_steps=3, save_every=1, eval_every=0),
    )
    assert train.run(train.Paths(str(dataset), first), config, QUIET).finished
    other = write_dataset(tmp_path / "later" / "arm", seed=3)
    paths = train.Paths(str(other), second, init=first, statistics=first / "checkpoints")
    assert train.run(paths, config, QUIET).finished
    begun, went_on = (own.read_json(out, "assets") for out in (first, second))
    assert went_on["processor"]["embodiments"] == begun["processor"]["embodiments"]
    assert went_on["statistics"] != begun["statistics"]
    shutil.rmtree(second / "checkpoints" / "3")
    with pytest.raises(
        ValueError, match="second was trained on the scales of other statistics than"
    ):
        train.run(replace(paths, resume=True, statistics=None), config, QUIET)
