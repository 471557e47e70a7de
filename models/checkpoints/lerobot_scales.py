"""Scaling of a LeRobot policy's features, from the statistics saved with its weights.

LeRobot 0.4 and later keep them in a file that the normalizer of `policy_preprocessor.json` names,
and again in one of `policy_postprocessor.json`. Before, they were buffers among the weights
(`lerobot.policies.normalize`), infinite where a policy was saved without any.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from models.checkpoints.lerobot_pipeline import POSTPROCESSOR, PREPROCESSOR, Step
from models.checkpoints.safetensors_format import Entry
from models.files.foreign_json import section
from models.inputs.embodiment import Normalizer

Kind = Literal["STATE", "VISUAL", "ENV", "ACTION"]
NORMALIZE, UNNORMALIZE = "normalizer_processor", "unnormalizer_processor"
SCALINGS: Mapping[str, str] = MappingProxyType(
    {"MEAN_STD": "z-score", "MIN_MAX": "min-max", "QUANTILES": "quantile"}
)
"""Our names of LeRobot's modes of scaling."""
EPSILON = 1e-8
_STATISTICS = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
_WEIGHTS = ("normalize_inputs", "unnormalize_outputs", "normalize_targets")
"""Modules of older policies whose buffers are statistics."""


class Found(NamedTuple):
    """A place for messages, its statistics by FEATURE.KIND, the constant that it adds to them, and
    whether a range has it added always, not only in place of 0."""

    place: str
    statistics: Mapping[str, np.ndarray]
    epsilon: Any = EPSILON
    older: bool = False


def read_scaling(
    folder: Path, told: Mapping[str, Any] | None, before: Step | None, after: Step | None
) -> dict[str, str]:
    """LeRobot's mode of scaling by kind of feature, as the (un)normalizers of both pipelines say,
    or else `normalization_mapping` of config.json, `told`; {} where neither says.

    Raises:
      ValueError: the steps contradict each other.
    """
    found = {}
    for what in ("VISUAL", "STATE", "ENV", "ACTION"):
        steps = [step for step in (before, after) if step is not None]
        maps = [section(step.config, "norm_map", str(step.file)) for step in steps]
        modes = {str(norm_map[what]) for norm_map in maps if what in norm_map}
        if modes or told is not None:
            found[what] = str(next(iter(modes), (told or {}).get(what, "IDENTITY")))
        if len(modes) > 1:
            raise ValueError(
                f"{folder / PREPROCESSOR} and {POSTPROCESSOR} scale {what} by "
                f"{' and '.join(sorted(modes))[:80]}; copy both of the same policy."
            )
    return found


def is_scaled(before: Step | None, name: str) -> bool:
    """False if the preprocessor leaves this observation out of those that it scales.

    Raises:
      ValueError: its list is no list of names.
    """
    keys = None if before is None else before.config.get("normalize_observation_keys")
    if before is not None and keys is not None and not isinstance(keys, list):
        raise ValueError(
            f"{before.file.parent}: normalize_observation_keys is {str(keys)[:80]!r}; expected a "
            "list of names."
        )
    return keys is None or name in keys


def find_scale(
    path: Path,
    name: str,
    mode: str,
    dims: int,
    steps: Sequence[Step | None],
    weights: Callable[[], Mapping[str, np.ndarray]],
) -> Normalizer | None:
    """The scale of a feature; None if no statistics of it are left.

    Args:
      mode: LeRobot's name of its scaling.
      dims: numbers of the feature, of a picture its channels; 0 if they are not known.
      steps: the (un)normalizers that may have its statistics, the one that counts first.
      weights: arrays of the policy's file at `path`, asked for only if no step has them.

    Raises:
      ValueError: the mode is unknown, statistics lack what it needs or have another shape, or two
        places contradict each other.
    """
    if mode == "IDENTITY":
        return Normalizer.identity(dims)
    saved = [
        Found(str(step.file), step.statistics(), step.config.get("eps", EPSILON))
        for step in steps
        if step is not None
    ]
    found = [x for x in saved if any(key.startswith(f"{name}.") for key in x.statistics)]
    found = found or _in_weights(path, name, weights())
    if not found:
        return None
    if mode not in _STATISTICS:
        raise ValueError(
            f"{found[0].place} scales {name} by {mode[:80]}; expected one of "
            f"{', '.join(_STATISTICS)}."
        )
    scales = [_normalizer(one, name, mode, dims) for one in found]
    for one, scale in zip(found[1:], scales[1:], strict=True):
        same = np.allclose(scale.offset, scales[0].offset, rtol=1e-5, atol=1e-7)
        if not same or not np.allclose(scale.scale, scales[0].scale, rtol=1e-5, atol=1e-7):
            raise ValueError(
                f"{found[0].place} and {one.place} have different statistics of {name}; copy both "
                "of the same policy."
            )
    return scales[0]


