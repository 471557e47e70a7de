"""`tools.train` on a mixture of robots, as docs/mixtures.md shows it."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.mixture.mixture import DatasetConfig
from models import load_policy
from models.files.terminal import Console
from parallel.monitor.metrics import read_metrics
from tests.helpers.tools.small_run import SMALL, losses, one_device, write_dataset
from tools import train
from tools.recipes.insulation import open_own
from tools.recipes.presets import presets

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
GUIDE = (Path(__file__).parents[2] / "docs" / "mixtures.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def guide(tmp_path_factory) -> Path:
    """The files that the guide on mixtures shows, beside the datasets that it names."""
    folder = tmp_path_factory.mktemp("guide")
    for name, seed, fps in (("kitchen", 0, 10), ("office", 1, 20), ("hall", 2, 5)):
        write_dataset(folder / name, seed, fps)
    (folder / "paraphrases.json").write_text(json.dumps({"push": ["shove it", "press on"]}))
    (text,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    (folder / "mixture.json").write_text(text)
    (transform,) = re.findall(r"```python\n(# units\.py\n.*?)```", GUIDE, re.DOTALL)
    (folder / "units.py").write_text(transform)
    return folder


def test_the_guide_on_mixtures_runs(guide, monkeypatch):
    monkeypatch.chdir(guide)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    found: dict = {}
    exec(blocks[-1], found)
    assert (found["arm"].cameras, found["gantry"].cameras) == (("front", "wrist"), ("top",))
    assert [feed.ahead for feed in found["mixed"].feeds] == [
        (0, 1, 2, 3),
        (0, 2, 4, 6),
        (0, 1, 2, 3),
    ]
    assert len(found["gantry"].state.offset) == 4
    (command,) = re.findall(r"python -m tools\.train (--data mixture\.json.*)", GUIDE)
    asked = train.Paths("mixture.json", Path("runs/mixed"), preset="tiny")
    assert train.parse(command.split())[0] == asked


def test_an_augmented_mixture_of_two_robots_resumes_and_acts_in_each_ones_units(guide, tmp_path):
    """The guide's mixture, from its file."""
    out, paths = (
        tmp_path / "run",
        train.Paths(str(guide / "mixture.json"), tmp_path / "run", trust=True),
    )
    varied = replace(SMALL, augment=presets()["pi05"].augment)
    train.run(paths, varied, QUIET)
    whole = losses(out)
    assert np.isfinite(whole).all()
    for later in (6, 8):
        shutil.rmtree(out / "checkpoints" / str(later))
    train.run(replace(paths, resume=True), varied, QUIET)
    assert losses(out) == whole
    policy = load_policy(out / "checkpoints" / "8", euler_steps=2)
    arm, gantry = policy.processor.embodiments
    assert arm.relative == (0, 1)
    states = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    keys = [(0, 0), (0, 1)]
    acted = policy.act((np.zeros((2, 2, 16, 16, 3), np.uint8), states), ["push"] * 2, keys)
    bare = replace(arm, relative=())
    plain = replace(policy, processor=replace(policy.processor, embodiments=(bare, gantry))).act(
        (np.zeros((2, 2, 16, 16, 3), np.uint8), states), ["push"] * 2, keys
    )
    np.testing.assert_allclose(acted - plain, states[:, None, :2].repeat(4, 1), atol=1e-4)
    other = replace(policy, embodiment=1)
    seen = np.zeros((1, 1, 16, 16, 3), np.uint8), np.zeros((1, 4), np.float32)
    assert other.act(seen, ["push"], keys[:1]).shape == (1, 4, 2)


