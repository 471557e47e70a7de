"""Cases of LeRobot's policies in tests/fixtures/policies: a folder as LeRobot 0.6.1 saved it, raw
observations with the actions that its own classes gave, and a training batch with its loss and the
norms of its gradients."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from models import Policy
from models.formats import writers
from tests.helpers.models.rule_weights import tensor

CASES = Path(__file__).parents[2] / "fixtures" / "policies"
_NEEDS = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "IDENTITY": ()}
_NEWER = ("use_peft", "pretrained_path", "pretrained_revision", "gradient_checkpointing")


def case_policy(name: str, folder: Path, fixed: dict[str, np.ndarray] | None = None) -> Path:
    """A case's folder with its weights, of which large ones are made by the rule by which the case
    was; `fixed`: those that are not."""
    shutil.copytree(CASES / name, folder, dirs_exist_ok=True)
    if not (folder / "model.safetensors").exists():
        told = json.loads((folder / "shapes.json").read_text())
        fixed = fixed or {}
        made = {n: tensor(n, tuple(x), told["seed"]) for n, x in told["shapes"].items()}
        save_file(made | fixed, folder / "model.safetensors")
    return folder


def as_older(folder: Path, out: Path) -> Path:
    """The folder as LeRobot before 0.4 wrote it: statistics among the weights, no pipelines."""
    out.mkdir()
    told = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    statistics = load_file(next(folder.glob("policy_preprocessor_step_*.safetensors")))
    for module, features in (
        ("normalize_inputs", "input_features"),
        ("normalize_targets", "output_features"),
        ("unnormalize_outputs", "output_features"),
    ):
        for name, feature in told[features].items():
            mode = told["normalization_mapping"].get(feature["type"], "IDENTITY")
            for kind in _NEEDS[mode]:
                buffer = f"{module}.buffer_{name.replace('.', '_')}.{kind}"
                weights[buffer] = statistics[f"{name}.{kind}"]
    save_file(weights, out / "model.safetensors")
    older = {name: value for name, value in told.items() if name not in _NEWER}
    (out / "config.json").write_text(json.dumps(older))
    return out


def arrays(name: str) -> dict[str, np.ndarray]:
    """A case's numbers: raw/FEATURE [t, …], train/…, actions [t, a] and others."""
    with np.load(CASES / name / "case.npz") as file:
        return dict(file)


def raw(case: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """The observation of a step as a robot sends it."""
    return {key[4:]: x[step] for key, x in case.items() if key.startswith("raw/")}


def written_cameras(policy: Policy, cameras: tuple[str, ...], folder: Path) -> list[str]:
    """Names that LeRobot's files of the policy give its cameras, were they called so here."""
    robot = replace(policy.processor.embodiments[0], cameras=cameras, absent=(), keys=None)
    named = replace(policy, processor=replace(policy.processor, embodiments=(robot,)))
    writers(policy.model.config.family)["lerobot"](named, folder)
    inputs = json.loads((folder / "config.json").read_text())["input_features"]
    return [name for name, feature in inputs.items() if feature["type"] == "VISUAL"]
