"""Released policies answer raw observations as their authors' own stacks do, from uint8 pictures,
the robot's state and words to actions in the robot's units: recorded by openpi's `Policy.infer` and
by LeRobot 0.4.4 and 0.6.1, for every policy of the table (tests/fixtures/released)."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import load_policy
from models.families.pi.released import RELEASED
from tests.helpers.models.released_cases import (
    RELEASED_CASES,
    answers,
    case_policy,
)

TOKENIZER = RELEASED_CASES / "tokenizer.model"
OPENPI = sorted(file.parent for file in RELEASED_CASES.glob("openpi/*/case.json"))
LEROBOT = sorted(file.parent for file in RELEASED_CASES.glob("lerobot/*/*/case.json"))
UNRUNNABLE = {"paligemma_diffusion_droid"}
"""openpi's own config of it raises TypeError (DroidInputs takes no action_dim)."""


@pytest.fixture(scope="module")
def like():
    """Policies by what they compile for, whose compiled functions others take over."""
    return {}


def answer(case, folder, like, change=None, **options):
    """Largest difference from the recorded actions, as a part of the largest of these, after a
    `change` of the policy's folder."""
    root = case_policy(case, folder)
    if change is not None:
        change(root)
    if case.parent.name == "0.4.4":  # as its training leaves it, by which its version is told
        (root / "train_config.json").write_text("{}")
    policy = load_policy(root, tokenizer=TOKENIZER, **options)
    key = policy.model.config
    if key in like:
        vars(policy).update({name: getattr(like[key], name) for name in ("_sample", "_error")})
    like.setdefault(key, policy)
    observations, recorded = answers(case)
    errors = []
    for seen, noise, actions in zip(
        observations, recorded["noise"], recorded["actions"], strict=True
    ):
        found = policy.infer(seen, noise=noise[None])["actions"]
        found = found.reshape(found.shape[-2:])
        wanted = actions[:, : found.shape[-1]]
        assert found.shape == wanted.shape
        errors.append(float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    return max(errors)


def untold(case):
    """Options of `load_policy` for what neither the case's files nor the table tell."""
    return {"relative": ()} if case.name.endswith("_base") else {}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPENPI, ids=lambda case: case.name)
def test_openpis_policies_answer_as_openpis_own_stack(case, tmp_path, like):
    assert answer(case, tmp_path, like, **untold(case)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", LEROBOT, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_lerobots_policies_answer_as_lerobots_own_stack(case, tmp_path, like):
    assert answer(case, tmp_path, like, **untold(case)) < 1e-4


def before_lerobot_04(root):
    """Statistics as buffers among the weights, as LeRobot saved them before 0.4."""
    found = load_file(next(root.glob("policy_preprocessor_step_*")))
    for file in root.glob("policy_*"):
        file.unlink()
    weights, buffers = load_file(root / "model.safetensors"), {}
    for layer, feature in (
        ("normalize_inputs", "observation.state"),
        ("unnormalize_outputs", "action"),
        ("normalize_targets", "action"),
    ):
        for kind in ("mean", "std"):
            name = f"{layer}.buffer_{feature.replace('.', '_')}.{kind}"
            buffers[name] = found[f"{feature}.{kind}"]
    (root / "model.safetensors").unlink()
    save_file(weights | buffers, root / "model.safetensors")


@pytest.mark.slow
def test_a_policy_of_lerobot_before_04_is_scaled_by_its_buffers(tmp_path, like):
    case = RELEASED_CASES / "lerobot/0.4.4/pi0"
    assert answer(case, tmp_path, like, before_lerobot_04) < 1e-4


def test_every_policy_of_openpis_that_can_act_here_was_recorded():
    acting = {
        name
        for name, row in RELEASED.items()
        if row.source == "openpi" and "_fast_" not in name and not row.refused
    }
    assert acting - UNRUNNABLE == {case.name for case in OPENPI}


def test_a_base_of_several_robots_is_read_in_the_models_units_until_one_is_chosen(tmp_path):
    """openpi's bases come with statistics of many robots; to fine-tune, none of them is needed."""
    case = RELEASED_CASES / "openpi/pi05_base"
    root = case_policy(case, tmp_path)
    shutil.copytree(root / "assets/robot", root / "assets/other")
    (robot,) = load_policy(root, tokenizer=TOKENIZER).processor.embodiments
    assert robot.name == "model units"
    with pytest.raises(ValueError, match=r"statistics of \['other', 'robot'\]; choose one"):
        load_policy(root, tokenizer=TOKENIZER, relative=())
    (robot,) = load_policy(
        root, tokenizer=TOKENIZER, robot="other", relative=()
    ).processor.embodiments
    assert robot.name == "other"
    with pytest.raises(ValueError, match="relative: the action dims"):
        load_policy(root, tokenizer=TOKENIZER, robot="other")