def test_a_mistake_in_a_mixture_is_named_before_anything_is_decoded(guide, tmp_path):
    value = json.loads((guide / "mixture.json").read_text())
    value["datasets"][2]["cameras"] = {"top": "ceiling"}
    broken = guide / "broken.json"
    broken.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"hall: cameras is .*'ceiling'"):
        train.run(train.Paths(str(broken), tmp_path / "run", trust=True), SMALL, QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"episodes": {"12": 2}}, r"weights\.json, episodes\.'12': is not an episode"),
        ({"episodes": {"3": -1}}, r"weights\.json, weights: is -1 for episode 3, frame 0"),
        (
            "action",
            r"kitchen: weights is 'action', but its columns with one number per frame are \[\]",
        ),
    ],
)
def test_bad_weights_are_named_before_anything_is_decoded(guide, tmp_path, weights, message):
    if not isinstance(weights, str):
        (tmp_path / "weights.json").write_text(json.dumps(weights))
        weights = "weights.json"
    drawn, mixture = {"path": str(guide / "kitchen"), "weights": weights}, tmp_path / "mixture.json"
    mixture.write_text(json.dumps({"datasets": [drawn]}))
    with pytest.raises(ValueError, match=message):
        train.run(train.Paths(str(mixture), tmp_path / "run"), SMALL, QUIET)
    assert not (tmp_path / "run").exists()


def test_a_weighted_run_resumes_as_if_it_had_not_stopped(guide, tmp_path):
    drawn, mixture = (
        {"path": str(guide / "kitchen"), "weights": "w.json"},
        tmp_path / "mixture.json",
    )
    (tmp_path / "w.json").write_text(json.dumps({"episodes": {"3": 5, "4": 0, "7": 0.3}}))
    mixture.write_text(json.dumps({"datasets": [drawn]}))
    paths = train.Paths(str(mixture), tmp_path / "run")
    train.run(paths, SMALL, QUIET)
    whole = losses(paths.out)
    for later in (6, 8):
        shutil.rmtree(paths.out / "checkpoints" / str(later))
    train.run(replace(paths, resume=True), SMALL, QUIET)
    assert losses(paths.out) == whole
    (tmp_path / "w.json").write_text(json.dumps({"episodes": {"3": 6}}))
    shutil.rmtree(paths.out / "checkpoints" / "8")
    with pytest.raises(ValueError, match="has changed since"):
        train.run(replace(paths, resume=True), SMALL, QUIET)


def test_a_run_whose_weights_change_resumes_as_if_it_had_not_stopped(guide, tmp_path):
    sets = [
        {"path": str(guide / "kitchen"), "embodiment": "arm", "weight": [[2, 1], [7, 0]]},
        {"path": str(guide / "office"), "embodiment": "arm"},
    ]
    mixture = tmp_path / "mixture.json"
    arm = {"name": "arm", "seconds": 0.4}
    mixture.write_text(json.dumps({"datasets": sets, "embodiments": [arm]}))
    paths = train.Paths(str(mixture), tmp_path / "run")
    train.run(paths, SMALL, QUIET)
    whole = losses(paths.out)
    lines = [line for line in read_metrics(paths.out) if "samples" in line]
    drawn = [[line[f"samples/{name}"] for name in ("kitchen", "office")] for line in lines]
    assert drawn[7][0] == 0 < drawn[4][0] < drawn[4][1]
    assert lines[0]["share_intended/kitchen"] == 0.5
    assert lines[0]["share/kitchen"] == drawn[0][0] / sum(drawn[0])
    for later in (6, 8):
        shutil.rmtree(paths.out / "checkpoints" / str(later))
    train.run(replace(paths, resume=True), SMALL, QUIET)
    assert losses(paths.out) == whole


def test_samples_of_every_second_frame_train_on_a_store_of_those_pictures(guide, tmp_path):
    drawn = {"path": str(guide / "kitchen"), "every": 2}
    mixture, out = tmp_path / "mixture.json", tmp_path / "run"
    mixture.write_text(json.dumps({"datasets": [drawn]}))
    train.run(train.Paths(str(mixture), out), SMALL, QUIET)
    assert all(np.isfinite(losses(out)))
    (store,) = (file.parent for file in out.glob("store/*/store.json"))
    assert json.loads((store / "store.json").read_text())["every"] == 2
    for every, refused in ((4, False), (3, True)):
        config = DatasetConfig(str(store), every=every)
        with pytest.raises(ValueError, match="but 'every' asks for") if refused else nullcontext():
            assert open_own(config, QUIET).every == 2
