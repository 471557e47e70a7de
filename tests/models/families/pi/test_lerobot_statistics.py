"""A LeRobot policy's scales are those with which it was trained, however its folder has them; where
none are left, it is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.families.pi.lerobot import read_config
from models.families.pi.lerobot_statistics import has_statistics, read_modes, read_normalizers

STATISTICS = {
    "observation.state.q01": [0.0, 1.0, 2.0],
    "observation.state.q99": [1.0, 5.0, 2.0],
    "observation.state.count": [9.0],
    "action.mean": [1.0, 2.0],
    "action.std": [0.5, 2.0],
}
FEATURES = {
    "observation.images.a": {"type": "VISUAL", "shape": [3, 8, 8]},
    "observation.images.b": {"type": "VISUAL", "shape": [3, 8, 8]},
    "observation.state": {"type": "STATE", "shape": [3]},
    "action": {"type": "ACTION", "shape": [2]},
}
NORM_MAP = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "MEAN_STD"}
CONFIG = {
    "type": "pi0",
    "chunk_size": 6,
    "input_features": {name: x for name, x in FEATURES.items() if name != "action"},
    "output_features": {"action": FEATURES["action"]},
    "normalization_mapping": NORM_MAP,
}
BEFORE, AFTER = "policy_preprocessor", "policy_postprocessor"
LEGACY = {
    "normalize_inputs.buffer_observation_state.mean": [1.0, 2.0, 3.0],
    "normalize_inputs.buffer_observation_state.std": [2.0, 2.0, 4.0],
    "unnormalize_outputs.buffer_action.mean": [1.0, 2.0],
    "unnormalize_outputs.buffer_action.std": [0.5, 2.0],
    "normalize_targets.buffer_action.mean": [1.0, 2.0],
    "normalize_targets.buffer_action.std": [0.5, 2.0],
}
MEANS = {"normalization_mapping": {**NORM_MAP, "STATE": "MEAN_STD"}}
INFINITE = {name: [np.inf] * len(x) for name, x in LEGACY.items()}


def step(name, **config):
    return {"registry_name": name, "config": config}


def numbers(values):
    return {name: np.asarray(x, np.float32) for name, x in values.items()}


def save(path: Path) -> Path:
    """A policy's folder as LeRobot 0.4.4 saves it, but for its weights."""
    scale = {"eps": 1e-8, "norm_map": NORM_MAP}
    steps = {
        BEFORE: [
            step("rename_observations_processor", rename_map={}),
            step("to_batch_processor"),
            step("pi0_new_line_processor"),
            step("tokenizer_processor", max_length=48),
            step("device_processor", device="cpu", float_dtype=None),
            step("normalizer_processor", features=FEATURES, **scale),
        ],
        AFTER: [
            step("unnormalizer_processor", features={"action": FEATURES["action"]}, **scale),
            step("device_processor", device="cpu", float_dtype=None),
        ],
    }
    for name, at in ((BEFORE, 5), (AFTER, 0)):
        one = steps[name][at]
        one["state_file"] = f"{name}_step_{at}_{one['registry_name']}.safetensors"
        save_file(numbers(STATISTICS), path / one["state_file"])
        (path / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps[name]}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"weights": np.zeros(1, np.float32)}, path / "model.safetensors")
    return path


def remove(*patterns):
    return lambda path: [file.unlink() for x in patterns for file in path.glob(x)]


def configured(**values):
    def change(path):
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(json.dumps(json.loads(text) | values))

    return change


def stepped(change, at=5, name=BEFORE):
    """A change of one step, or of the list of steps if `at` is None."""

    def edit(path):
        file = path / f"{name}.json"
        told = json.loads(file.read_text())
        change(told["steps"] if at is None else told["steps"][at])
        file.write_text(json.dumps(told))

    return edit


def weights(values, *changes):
    def change(path):
        remove("policy_*")(path)
        save_file(numbers({"weights": [0.0], **values}), path / "model.safetensors")
        configured(**MEANS)(path)
        for one in changes:
            one(path)

    return change


def other(name, **values):
    """Other statistics in one of the two files."""
    return lambda path: save_file(numbers(STATISTICS | values), next(path.glob(f"{name}_step*")))


NORMALIZER = "lerobot.processor.normalize_processor.NormalizerProcessorStep"


def named_by_class(step):
    step["class"] = NORMALIZER
    del step["registry_name"]


def mapped(**modes):
    """A change of the scaling in both files."""

    def change(path):
        for at, name in ((5, BEFORE), (0, AFTER)):
            stepped(lambda x: x["config"]["norm_map"].update(modes), at, name)(path)

    return change


def test_state_and_action_are_scaled_as_lerobot_scales_them(tmp_path):
    normalizers = read_normalizers(save(tmp_path))
    assert set(normalizers) == {"observation.state", "action"}
    state = normalizers["observation.state"](np.asarray([0.25, 2.0, 2.0]))
    np.testing.assert_allclose(state, [-0.5, -0.5, -1.0], rtol=1e-6)
    np.testing.assert_allclose(normalizers["action"](np.asarray([3.0, 1.0])), [4.0, -0.5])


