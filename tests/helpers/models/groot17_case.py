"""The small GR00T-N1.7 of tests/fixtures/groot17, which `make_groot17.py` made with LeRobot 0.6.1
(transformers 5.5.4, torch 2.11.0): its files, with weights drawn again as they were."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.safetensors_format import write_file
from models.families.groot.n17.names import EMBEDDING, LM_HEAD
from tests.helpers.models.qwen_case import qwen_weights, smooth_pictures

FIXTURE = Path(__file__).parents[2] / "fixtures" / "groot17"
CASE = np.load(FIXTURE / "case.npz")
BACKBONE = FIXTURE / "nvidia" / "Cosmos-Reason2-2B"
SIZES = {"libero_sim": (64, 64), "new_embodiment": (90, 120), "plain": (90, 120)}
CAMERAS = {
    "libero_sim": ("image", "wrist_image"),
    "new_embodiment": ("front",),
    "plain": ("wrist", "front"),
}
IMAGE_TOKEN = 388
_BLOCK = "action_head.model.transformer_blocks."


def weights() -> dict[str, np.ndarray]:
    """The model's arrays under NVIDIA's names."""
    shapes = json.loads((FIXTURE / "names.json").read_text())
    shapes = {name: tuple(shape) for name, shape in shapes.items() if name != LM_HEAD}
    ends = {"norm1.linear.weight": 0.4, "attn1.to_out.0.weight": 0.6, "ff.net.2.weight": 0.6}
    blocks = {f"{_BLOCK}{i}.{end}": x for i in range(8) for end, x in ends.items()}
    return qwen_weights(shapes, 0, blocks)


def folder(name: str, path: Path) -> Path:
    """The case's folder of that name in `path`, with its weights."""
    target = path / name
    shutil.copytree(FIXTURE / name, target, dirs_exist_ok=True)
    arrays, prefix = weights(), ""
    if name != "checkpoint":
        arrays[LM_HEAD], prefix = arrays.pop(EMBEDDING), "_groot_model."
    entries = {prefix + n: (x.shape, lambda x=x: x) for n, x in arrays.items()}
    write_file(target / "model.safetensors", entries, np.dtype(np.float32), {"format": "pt"})
    return target


def observation(tag: str, sample: int) -> dict[str, Any]:
    """The raw observation of a sample."""
    samples = len(CASE[f"{tag}/state"])
    images = {}
    for number, camera in enumerate(CAMERAS[tag]):
        seed = number if tag == "plain" else 100 * number + len(tag)
        shots = smooth_pictures([SIZES[tag]] * samples, seed)
        images[f"observation.images.{camera}"] = shots[sample]
    state, task = CASE[f"{tag}/state"][sample], str(CASE[f"{tag}/task"][sample])
    return {**images, "observation.state": state, "task": task}
