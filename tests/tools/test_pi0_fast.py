"""π0-FAST is trained by `tools.train` on tokens found by the data, resumed and sharded exactly, and
written as openpi's; tokenizers of another policy are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from models import Normalizer, load_policy
from models.files.terminal import Console
from models.inputs.fast import Fast
from models.load import inspect_params
from parallel.mesh import MeshConfig
from tests.helpers.tools.small_run import MODEL, SMALL, losses, one_device, write_dataset
from tools import train
from tools.convert_checkpoint import convert
from tools.recipes.presets import PI0_FAST_TINY

pytestmark = pytest.mark.slow

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
        max_decoding_steps=12,
    ),
    trainer=replace(SMALL.trainer, train_steps=4, save_every=2, eval_every=2),
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


def test_openpis_policy_is_written_for_openpi_and_comes_back(tmp_path):
    told = {"released": "pi0_fast_base", "horizon": 10, "relative": ()}
    told |= {"tokenizer": FIXTURES / "tokenizer.model"}
    first = load_policy(FIXTURES / "openpi" / "pi0_fast", **told, fast=FIXTURES / "fast")
    robot = first.processor.embodiments[0]
    scales = {"state": Normalizer((0.5,) * 32, (2.0,) * 32)}
    scales |= {"actions": Normalizer((-1.0,) * 32, (0.5,) * 32)}
    first = replace(
        first, processor=replace(first.processor, embodiments=(replace(robot, **scales),))
    )
    convert(first, tmp_path / "openpi", "openpi")
    again = load_policy(tmp_path / "openpi", **told, fast=tmp_path / "openpi" / "fast")
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    assert again.model.config == first.model.config
    assert again.processor.targets.fast == first.processor.targets.fast
    for name, scale in scales.items():
        found = getattr(again.processor.embodiments[0], name)
        np.testing.assert_allclose(found.offset, scale.offset, atol=1e-6)
        np.testing.assert_allclose(found.scale, scale.scale, atol=1e-6)


def test_openpis_files_are_not_trained_on_with_tokenizers_missing_or_of_other_sizes(
    dataset, tmp_path
):
    source, out = FIXTURES / "openpi" / "pi0_fast", tmp_path / "run"
    found = inspect_params(source).config
    config = replace(
        FAST, model=replace(found, horizon=4, state_dim=3, action_dim=2, max_decoding_steps=12)
    )
    paths = train.Paths(str(dataset), out, init=source, tokenizer=FIXTURES / "tokenizer.model")
    with pytest.raises(ValueError, match="came without the FAST tokenizer that it writes"):
        train.run(paths, config, QUIET)
    foreign = replace(paths, fast=FIXTURES / "fast", tokenizer=RELEASED / "tokenizer.model")
    with pytest.raises(ValueError, match="FAST's tokens are counted down from its end"):
        train.run(foreign, config, QUIET)


def test_what_openpi_would_read_otherwise_is_not_written_for_it(finished, tmp_path):
    with pytest.raises(ValueError, match="trained with 'plain'; give --to chiliad"):
        convert(load_policy(finished), tmp_path / "openpi", "openpi")


def test_another_fast_tokenizer_than_the_policys_is_refused(finished, dataset, tmp_path):
    other = FIXTURES / "fast"
    with pytest.raises(ValueError, match="was trained with; leave out fast"):
        load_policy(finished, fast=other)
    paths = train.Paths(str(dataset), tmp_path / "run", init=finished, fast=other)
    with pytest.raises(ValueError, match="not the FAST tokenizer that the policy of --init"):
        train.run(paths, FAST, QUIET)
    own = load_policy(finished).processor.targets.fast
    own.save(tmp_path / "own", 4, 2)
    assert load_policy(finished, fast=tmp_path / "own").processor.targets.fast == own
    assert Fast.load(other) != own