@pytest.mark.parametrize(
    "change",
    [
        remove(f"{BEFORE}.json"),
        remove(f"{BEFORE}*"),
        remove(f"{AFTER}*"),
        remove(f"{BEFORE}_step*"),
        stepped(lambda x: x.pop("state_file")),
        stepped(lambda x: x.update(state_file=None)),
        stepped(lambda x: x.update(state_file="model.safetensors")),
        stepped(named_by_class),
        stepped(lambda x: (named_by_class(x), x.pop("state_file"))),
        stepped(lambda x: x["config"].update(features={})),
        stepped(lambda x: x["config"].pop("features")),
        stepped(lambda x: x["config"].update(norm_map={})),
        stepped(lambda x: x.pop("config")),
        stepped(lambda steps: steps.pop(5), None),
        stepped(lambda steps: steps.insert(1, {"class": "lerobot.x.IdentityProcessorStep"}), None),
        stepped(lambda steps: steps.insert(0, step("to_batch_processor_action")), None, AFTER),
        configured(normalization_mapping=None),
    ],
)
def test_scales_are_found_where_a_folder_still_has_them(tmp_path, change):
    whole = read_normalizers(save(tmp_path))
    change(tmp_path)
    assert read_normalizers(tmp_path) == whole
    assert has_statistics(tmp_path)


@pytest.mark.parametrize("prefix", ["", "model.", "_orig_mod.", "model._orig_mod."])
def test_buffers_of_an_older_lerobot_are_its_scales(tmp_path, prefix):
    weights({prefix + name: x for name, x in LEGACY.items()})(save(tmp_path))
    assert has_statistics(tmp_path)
    found = read_modes(tmp_path)
    assert {name: mode for name, (mode, _) in found.items()} == {
        "observation.state": "MEAN_STD",
        "action": "MEAN_STD",
    }
    state, action = (found[name][1] for name in ("observation.state", "action"))
    np.testing.assert_allclose(state(np.asarray([3.0, 0.0, 3.0])), [1.0, -1.0, 0.0])
    np.testing.assert_allclose(action.inverse(np.asarray([2.0, -1.0])), [2.0, 0.0], atol=1e-7)


def test_a_scale_of_least_and_largest_is_read_from_buffers(tmp_path):
    ranges = {"normalization_mapping": dict.fromkeys(("STATE", "ACTION"), "MIN_MAX")}
    state = "normalize_inputs.buffer_observation_state"
    least = {f"{state}.min": [0.0] * 3, f"{state}.max": [1.0] * 3} | {
        f"{name}.{kind}": [-1.0, 0.0] if kind == "min" else [0.5, 2.0]
        for name in ("unnormalize_outputs.buffer_action", "normalize_targets.buffer_action")
        for kind in ("min", "max")
    }
    odd = least | {"unnormalize_outputs.buffer_action.min": [-2.0, 0.0]}
    weights(odd, configured(**ranges))(save(tmp_path))
    with pytest.raises(ValueError, match="different statistics of action"):
        read_normalizers(tmp_path)
    weights(least, configured(**ranges))(tmp_path)
    action = read_normalizers(tmp_path)["action"]
    np.testing.assert_allclose(action.inverse(np.asarray([-1.0, 1.0])), [-1.0, 2.0], rtol=1e-6)


def test_a_fine_tune_that_kept_its_bases_padded_features_has_its_robots_scales(tmp_path):
    wide = {name: x | {"shape": [32]} for name, x in FEATURES.items() if x["type"] != "VISUAL"}
    configured(input_features=wide, output_features=wide)(save(tmp_path))
    stepped(lambda x: x.update(registry_name=None, **{"class": NORMALIZER}))(tmp_path)
    found = read_normalizers(tmp_path)
    assert {name: len(x.offset) for name, x in found.items()} == {
        "observation.state": 3,
        "action": 2,
    }


