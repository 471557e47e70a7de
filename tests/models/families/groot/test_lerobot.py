"""GR00T written as LeRobot keeps it, beside the folder that LeRobot 0.4.4 itself saved of the same
policy; and what neither its files nor NVIDIA's can hold."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import Policy, load_policy
from models.families.groot import checkpoint, lerobot
from models.families.groot.conventions import released_processor, robots
from models.families.groot.model import GrootConfig
from models.inputs.pictures import StretchedMiddle
from models.inputs.processor import Processor
from models.inputs.prompts import TemplatePrompt
from models.inputs.tokenizer import Tokenizer
from tests.helpers.models.groot_whole import CASES, WHOLE, lerobots_folder, observed

THEIRS = WHOLE / "lerobot"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return load_policy(lerobots_folder(tmp_path_factory.mktemp("groot") / "theirs"))


@pytest.fixture(scope="module")
def written(policy, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("groot") / "ours"
    lerobot.write(policy, out)
    return out


def test_tensors_have_lerobots_names_shapes_and_values(written):
    ours, theirs = (load_file(x / "model.safetensors") for x in (written, THEIRS))
    assert set(ours) == set(theirs)
    unused = [name for name in theirs if ".vision_model.head." in name]
    assert len(unused) == 11
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        if name in unused:
            assert not ours[name].any()
        else:
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["policy_preprocessor", "policy_postprocessor"])
def test_processors_are_those_that_lerobot_saved(written, name):
    ours, theirs = (json.loads((x / f"{name}.json").read_text()) for x in (written, THEIRS))
    assert ours == theirs
    (file,) = [step["state_file"] for step in theirs["steps"] if "state_file" in step]
    statistics = load_file(written / file)
    wanted = {k: v for k, v in load_file(THEIRS / file).items() if k.endswith((".min", ".max"))}
    assert set(statistics) == set(wanted)
    for feature, value in wanted.items():
        np.testing.assert_allclose(statistics[feature], value, rtol=1e-6, atol=1e-7)


def test_the_config_differs_from_lerobots_in_nothing_that_it_tells(written):
    ours, theirs = (json.loads((x / "config.json").read_text()) for x in (written, THEIRS))
    features, wanted = (
        {name: told["type"] for name, told in (x.pop("input_features")).items()}
        for x in (ours, theirs)
    )
    assert features == wanted
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.slow
def test_what_was_written_acts_as_before_when_it_is_read_again(policy, written, tmp_path):
    folder = lerobots_folder(tmp_path / "again")
    sizes = json.loads((folder / "config.json").read_text())
    for file in written.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    told = sizes | json.loads((written / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told))
    again, noise = load_policy(folder), np.load(WHOLE / "case.npz")["noise"][0]
    found = [x.infer(observed(CASES[0]), noise=noise)["actions"] for x in (policy, again)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def by_class(step):
    del step["registry_name"]
    step["class"] = "lerobot.policies.groot.processor_groot.GrootPackInputsStep"


def pack_of(folder: Path, at=None):
    """The preprocessor's path and JSON, and its list of steps or one of them."""
    file = folder / "policy_preprocessor.json"
    told = json.loads(file.read_text())
    return file, told, told["steps"] if at is None else told["steps"][at]


@pytest.mark.parametrize(
    ("at", "change", "told"),
    [
        (2, lambda x: x.pop("state_file"), None),
        (2, lambda x: x.update(state_file="lost.safetensors"), None),
        (2, lambda x: x.update(state_file="model.safetensors"), None),
        (2, by_class, None),
        (None, lambda x: x.insert(0, {"registry_name": "mirror"}), "step 0 is 'mirror', which"),
        (None, lambda x: x.pop(2), "lacks the step groot_pack_inputs_v3"),
        (2, lambda x: x["config"].update(formalize_language=True), "only False is supported"),
    ],
)
def test_scales_are_found_in_either_file_of_lerobots_and_unknown_steps_refused(
    tmp_path, at, change, told
):
    folder = lerobots_folder(tmp_path / "folder", tokenizer=False)
    (wanted,) = (read() for read in robots(folder).values())
    file, values, part = pack_of(folder, at)
    change(part)
    file.write_text(json.dumps(values))
    if told is None:
        (found,) = (read() for read in robots(folder).values())
        assert found == wanted
        return
    for read in (robots, lambda folder: released_processor(folder, GrootConfig())):
        with pytest.raises(ValueError, match=told):
            read(folder)


def test_renamed_cameras_are_read_under_the_robots_names(tmp_path):
    folder = lerobots_folder(tmp_path / "folder", tokenizer=False)
    (before,) = (read() for read in robots(folder).values())
    file, values, rename = pack_of(folder, 0)
    front, wrist = before.cameras
    rename["config"]["rename_map"] = {front: wrist, wrist: front, "joints": "observation.state"}
    file.write_text(json.dumps(values))
    (robot,) = (read() for read in robots(folder).values())
    assert robot.cameras == (wrist, front)
    assert robot.keys.state == ("joints",)
    assert robot.actions == before.actions


def test_statistics_that_contradict_each_other_or_are_lost_are_refused(tmp_path):
    folder = lerobots_folder(tmp_path / "folder", tokenizer=False)
    (file,) = folder.glob("policy_postprocessor*.safetensors")
    found = load_file(file)
    save_file(found | {"action.max": found["action.max"] + 1}, file)
    with pytest.raises(ValueError, match="have different statistics of action"):
        robots(folder)
    for file in folder.glob("policy_*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no statistics of observation\.state \(min and max\)"):
        robots(folder)


def other(policy: Policy, **fields: object) -> Policy:
    processor: Processor = replace(policy.processor, **fields)
    return replace(policy, processor=processor)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: replace(p, processor=None), "reads prompts with Eagle's chat"),
        (lambda p: other(p, pictures=StretchedMiddle(224)), "stretches whole images to 224 pixels"),
        (
            lambda p: other(
                p,
                embodiments=(
                    replace(p.processor.embodiments[0], cameras=("wrist", "front"), keys=None),
                ),
            ),
            "cameras in alphabetical order, but 'new_embodiment' .* wrist, front",
        ),
    ],
)
def test_a_policy_that_lerobot_would_prepare_for_otherwise_is_refused(
    policy, tmp_path, change, told
):
    with pytest.raises(ValueError, match=told):
        lerobot.write(change(policy), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def robot(policy: Policy, **fields: object) -> Policy:
    return other(policy, embodiments=(replace(policy.processor.embodiments[0], **fields),))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda p: other(p, prompts=TemplatePrompt(Tokenizer(("go",)))),
            "reads prompts with Eagle's chat",
        ),
        (lambda p: robot(p, relative=(0, 1, 2, 3, 4, 5, -1)), r"units of 'new_embodiment' \(adap"),
        (
            lambda p: robot(p, cameras=("left.rgb", "right.rgb"), keys=None),
            r"share a name \(left.rgb, right.rgb\); give --to chiliad",
        ),
    ],
)
def test_a_policy_that_nvidias_code_would_run_otherwise_is_refused(policy, tmp_path, change, told):
    with pytest.raises(ValueError, match=told):
        checkpoint.write(change(policy), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_model_is_left_as_it_is(policy, written):
    with pytest.raises(ValueError, match="give a directory without a model"):
        lerobot.write(policy, written)
