"""Scaling of a LeRobot policy's state and actions, from the preprocessor saved beside its weights.

LeRobot keeps a pipeline of steps in `policy_preprocessor.json`; the normalizer's statistics are in
a safetensors file that its step names.
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from models.checkpoints.lerobot_pipeline import PREPROCESSOR, read_statistics, read_steps
from models.files.bounds import LARGEST_DIMS
from models.files.foreign_json import section
from models.inputs.embodiment import Normalizer

_STEP = "normalizer_processor"
_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}


def read_normalizers(path: Path) -> dict[str, Normalizer]:
    """The scales of the features that the policy's statistics cover, such as "observation.state"
    and "action"; {} if no statistics were saved with it.

    Args:
      path: the directory of the policy, or its weights in it.

    Raises:
      ValueError: a feature's scaling has an unknown mode, or lacks its statistics.
    """
    return {name: scale for name, (_, scale) in read_modes(path).items()}


def read_modes(path: Path) -> dict[str, tuple[str, Normalizer]]:
    """LeRobot's name of each feature's scaling, such as "MEAN_STD", and its scales. The empty
    result, arguments and errors are those of `read_normalizers`."""
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / PREPROCESSOR
    if not file.is_file():
        return {}
    where, steps = str(file), [x for x in read_steps(file) if x.get("registry_name") == _STEP]
    if not steps or "state_file" not in steps[0]:
        return {}
    statistics = read_statistics(file, steps[0])
    config = section(steps[0], "config", where)
    features, modes = (section(config, name, where) for name in ("features", "norm_map"))
    normalizers = {}
    for name in features:
        mode = modes.get(str(section(features, name, where).get("type")), "IDENTITY")
        if mode != "IDENTITY" and any(key.startswith(f"{name}.") for key in statistics):
            normalizers[name] = mode, _normalizer(file, name, mode, statistics, config)
    return normalizers


def _normalizer(
    file: Path, name: str, mode: str, statistics: dict[str, np.ndarray], config: dict[str, Any]
) -> Normalizer:
    def get(kind: str) -> Float[np.ndarray, " d"]:
        if f"{name}.{kind}" not in statistics:
            raise ValueError(f"{file} scales {name} by {mode}, but its statistics lack '{kind}'.")
        array = np.asarray(statistics[f"{name}.{kind}"], np.float64)
        if array.ndim != 1 or len(array) > LARGEST_DIMS:
            raise ValueError(
                f"{file}: the statistics' {name}.{kind} has shape {list(array.shape)}; expected "
                f"one axis of at most {LARGEST_DIMS}."
            )
        return array

    eps = config.get("eps", 1e-8)
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ValueError(f"{file}: eps is {str(eps)[:80]!r}; expected a number such as 1e-8.")
    if mode == "MEAN_STD":
        offset, scale = get("mean"), get("std") + eps
    elif isinstance(mode, str) and mode in _RANGES:
        low, high = map(get, _RANGES[mode])
        width = np.where(high == low, eps, high - low)
        offset, scale = low + width / 2, width / 2
    else:
        raise ValueError(
            f"{file} scales {name} by {str(mode)[:80]}; expected one of MEAN_STD, "
            f"{', '.join(_RANGES)}."
        )
    try:
        return Normalizer(tuple(offset.tolist()), tuple(scale.tolist()))
    except ValueError as error:
        raise ValueError(f"{file}, {name}: {error}") from error