LOST = "QUANTILES|MEAN_STD.* neither in policy_preprocessor.json .* copy all policy_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("policy_*"), LOST),
        (remove("policy_*.safetensors"), LOST),
        (remove("policy_*.json"), LOST),
        (weights(INFINITE), LOST),
        (weights({"normalize_inputs.so100_buffer_observation_state.mean": [0.0] * 3}), "lack .std"),
        (
            weights({n: x for n, x in LEGACY.items() if "action" in n}),
            "observation.state is .*" + LOST,
        ),
        (stepped(lambda x: x["config"]["norm_map"].update(ACTION="QUANTILES")), "scale ACTION by"),
        (
            mapped(STATE="LOG"),
            "LOG; expected one of MEAN",
        ),
        (
            mapped(STATE="MIN_MAX"),
            "statistics lack 'min'",
        ),
        (
            mapped(VISUAL="MEAN_STD"),
            "scales pictures by",
        ),
        (configured(normalization_mapping={**NORM_MAP, "VISUAL": "MIN_MAX"}), None),
        (other(BEFORE, **{"action.mean": [1.0, 3.0]}), "have different statistics of action"),
        (
            other(AFTER, **{"observation.state.q01": [0.0, 0.0, 0.0]}),
            "statistics of observ",
        ),
        (other(AFTER, **{"action.std": [1.0] * 32}), r"action.std has shape \[32\], but .* 2 dims"),
        (stepped(lambda x: x.update(state_file="../stats")), "state_file"),
        (stepped(lambda x: x["config"].update(stats={"action": {"mean": "x"}})), "no numbers"),
        (stepped(lambda x: x["config"].update(normalize_observation_keys=5)), "list of names"),
    ],
)
def test_scales_that_are_lost_or_contradict_are_refused_in_one_sentence(tmp_path, change, message):
    change(save(tmp_path))
    if message is None:  # the steps count, not config.json
        assert read_normalizers(tmp_path)
        return
    with pytest.raises(ValueError, match=message) as error:
        read_normalizers(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (remove("*_step_*")(path), stepped(lambda x: x.pop("state_file"))(path)),
        weights({name: [np.inf] * 32 for name in LEGACY}),
    ],
)
def test_a_base_saved_without_statistics_is_in_the_models_units(tmp_path, change):
    change(save(tmp_path))
    bare = {"observation.images.a": FEATURES["observation.images.a"]}
    configured(input_features=bare, output_features={})(tmp_path)
    assert read_normalizers(tmp_path) == {}
    configured(output_features={"action": FEATURES["action"]})(tmp_path)
    with pytest.raises(ValueError, match=LOST):
        read_normalizers(tmp_path)


def test_what_is_not_scaled_by_its_files_keeps_its_numbers(tmp_path):
    stepped(lambda x: x["config"].update(normalize_observation_keys=["action"]))(save(tmp_path))
    scales = read_normalizers(tmp_path)
    assert scales["observation.state"].scale == (1.0, 1.0, 1.0)
    assert scales["action"].offset == (1.0, 2.0)


UNKNOWN = step("arm_swap_processor", enabled=True)
CAMERAS = ("observation.images.a", "observation.images.b")
SWAPPED = dict(zip(CAMERAS, CAMERAS[::-1], strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (stepped(lambda steps: steps.insert(3, UNKNOWN), None), "step 3 is 'arm_swap_processor'"),
        (stepped(lambda steps: steps.insert(0, UNKNOWN), None, AFTER), "step 0 is 'arm_swap_pro"),
        (
            stepped(lambda steps: steps.append({"class": "mine.NormalizerProcessorStep"}), None),
            "mine.",
        ),
        (stepped(lambda steps: steps.append({}), None), "step 6 is '', which is not carried out"),
        (stepped(lambda steps: steps.append(steps[5]), None), "normalizer_processor twice"),
        (
            stepped(lambda steps: steps.insert(0, steps.pop()), None),
            "in the order normalizer",
        ),
        (stepped(lambda steps: steps.pop(2), None), "lacks the step pi0_new_line_processor"),
        (stepped(lambda steps: steps.clear(), None), "lacks the step"),
        (
            stepped(lambda x: x["config"].update(float_dtype="bfloat16"), 4),
            "only None is",
        ),
        (stepped(lambda x: x["config"].update(task_key="words"), 3), "only task is supported"),
        (
            stepped(
                lambda steps: steps.insert(5, step("delta_actions_processor", enabled=True)), None
            ),
            "makes actions relative to the state, but policy_postprocessor.json does not add it",
        ),
        (
            stepped(lambda x: x["config"].update(rename_map=dict.fromkeys("xy", "z")), 0),
            "two observations the same name",
        ),
        (stepped(lambda x: x["config"].update(rename_map={"x": 1}), 0), "expected names"),
    ],
)
def test_a_step_that_is_not_carried_out_is_refused_by_name(tmp_path, change, message):
    change(save(tmp_path))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_settings_of_an_older_config_are_those_that_act(tmp_path):
    configured(adapt_to_pi_aloha=True, num_steps=4)(save(tmp_path))
    told = read_config(tmp_path)
    assert (told.adapter, told.euler_steps) == ("aloha", 4)
    configured(use_delta_joint_actions_aloha=True)(tmp_path)
    with pytest.raises(ValueError, match="use_delta_joint_actions_aloha; LeRobot itself"):
        read_config(tmp_path)


def test_steps_settings_are_those_that_act(tmp_path):
    stepped(lambda x: x["config"].update(rename_map=SWAPPED), 0)(save(tmp_path))
    stepped(lambda x: x["config"].update(max_length=21), 3)(tmp_path)
    told = read_config(tmp_path)
    assert told.renamed == SWAPPED
    assert told.text == 21
    assert told.cameras == CAMERAS
