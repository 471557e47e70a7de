"""Scaling of a LeRobot policy's state and actions, from the statistics saved with its weights.

LeRobot 0.4 and later keep them in a file that the normalizer of `policy_preprocessor.json` names,
and again in one of `policy_postprocessor.json`. Before, they were buffers among the weights
(`lerobot.policies.normalize`), infinite where a policy was saved without any.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from models.checkpoints.lerobot_pipeline import POSTPROCESSOR, PREPROCESSOR, Step
from models.families.pi.lerobot import (
    ANY,
    MODES,
    NORMALIZE,
    UNNORMALIZE,
    LerobotConfig,
    open_lerobot,
    read_config,
    read_scaling,
    read_steps,
)
from models.inputs.embodiment import Normalizer

_KINDS = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
_EPS = 1e-8
_BUFFERS = {
    "observation.state": ("normalize_inputs.buffer_observation_state",),
    "action": ("unnormalize_outputs.buffer_action", "normalize_targets.buffer_action"),
}
"""Names of a feature's buffers, to which a dot and the kind are added."""
Found = tuple[str, Mapping[str, np.ndarray], Any]
"""A place for messages, its statistics by FEATURE.KIND, and the constant that it adds to them."""


def read_normalizers(path: Path) -> dict[str, Normalizer]:
    """The scales of "observation.state" and "action"; {} if the policy is a base that was saved
    without statistics, for robots yet unknown.

    Args:
      path: the directory of the policy, or its weights in it.

    Raises:
      ValueError: a feature's scaling has an unknown mode, its statistics are not there, or files
        contradict each other.
    """
    return {name: scale for name, (_, scale) in read_modes(path).items()}


def read_modes(path: Path) -> dict[str, tuple[str, Normalizer]]:
    """LeRobot's name of each feature's scaling, such as "MEAN_STD", and its scales. The empty
    result, arguments and errors are those of `read_normalizers`."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    told = read_config(path) if (folder / "config.json").is_file() else _told_by_steps(folder)
    if not told.kind:
        return {}
    before, after = read_steps(path, told.kind)
    normalize, unnormalize = before.get(NORMALIZE), after.get(UNNORMALIZE)
    saved = [_of_step(normalize), _of_step(unnormalize)]
    usual = MODES.get(told.kind, "IDENTITY")
    state, action = (told.scaling.get(kind, usual) for kind in ("STATE", "ACTION"))
    features = (
        ("observation.state", state, told.robot_state or told.state_dim, saved),
        ("action", action, told.robot_action or told.action_dim, saved[::-1]),
    )
    scales, lacking = {}, []
    for name, mode, dims, places in features:
        found = [x for x in places if x and any(key.startswith(f"{name}.") for key in x[1])]
        if mode == "IDENTITY":
            scales[name] = mode, Normalizer.identity(dims)
        elif found := found or _in_weights(path, name):
            scales[name] = mode, _agreed(name, mode, dims, found)
        else:
            lacking.append((name, mode))
    if not lacking:
        return scales
    if len(lacking) == len(features) and _is_base(path, told, normalize):
        return {}
    name, mode = lacking[0]
    raise ValueError(
        f"{path}: {name} is scaled by {mode}, but its statistics are neither in {PREPROCESSOR} and "
        f"the file that it names, nor in those of {POSTPROCESSOR}, nor among the weights, so the "
        "policy would act in other units than its robot's; copy all policy_*.json and policy_*."
        "safetensors of its release or training beside its weights (or set normalization_mapping "
        "of config.json to IDENTITY if it was trained without scaling)."
    )


def has_statistics(path: Path) -> bool:
    """True if a policy's folder has files of steps, or buffers among its weights."""
    if any((path / name).is_file() for name in (PREPROCESSOR, POSTPROCESSOR)):
        return True
    return any(path.glob("model*.safetensors")) and bool(_buffers(path))


