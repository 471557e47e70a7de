"""Trained real-time chunking through `tools.train`: on several devices, with adapters, in float8,
and to a policy that continues what its robot has committed to."""

from dataclasses import replace

import numpy as np
import pytest

from models import load_policy
from models.files.terminal import Console
from models.layers.layers import Lora
from parallel.mesh import MeshConfig
from tests.helpers.tools.small_run import MODEL, SMALL, losses, one_device, write_dataset
from tools import train

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
DELAYED = replace(
    SMALL,
    model=replace(MODEL, rtc_max_delay=2),
    trainer=replace(SMALL.trainer, train_steps=4, save_every=4, eval_every=2),
)


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.run(train.Paths(str(dataset), out), DELAYED, QUIET).finished
    return out


def test_two_devices_give_the_losses_of_one(finished, dataset, tmp_path):
    sharded = replace(DELAYED, mesh=MeshConfig(data=2))
    train.run(train.Paths(str(dataset), tmp_path / "run"), sharded, QUIET)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=1e-5)


def test_float8_gives_nearly_the_same_losses(finished, dataset, tmp_path):
    model = DELAYED.model.computing(fp8="current")
    train.run(train.Paths(str(dataset), tmp_path / "run"), replace(DELAYED, model=model), QUIET)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=0.05)


def test_adapters_alone_learn_to_continue_with_a_policy_trained_without(dataset, tmp_path):
    begun, out = tmp_path / "begun", tmp_path / "run"
    plain = replace(DELAYED, model=MODEL)
    train.run(train.Paths(str(dataset), begun), plain, QUIET)
    adapted = {
        name: replace(
            getattr(MODEL, name), attention_lora=Lora(rank=2, alpha=2), mlp_lora=Lora(2, 2)
        )
        for name in ("language", "expert")
    }
    config = replace(
        DELAYED,
        model=replace(DELAYED.model, **adapted),
        optimizer=replace(SMALL.optimizer, rate_factors=(("lora_", 1.0), (".", 0.0))),
    )
    assert train.run(train.Paths(str(dataset), out, init=begun), config, QUIET).finished
    assert load_policy(out).model.config.rtc_max_delay == 2


def test_the_policy_of_a_run_continues_what_its_robot_has_committed_to(finished):
    policy = load_policy(finished, euler_steps=2)
    names = ("observation.images.front", "observation.images.wrist")
    seen = {
        "image": {name: np.zeros((1, 16, 16, 3), np.uint8) for name in names},
        "state": np.zeros((1, 3), np.float32),
        "prompt": "push",
    }
    (chunk,) = policy.infer(seen, keys=[(0, 0)])["actions"]
    (free,) = policy.infer(seen, keys=[(0, 1)])["actions"]
    (late,) = policy.infer(seen, keys=[(0, 1)], previous=[chunk[1:]], committed=2)["actions"]
    np.testing.assert_array_equal(late[:2], chunk[1:3])
    assert np.abs(late[2:] - free[2:]).max() > 1e-6
