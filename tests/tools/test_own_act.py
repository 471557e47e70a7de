"""A user's file like ACT (no language, no flow, batch normalisation, its own pictures and files)
learns the same on every mesh, is fine-tuned from its own files, and is exported."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from models import load_policy
from models.files.own_file import named_in_file, run_file
from models.formats import writers
from models.inputs.packed_batch import count_code, pack
from parallel.mesh import MeshConfig
from tests.helpers.tools.exported_run import ran
from tests.helpers.tools.small_run import SMALL, losses, one_device, write_dataset
from tools import train
from tools.export.act import whole
from tools.export.write import write

FILE = Path(__file__).parents[1] / "own_act.py"
QUIET = Console(quiet=True)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("act") / "data")


@pytest.fixture(scope="module")
def config():
    preset = named_in_file(f"{FILE}:ACT")
    small = {"image_size": 16, "wrist_size": 8, "horizon": 4, "state_dim": 3, "action_dim": 2}
    model = replace(preset.model, **small, widths=(4, 8), width=16, heads=2)
    optimizer = replace(SMALL.optimizer, eps=1e-3)  # what precedes a norm has no gradient but noise
    return replace(SMALL, model=model, rows=preset.rows, optimizer=optimizer)


def run(config, data, out, **paths):
    assert train.run(train.Paths(str(data), out, **paths), config, QUIET).finished
    return losses(out)


@pytest.fixture(scope="module")
def trained(config, data, tmp_path_factory):
    with one_device():
        run(config, data, out := tmp_path_factory.mktemp("act") / "run")
    return out


@pytest.fixture(scope="module")
def policy(trained):
    return load_policy(trained)


def observed(count):
    rng = np.random.default_rng(3)
    pictures = rng.integers(0, 256, (count, 2, 16, 16, 3), dtype=np.uint8)
    return pictures, rng.normal(size=(count, 3)).astype(np.float32)


def acted(policy, shown):
    return policy.act(shown, ["" for _ in shown[0]], keys=[(0, i) for i in range(len(shown[0]))])


def test_eight_devices_learn_and_count_as_one_does(config, data, trained, policy, tmp_path):
    eight = run(replace(config, mesh=MeshConfig(data=4, fsdp=2)), data, tmp_path / "eight")
    np.testing.assert_allclose(eight, losses(trained), rtol=1e-4)
    ours, other = (
        p["tower"]["0"]["bn1"] for p in (load_policy(tmp_path / "eight").params, policy.params)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, other)
    assert policy.params["tower"]["1"]["bn3"]["running"]["batches"] == 8


def test_its_pictures_are_those_of_its_own_preparation(policy):
    front, wrist = policy.processor.pictures[:2]
    assert (front.kind, front.size, wrist.size) == ("act-stretched", 16, 8)
    assert policy.processor.prompts is None


def test_outside_of_training_a_sample_is_not_changed_by_what_it_is_packed_with(policy):
    model, (pictures, states) = policy.model, observed(3)
    chunk, seen = np.ones((4, 2), np.float32), policy.processor.sample
    samples = [
        replace(
            seen(list(pictures[i]), states[i], np.zeros(0, np.int32)),
            actions=(i + 1) * chunk,
            action_mask=chunk > 0,
        )
        for i in range(3)
    ]
    images = int(count_code(np.array([4, 5])))
    layout = model.config.layout(prefix=3 * 21, samples=3, images=images, text=4)
    batches = [pack([row], layout) for row in (samples, *([s] for s in samples))]
    acts = [np.asarray(model.sample_actions(policy.params, b, None))[0] for b in batches]
    np.testing.assert_allclose(acts[0], [x[0] for x in acts[1:]], atol=1e-5)
    sums = [model.loss(policy.params, b, None)[0] for b in batches]
    np.testing.assert_allclose(sums[0], sum(sums[1:]), rtol=1e-5)


def test_its_own_files_act_alike_and_training_goes_on_from_them(policy, config, data, tmp_path):
    writers("small-act")["small-act"](policy, tmp_path / "files")
    again = load_policy(tmp_path / "files")
    jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)
    np.testing.assert_array_equal(acted(again, observed(2)), acted(policy, observed(2)))
    with one_device():
        run(config, data, tmp_path / "tuned", init=tmp_path / "files")
    tuned = load_policy(tmp_path / "tuned")
    assert tuned.processor.pictures == policy.processor.pictures
    assert tuned.params["tower"]["0"]["bn1"]["running"]["batches"] == 16


@pytest.mark.parametrize("form", ["stablehlo", "onnx"])
def test_its_exported_program_acts_as_it_does(policy, form, tmp_path):
    run_file(FILE)
    write(policy, tmp_path / form, form)
    pictures, states = observed(3)
    inputs = {
        "images": pictures[:, :1],
        "images_2": np.stack([policy.processor.fit(1)(x[1])[None] for x in pictures]),
        "state": states,
        "noise": np.zeros((3, 4, 2), np.float32),
    }
    assert inputs.keys() == whole(policy).inputs.keys()
    found = ran(tmp_path / form, inputs, (), () if form == "stablehlo" else ("jax",))
    wanted = acted(policy, (pictures, states))
    np.testing.assert_allclose(found["actions"], wanted, atol=1e-4 * np.abs(wanted).max())
