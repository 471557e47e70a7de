"""Weights by a rule, so that a fixture with another code's results needs no file of them: numbers
drawn by each tensor's name, bit-equal on every machine."""

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One tensor, f32; a name that torch uses for counts is zeros."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    state = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    draw = state.random_sample(int(np.prod(shape))).reshape(shape)
    low, high = -0.1, 0.1
    if name.endswith("running_var") or (name.endswith("weight") and len(shape) < 2):
        low, high = 0.5, 1.5
    elif name.endswith("running_mean"):
        low, high = -0.2, 0.2
    elif "embed" in name and name.endswith("weight") and len(shape) == 2:
        low, high = -1.0, 1.0
    elif len(shape) > 1:
        high = (3.0 / float(np.prod(shape[1:]))) ** 0.5
        low = -high
    return (low + (high - low) * draw).astype(np.float32)


def whole(fixture: Path, target: Path) -> Path:
    """A copy of a fixture's folder, with the tensors that its shapes.json lists."""
    shutil.copytree(fixture, target)
    told = json.loads((fixture / "shapes.json").read_text())
    made = {name: tensor(name, tuple(x), told["seed"]) for name, x in told["shapes"].items()}
    save_file(made, target / "model.safetensors")
    return target
