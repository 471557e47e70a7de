"""A LeRobot policy's folder tells its features and their scales, in the forms of each version, and
one that we write gives the same scales to the bit."""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.checkpoints.lerobot_policy import Feature, PolicyFields, read_policy, write_policy
from models.inputs.embodiment import Normalizer

LEFT, FRONT = "observation.images.left_wrist", "observation.images.front"


@dataclass(frozen=True)
class Told(PolicyFields):
    chunk_size: int = 100
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
    )


POLICY = Told(
    "mine",
    input_features={
        LEFT: Feature("VISUAL", (3, 8, 12)),
        "observation.state": Feature("STATE", (2,)),
        FRONT: Feature("VISUAL", (3, 8, 8)),
        "observation.environment_state": Feature("ENV", (3,)),
    },
    output_features={"action": Feature("ACTION", (2,))},
)
f32 = np.float32
SCALES = {
    LEFT: Normalizer((0.25, 0.5, 0.125), tuple(float(f32(x)) + 1e-8 for x in (0.1, 0.2, 0.3))),
    FRONT: Normalizer((0.5, 0.5, 0.5), tuple(float(f32(x)) + 1e-8 for x in (0.3, 0.2, 0.1))),
    "observation.state": Normalizer((1.0, -2.0), (float(f32(0.7)) + 1e-8, 3.0 + 1e-8)),
    "action": Normalizer((0.5, 4.0 + 5e-9), (1.5, 5e-9)),
}
"""The action is scaled by its range, the second of which is empty."""


def write(folder, scales=SCALES):
    arrays = {"model.x": ((2,), lambda: np.ones(2))}
    write_policy(folder, POLICY, arrays, scales)
    return folder


def test_a_folder_that_we_write_gives_its_scales_to_the_bit(tmp_path):
    read = read_policy(write(tmp_path), Told)
    assert {name: read.scales[name] for name in SCALES} == SCALES
    assert read.scale("STATE", "ENV").offset == (1, -2, 0, 0, 0)
    assert read.picture_scales == (SCALES[LEFT], SCALES[FRONT])
    assert read.fields.picture_shapes == ((8, 12), (8, 8))
    assert read.modes["action"] == "MIN_MAX"
    told = json.loads((tmp_path / "config.json").read_text())
    assert list(told["input_features"]) == list(POLICY.input_features)
    assert not {"pretrained_revision", "gradient_checkpointing"} & told.keys()
    saved = load_file(tmp_path / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    assert saved[f"{LEFT}.mean"].shape == (3, 1, 1)


def test_scales_that_no_file_holds_exactly_are_kept_to_f32(tmp_path):
    odd = SCALES | {"action": Normalizer((0.1, 0.2), (1 / 3, 2 / 3))}
    read = read_policy(write(tmp_path / "a", odd), Told)
    np.testing.assert_allclose(read.scales["action"].scale, odd["action"].scale, rtol=1e-7)
    again = read_policy(write(tmp_path / "b", dict(read.scales)), Told)
    assert again.scales == read.scales


@pytest.mark.parametrize("variant", ["", "so100-blue_"])
@pytest.mark.parametrize("compiled", ["", "_orig_mod."])
def test_buffers_are_matched_by_the_names_of_features(variant, compiled, tmp_path):
    whole = read_policy(write(tmp_path), Told).scales
    saved = load_file(tmp_path / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    buffers = {}
    for key, value in saved.items():
        name, _, kind = key.rpartition(".")
        module = "unnormalize_outputs" if name == "action" else "normalize_inputs"
        written = f"{variant}buffer_{name.replace('.', '_')}.{kind}"
        buffers[f"{module}.{compiled}{written}"] = value
    for file in tmp_path.glob("policy_*"):
        file.unlink()
    save_file(buffers, tmp_path / "model.safetensors")
    older = read_policy(tmp_path, Told).scales
    for name, scale in whole.items():
        np.testing.assert_allclose(older[name].offset, scale.offset, rtol=1e-8)
        np.testing.assert_allclose(older[name].scale, scale.scale, rtol=2e-8)


def config(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def lost(folder):
    for file in folder.glob("policy_*"):
        file.unlink()


def step(**values):
    def change(folder):
        file = folder / "policy_preprocessor.json"
        told = json.loads(file.read_text())
        told["steps"][0] |= values
        file.write_text(json.dumps(told))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(horizon=3), r"config.json .*unknown fields \['horizon'\]"),
        (config(chunk_size="x"), "chunk_size is 'x', expected int"),
        (config(output_features={}), "expected one action"),
        (config(output_features={"action": {"type": "LANGUAGE", "shape": [2]}}), "LANGUAGE"),
        (config(output_features={"action": {"type": "ACTION", "shape": [2, 2]}}), "one size"),
        (config(output_features={"action": {"type": "ACTION", "shape": [1]}}), "1 dims"),
        (lost, "left_wrist is scaled by MEAN_STD, but its statistics are neither"),
        (step(registry_name="blur_processor"), "blur_processor.*not carried out"),
        (step(config={"rename_map": {LEFT: "x"}}), f"turns {LEFT} into x"),
    ],
)
def test_folders_that_would_act_otherwise_are_refused(change, message, tmp_path):
    change(write(tmp_path))
    with pytest.raises(ValueError, match=message):
        read_policy(tmp_path, Told)


def test_a_robot_may_name_its_inputs_otherwise(tmp_path):
    step(config={"rename_map": {"cam": LEFT}})(write(tmp_path))
    assert read_policy(tmp_path, Told).robot[LEFT] == "cam"


def test_a_base_without_statistics_has_no_scales(tmp_path):
    write(tmp_path, {})
    mapping = replace(POLICY).normalization_mapping
    for name in ("policy_preprocessor", "policy_postprocessor"):
        file = tmp_path / f"{name}.json"
        told = json.loads(file.read_text())
        for one in told["steps"]:
            one.pop("state_file", None)
            one["config"] |= {"norm_map": mapping} if "norm_map" in one["config"] else {}
        file.write_text(json.dumps(told))
    for file in tmp_path.glob("policy_*.safetensors"):
        file.unlink()
    assert read_policy(tmp_path, Told, base=True).scales == {}
    with pytest.raises(ValueError, match="statistics are neither"):
        read_policy(tmp_path, Told)
