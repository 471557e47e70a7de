"""π0-FAST is trained by `tools.train` on tokens found by the data, resumed and sharded exactly, and
written as openpi's; tokenizers of another policy are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from models import load_policy
from models.inputs.fast import Fast
from parallel.mesh import MeshConfig
from tests.helpers.tools.small_run import MODEL, SMALL, losses, one_device, write_dataset
from tools import train
from tools.convert_checkpoint import convert
from tools.recipes.presets import PI0_FAST_TINY

FIXTURES = Path(__file__).parents[1] / "fixtures" / "pi0_fast"
RELEASED = FIXTURES.parent / "released"
QUIET = Console(quiet=True)
FAST = replace(
    SMALL,
    model=replace(
        PI0_FAST_TINY.model,
        vision=MODEL.vision,
        language=MODEL.language,
        image_size=16,
        vocabulary=700,
        horizon=4,
        steps=12,
    ),
    trainer=replace(SMALL.trainer, steps=4, save_every=2, eval_every=2),
)
SEEN = {
    "image": {
        "observation.images.front": np.zeros((2, 16, 16, 3), np.uint8),
        "observation.images.wrist": np.full((2, 16, 16, 3), 9, np.uint8),
    },
    "state": np.zeros((2, 3), np.float32),
    "prompt": "push",
}


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.run(train.Paths(str(dataset), out), FAST, QUIET).finished
    return out


def test_a_run_finds_tokenizer_and_places_by_its_data_and_its_policy_answers(finished):
    saved = json.loads((finished / "config.json").read_text())["model"]
    policy = load_policy(finished)
    assert policy.model.config.targets == saved["targets"] > 4
    found = policy.infer(SEEN)["actions"]
    assert found.shape == (2, 4, 2)
    assert np.isfinite(found).all()


def test_resuming_repeats_the_losses(finished, dataset, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "4")
    train.run(train.Paths(str(dataset), out, resume=True), FAST, QUIET)
    assert losses(out) == losses(finished)


def test_eight_devices_give_the_losses_of_one(finished, dataset, tmp_path):
    sharded = replace(FAST, mesh=MeshConfig(data=2, fsdp=4))
    train.run(train.Paths(str(dataset), tmp_path / "run"), sharded, QUIET)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=1e-5)


def test_a_policy_trained_as_openpis_comes_back_from_openpis_layout(dataset, tmp_path):
    """Begun from openpi's checkpoint, trained, written as openpi's and read again."""
    source = FIXTURES / "openpi" / "pi0_fast"
    model = load_policy(source, released="pi0_fast_base", horizon=4, relative=()).model.config
    config = replace(
        FAST,
        model=replace(model.computing(dtype="float32"), state_dim=3, action_dim=2, steps=12),
        trainer=replace(FAST.trainer, steps=4, eval_every=0),
    )
    out, tokenizer = tmp_path / "run", FIXTURES / "tokenizer.model"
    paths = train.Paths(str(dataset), out, init=source, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="came without the FAST tokenizer that it writes"):
        train.run(paths, config, QUIET)
    foreign = replace(paths, fast=FIXTURES / "fast", tokenizer=RELEASED / "tokenizer.model")
    with pytest.raises(ValueError, match="whose end FAST's tokens are counted"):
        train.run(foreign, config, QUIET)
    train.run(replace(paths, fast=FIXTURES / "fast"), config, QUIET)
    first = load_policy(out)
    convert(first, tmp_path / "openpi", "openpi")
    again = load_policy(
        tmp_path / "openpi",
        released="pi0_fast_base",
        horizon=4,
        relative=(),
        tokenizer=tokenizer,
        fast=tmp_path / "openpi" / "fast",
    )
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    assert again.processor.fast == first.processor.fast
    robots = (again.processor.embodiments[0], first.processor.embodiments[0])
    for one, other in zip(*((r.state, r.actions) for r in robots), strict=True):
        np.testing.assert_allclose(one.offset, other.offset, atol=1e-6)
        np.testing.assert_allclose(one.scale, other.scale, atol=1e-6)


def test_what_openpi_would_read_otherwise_is_not_written_for_it(finished, tmp_path):
    with pytest.raises(ValueError, match="trained with 'plain'; write it as chiliad"):
        convert(load_policy(finished), tmp_path / "openpi", "openpi")


def test_another_fast_tokenizer_than_the_policys_is_refused(finished, dataset, tmp_path):
    other = FIXTURES / "fast"
    with pytest.raises(ValueError, match="was trained to write in; leave out fast"):
        load_policy(finished, fast=other)
    paths = train.Paths(str(dataset), tmp_path / "run", init=finished, fast=other)
    with pytest.raises(ValueError, match="another FAST tokenizer than the one that the policy"):
        train.run(paths, FAST, QUIET)
    own = load_policy(finished).processor.fast
    own.save(tmp_path / "own", 4, 2)
    assert load_policy(finished, fast=tmp_path / "own").processor.fast == own
    assert Fast.load(other) != own
