"""How a LeRobot policy scales state and actions, from the preprocessor saved beside its weights.

LeRobot keeps a pipeline of steps in `policy_preprocessor.json`; the normalizer's statistics lie in
a safetensors file that the step names.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from models.checkpoints.safetensors_format import map_file
from models.processor import Normalizer

_STEP = "normalizer_processor"
_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}


def read_normalizers(path: Path) -> dict[str, Normalizer]:
    """The scales of the features that the policy's statistics cover, such as "observation.state"
    and "action"; {} where no statistics were saved with it.

    Args:
      path: the directory of the policy, or its weights in it.

    Raises:
      ValueError: a feature's scaling is of a mode that is not known, or lacks its statistics.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / "policy_preprocessor.json"
    if not file.is_file():
        return {}
    steps = [s for s in json.loads(file.read_text())["steps"] if s.get("registry_name") == _STEP]
    if not steps or "state_file" not in steps[0]:
        return {}
    statistics, _ = map_file(file.parent / steps[0]["state_file"])
    config = steps[0]["config"]
    normalizers = {}
    for name, feature in config["features"].items():
        mode = config["norm_map"].get(feature["type"], "IDENTITY")
        if mode != "IDENTITY" and any(key.startswith(f"{name}.") for key in statistics):
            normalizers[name] = _normalizer(file, name, mode, statistics, config)
    return normalizers


def _normalizer(
    file: Path, name: str, mode: str, statistics: dict[str, np.ndarray], config: dict[str, Any]
) -> Normalizer:
    def get(kind: str) -> Float[np.ndarray, "d"]:
        if f"{name}.{kind}" not in statistics:
            raise ValueError(f"{file} scales {name} by {mode} but its statistics lack '{kind}'.")
        return np.asarray(statistics[f"{name}.{kind}"], np.float64)

    if mode == "MEAN_STD":
        offset, scale = get("mean"), get("std") + config["eps"]
    elif mode in _RANGES:
        low, high = map(get, _RANGES[mode])
        width = np.where(high == low, config["eps"], high - low)
        offset, scale = low + width / 2, width / 2
    else:
        raise ValueError(
            f"{file} scales {name} by {mode}; known are MEAN_STD, {', '.join(_RANGES)}."
        )
    return Normalizer(tuple(offset.tolist()), tuple(scale.tolist()))