def _told_by_steps(folder: Path) -> LerobotConfig:
    """Facts that the files of steps tell where they are alone."""
    before, after = read_steps(folder, ANY)
    scaling = read_scaling(folder, {}, before.get(NORMALIZE), after.get(UNNORMALIZE))
    return LerobotConfig(0, 0, state_dim=0, action_dim=0, kind=ANY, scaling=scaling)


def _of_step(step: Step | None) -> Found | None:
    if step is None:
        return None
    return str(step.file), step.statistics(), step.config.get("eps", _EPS)


def _in_weights(path: Path, name: str) -> list[Found]:
    """Finite buffers of a feature, those that scale what the robot sends or gets first."""
    found: list[Found] = []
    buffers = _buffers(path)
    for first in _BUFFERS[name]:
        kinds = {key.rpartition(".")[2]: x for key, x in buffers.items() if key.startswith(first)}
        if kinds and all(np.isfinite(x).all() for x in kinds.values()):
            place = f"{path}, {first}"
            found.append((place, {f"{name}.{kind}": x for kind, x in kinds.items()}, _EPS))
    return found


def _buffers(path: Path) -> dict[str, np.ndarray]:
    """Statistics among the weights by their names."""
    wanted = tuple(f"{name}." for names in _BUFFERS.values() for name in names)
    arrays = open_lerobot(path).arrays
    return {name: np.asarray(x) for name, x in arrays.items() if name.startswith(wanted)}


def _is_base(path: Path, told: LerobotConfig, before: Step | None) -> bool:
    """True if a policy is of no robot, and was saved without statistics; or if its files, as those
    that LeRobot did not write, say nothing of scaling."""
    if not told.scaling:
        return True
    if told.robot_state not in (None, told.state_dim):
        return False
    if told.robot_action not in (None, told.action_dim):
        return False
    return bool(_buffers(path)) if before is None else "state_file" not in before.entry


def _agreed(name: str, mode: str, dims: int, found: Sequence[Found]) -> Normalizer:
    """The scale of the first place, on which all others must agree."""
    if mode not in _KINDS:
        raise ValueError(
            f"{found[0][0]} scales {name} by {mode[:80]}; expected one of {', '.join(_KINDS)}."
        )
    scales = [_normalizer(place, name, mode, dims, values, eps) for place, values, eps in found]
    for (place, _, _), scale in zip(found[1:], scales[1:], strict=True):
        same = np.allclose(scale.offset, scales[0].offset, rtol=1e-5, atol=1e-7)
        if not same or not np.allclose(scale.scale, scales[0].scale, rtol=1e-5, atol=1e-7):
            raise ValueError(
                f"{found[0][0]} and {place} have different statistics of {name}; copy both of the "
                "same policy."
            )
    return scales[0]


def _normalizer(
    where: str, name: str, mode: str, dims: int, statistics: Mapping[str, np.ndarray], eps: Any
) -> Normalizer:
    def get(kind: str) -> Float[np.ndarray, " d"]:
        if f"{name}.{kind}" not in statistics:
            raise ValueError(f"{where} scales {name} by {mode}, but its statistics lack '{kind}'.")
        array = np.asarray(statistics[f"{name}.{kind}"], np.float64)
        if array.ndim != 1 or (dims and len(array) > dims):
            raise ValueError(
                f"{where}: the statistics' {name}.{kind} has shape {list(array.shape)}, but "
                f"config.json gives {name} {dims or 'no'} dims; give the statistics of this robot."
            )
        return array

    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ValueError(f"{where}: eps is {str(eps)[:80]!r}; expected a number such as 1e-8.")
    first, second = map(get, _KINDS[mode])
    if mode == "MEAN_STD":
        offset, scale = first, second + eps
    else:
        width = np.where(second == first, eps, second - first)
        offset, scale = first + width / 2, width / 2
    try:
        return Normalizer(tuple(offset.tolist()), tuple(scale.tolist()))
    except ValueError as error:
        raise ValueError(f"{where}, {name}: {error}") from error
