"""Subtasks, FAST tokens and insulation in `tools.train`: exact resume, terms one by one, and a
policy that says its subtask before it acts."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.lerobot.writer import DatasetWriter
from models import load_policy
from models.files.terminal import Console
from models.inputs.fast import Fast
from parallel.mesh import MeshConfig
from parallel.monitor.metrics import read_metrics
from tests.helpers.tools.small_run import MODEL, SMALL, losses, one_device
from tools import train
from tools.data import fast_command

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
INSULATED = replace(
    SMALL,
    model=replace(MODEL, insulate=True, text_loss=0.5, action_token_loss=1.0),
    trainer=replace(SMALL.trainer, train_steps=4, save_every=2, eval_every=2),
)
SUBTASKS = ("go there", "take the thing", "bring it back here")


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "set"
    picture = {"dtype": "video", "shape": (16, 16, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "observation.images.front": picture,
    }
    with DatasetWriter(path, fps=10, features=features, subtasks=True) as writer:
        for i in range(10):
            steps = 6 + i % 3
            columns = {
                "observation.state": rng.normal(size=(steps, 3)).astype(np.float32),
                "action": rng.normal(size=(steps, 2)).cumsum(0).astype(np.float32),
            }
            pictures = rng.integers(0, 256, (steps, 16, 16, 3), dtype=np.uint8)
            told = [SUBTASKS[(k + i) // 3 % 3] for k in range(steps)]
            writer.add_episode(columns, {"observation.images.front": pictures}, "fetch", told)
    return path


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.run(train.Paths(str(dataset), out), INSULATED, QUIET).finished
    return out


def test_a_run_logs_each_term_and_they_sum_to_the_loss(finished):
    rows = [row for row in read_metrics(finished) if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        whole = row["loss_flow"] + 0.5 * row["loss_text"] + row["loss_action_tokens"]
        assert row["loss"] == pytest.approx(whole, rel=1e-5)
    measured = [row for row in read_metrics(finished) if "val_loss" in row]
    assert all(row["val_text"] > 0 and row["val_action_tokens"] > 0 for row in measured)


def test_resuming_repeats_the_losses_with_the_tokenizer_that_was_trained(
    finished, dataset, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "4")
    shutil.rmtree(out / "store")
    train.run(train.Paths(str(dataset), out, resume=True), INSULATED, QUIET)
    assert losses(out) == losses(finished)


def test_two_devices_give_the_losses_of_one(finished, dataset, tmp_path):
    sharded = replace(INSULATED, mesh=MeshConfig(data=2))
    train.run(train.Paths(str(dataset), tmp_path / "run"), sharded, QUIET)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=1e-5)


def test_a_policy_says_a_subtask_and_does_it(finished):
    policy = load_policy(finished, euler_steps=2)
    assert policy.processor.targets.fast is not None
    seen = {
        "image": {"observation.images.front": np.zeros((2, 16, 16, 3), np.uint8)},
        "state": np.zeros((2, 3), np.float32),
        "prompt": "fetch",
    }
    found = policy.infer(seen)
    assert len(found["subtask"]) == 2
    requests = policy.prepare(seen)
    other = policy.processor.subtask_tokens("bring it back here")
    told = [replace(r, sample=replace(r.sample, subtask=other)) for r in requests]
    assert policy.subtask(told[0]) == "bring it back here"
    said = policy.with_subtasks(requests)
    assert [policy.subtask(request) for request in said] == found["subtask"]
    np.testing.assert_allclose(policy.sample_actions(said), found["actions"], atol=1e-5)
    assert not np.allclose(policy.sample_actions(told), found["actions"], atol=1e-4)


def test_a_tokenizer_of_tools_data_is_the_one_that_a_run_takes(dataset, finished, tmp_path, capsys):
    preset = tmp_path / "own.py"
    preset.write_text("from tests.tools.test_insulation import INSULATED as MINE\n")
    folder = tmp_path / "fast"
    fast_command(str(dataset), folder, preset=f"{preset}:MINE", vocabulary=120)
    assert "numbers to a token" in capsys.readouterr().out
    fast = Fast.load(folder)
    own = load_policy(finished).processor.targets.fast
    assert (fast.scale, fast.lowest) == (own.scale, own.lowest)
    assert fast.size < own.size
    out = tmp_path / "run"
    train.run(train.Paths(str(dataset), out, fast=folder), INSULATED, QUIET)
    assert load_policy(out).processor.targets.fast == fast
    shutil.rmtree(out / "checkpoints" / "4")
    with pytest.raises(ValueError, match="give the --fast that it began with"):
        train.run(train.Paths(str(dataset), out, resume=True), INSULATED, QUIET)


def test_a_vocabulary_without_room_for_the_values_is_refused(dataset, tmp_path):
    with pytest.raises(SystemExit, match="FAST vocabulary of 50 has no room for the"):
        fast_command(str(dataset), tmp_path / "fast", horizon=4, vocabulary=50)
    assert not (tmp_path / "fast").exists()


@pytest.mark.parametrize(
    ("model", "paths", "words"),
    [
        ({"targets": 5}, {}, r"model\.targets is 5.* set, episode \d+, frame \d+ need"),
        ({"vocabulary": 300}, {}, r"model\.vocabulary is 300"),
        ({"action_token_loss": 0.0}, {"fast": Path("x")}, "no action tokens are learnt"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(dataset, tmp_path, model, paths, words):
    config = replace(INSULATED, model=replace(INSULATED.model, **model))
    with pytest.raises(ValueError, match=words):
        train.run(train.Paths(str(dataset), tmp_path / "run", **paths), config, QUIET)
