"""A user's file like ACT (no language, no flow, batch normalisation, its own pictures and files)
learns the same on every mesh, is fine-tuned from its own files, and is exported."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from models import load_policy
from models.files.own_file import named_in_file, run_file
from models.files.terminal import Console
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
CAMERAS = "observation.images.front", "observation.images.wrist"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("act") / "data")


@pytest.fixture(scope="module")
def config():
    preset = named_in_file(f"{FILE}:ACT")
    small = {"image_size": 16, "horizon": 4, "state_dim": 3, "action_dim": 2}
    model = replace(preset.model, **small, wrist=(8, 16), widths=(4, 8), width=16, heads=2)
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
    return [
        {
            "image": {name: rng.integers(0, 256, (24, 20, 3), dtype=np.uint8) for name in CAMERAS},
            "state": rng.normal(size=3).astype(np.float32),
        }
        for _ in range(count)
    ]


def fitted(policy, shown):
    """Pictures of each camera in its own size."""
    images, fit = shown["image"], policy.processor.fit
    return [fit(i)(images[camera]) for i, camera in enumerate(CAMERAS)]


def acted(policy, observations):
    return np.stack([policy.infer(shown)["actions"] for shown in observations])


def test_eight_devices_learn_and_count_as_one_does(config, data, trained, policy, tmp_path):
    eight = run(replace(config, mesh=MeshConfig(data=4, fsdp=2)), data, tmp_path / "eight")
    np.testing.assert_allclose(eight, losses(trained), rtol=1e-4)
    ours, other = (
        p["tower"]["0"]["bn1"] for p in (load_policy(tmp_path / "eight").params, policy.params)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, other)
    assert policy.params["tower"]["1"]["bn3"]["running"]["batches"] == 8


def test_each_camera_is_seen_in_its_own_size_and_fit(policy):
    assert [fit.kind for fit in policy.processor.fits] == ["act-stretched"] * 2
    assert policy.processor.image_sizes == ((16, 16), (8, 16))
    assert policy.processor.prompts is None


def test_outside_of_training_a_sample_is_not_changed_by_what_it_is_packed_with(policy):
    model, chunk = policy.model, np.ones((4, 2), np.float32)
    samples = [
        replace(
            policy.processor.sample(fitted(policy, shown), shown["state"], np.zeros(0, np.int32)),
            actions=(i + 1) * chunk,
            action_mask=chunk > 0,
        )
        for i, shown in enumerate(observed(3))
    ]
    images = int(count_code(np.array([3, 3])))
    layout = model.config.layout(prefix=3 * 25, samples=3, images=images, text=4)
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
    assert tuned.processor.fits == policy.processor.fits
    assert tuned.params["tower"]["0"]["bn1"]["running"]["batches"] == 16


@pytest.mark.parametrize("form", ["stablehlo", "onnx"])
def test_its_exported_program_acts_as_it_does(policy, form, tmp_path):
    run_file(FILE)
    write(policy, tmp_path / form, form)
    shown = observed(3)
    front, wrist = zip(*(fitted(policy, x) for x in shown), strict=True)
    inputs = {
        "images": np.stack(front)[:, None],
        "images_2": np.stack(wrist)[:, None],
        "state": np.stack([x["state"] for x in shown]),
        "noise": np.zeros((3, 4, 2), np.float32),
    }
    assert inputs.keys() == whole(policy).inputs.keys()
    found = ran(tmp_path / form, inputs, (), () if form == "stablehlo" else ("jax",))
    wanted = acted(policy, shown)
    np.testing.assert_allclose(found["actions"], wanted, atol=1e-4 * np.abs(wanted).max())
