"""GR00T-N1.5 folders of LeRobot's and NVIDIA's form, made of tests/fixtures/groot/whole, and the
observations that were recorded with them."""

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHOLE = FIXTURES / "groot/whole"
VIDEO = ("front", "wrist")
"""Cameras in LeRobot's order, which is the alphabet's."""
CASES = json.loads((WHOLE / "case.json").read_text())


def lerobots_folder(target: Path, tokenizer: bool = True) -> Path:
    """LeRobot's folder, with the sizes that a shrunk base model's config.json tells."""
    shutil.copytree(WHOLE / "lerobot", target)
    base = json.loads((WHOLE / "nvidia/config.json").read_text())
    told = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(base | told))
    if tokenizer:
        shutil.copytree(WHOLE / "eagle", target / "eagle")
    else:
        (target / "eagle").mkdir()
        shutil.copy(WHOLE / "eagle/config.json", target / "eagle")
    return target


def nvidias_folder(target: Path) -> Path:
    """The same weights as NVIDIA's fine-tuning leaves them."""
    shutil.copytree(WHOLE / "nvidia", target)
    shutil.copy(WHOLE / "lerobot/model.safetensors", target)
    shutil.copytree(WHOLE / "eagle", target / "eagle")
    return target


def write_modality(file: Path) -> Path:
    """A modality.json of the recorded robot, its cameras in LeRobot's order."""
    part = {
        "state": {"arm": (0, 5), "gripper": (5, 6)},
        "action": {"arm": (0, 6), "gripper": (6, 7)},
    }
    told = {
        kind: {name: {"start": first, "end": last} for name, (first, last) in parts.items()}
        for kind, parts in part.items()
    }
    told["video"] = {name: {"original_key": f"observation.images.{name}"} for name in VIDEO}
    told["annotation"] = {"human.task_description": {"original_key": "task_index"}}
    file.write_text(json.dumps(told))
    return file


def picture(name: str, size) -> np.ndarray:
    whole = np.asarray(Image.open(FIXTURES / "released/pictures" / name).convert("RGB"))
    return whole[: size[0], : size[1]]


def observed(case) -> dict:
    shown = {name: picture(file, case["size"]) for name, file in case["pictures"].items()}
    state = np.array(case["observation.state"], np.float32)
    return {**shown, "observation.state": state, "task": case["task"]}