def refuse_lost(path: Path, name: str, mode: str) -> None:
    """Raises ValueError: a policy's statistics of a feature are lost."""
    raise ValueError(
        f"{path}: {name} is scaled by {mode}, but its statistics are neither in {PREPROCESSOR} and "
        f"the file that it names, nor in those of {POSTPROCESSOR}, nor among the weights, so the "
        "policy would act in other units than its robot's; copy all policy_*.json and policy_*."
        "safetensors of its release or training beside its weights (or set normalization_mapping "
        "of config.json to IDENTITY if it was trained without scaling)."
    )


def has_buffers(weights: Mapping[str, np.ndarray]) -> bool:
    """True if statistics are among a policy's weights, as before LeRobot 0.4."""
    return any(name.split(".")[0] in _WEIGHTS for name in weights)


def mode_of(scales: Sequence[Normalizer]) -> str:
    """The mode by which LeRobot's files hold scales exactly, with the usual epsilon; MEAN_STD, to
    f32's last bit, if none does."""
    if all(scale == Normalizer.identity(len(scale.offset)) for scale in scales):
        return "IDENTITY"
    for mode in ("MEAN_STD", "MIN_MAX"):
        if all(_normalizer(Found("", _told("", mode, x)), "", mode, 0) == x for x in scales):
            return mode
    return "MEAN_STD"


def statistics(
    scales: Mapping[str, Normalizer], modes: Mapping[str, str], pictures: Sequence[str] = ()
) -> dict[str, Entry]:
    """Statistics of features, by FEATURE.KIND as f32, from which their modes give these scales;
    those of `pictures` have the shape [3, 1, 1]."""
    told: dict[str, Entry] = {}
    for name, scale in scales.items():
        for key, values in _told(name, modes[name], scale).items():
            shape = (len(values), 1, 1) if name in pictures else values.shape
            told[key] = shape, partial(np.reshape, values, shape)
    return told


def _told(name: str, mode: str, scale: Normalizer) -> dict[str, np.ndarray]:
    offset, width = np.asarray(scale.offset), np.asarray(scale.scale)
    if mode == "IDENTITY":
        return {}
    mean = mode == "MEAN_STD"
    pair = (offset, width - EPSILON) if mean else (offset - width, offset + width)
    kinds = zip(_STATISTICS[mode], pair, strict=True)
    return {f"{name}.{kind}": values.astype(np.float32) for kind, values in kinds}


def _in_weights(path: Path, name: str, weights: Mapping[str, np.ndarray]) -> list[Found]:
    """Finite buffers of a feature, those that scale what the robot sends or gets first. Their names
    have the feature's with "_" for each dot, after "buffer_" and perhaps a variant of SmolVLA's."""
    written, found = f"buffer_{name.replace('.', '_')}", dict[str, dict[str, np.ndarray]]()
    for key, array in weights.items():
        module, _, rest = key.partition(".")
        buffer, _, kind = rest.rpartition(".")
        if module in _WEIGHTS and (buffer == written or buffer.endswith(f"_{written}")):
            found.setdefault(f"{module}.{buffer}", {})[f"{name}.{kind}"] = np.asarray(array)
    whole = {key: x for key, x in found.items() if all(np.isfinite(y).all() for y in x.values())}
    order = sorted(whole, key=lambda key: _WEIGHTS.index(key.partition(".")[0]))
    return [Found(f"{path}, {key}", whole[key], older=True) for key in order]


def _normalizer(found: Found, name: str, mode: str, dims: int) -> Normalizer:
    where, eps = found.place, found.epsilon

    def get(kind: str) -> Float64[np.ndarray, " d"]:
        if f"{name}.{kind}" not in found.statistics:
            raise ValueError(f"{where} scales {name} by {mode}, but its statistics lack '{kind}'.")
        array: np.ndarray = np.asarray(found.statistics[f"{name}.{kind}"], np.float64)
        flat = array.reshape(-1) if array.shape[1:] == (1, 1) else array
        if flat.ndim != 1 or (dims and len(flat) > dims):
            raise ValueError(
                f"{where}: the statistics' {name}.{kind} has shape {list(array.shape)}, but "
                f"config.json gives {name} {dims or 'no'} dims; give the statistics of this robot."
            )
        return flat

    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ValueError(f"{where}: eps is {str(eps)[:80]!r}; expected a number such as 1e-8.")
    first, second = map(get, _STATISTICS[mode])
    if mode == "MEAN_STD":
        offset, scale = first, second + eps
    else:
        width = second - first
        width = width + eps if found.older else np.where(width == 0, eps, width)
        offset, scale = first + width / 2, width / 2
    try:
        return Normalizer(tuple(offset.tolist()), tuple(scale.tolist()))
    except ValueError as error:
        raise ValueError(f"{where}, {name}: {error}") from error
