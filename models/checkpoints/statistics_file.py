"""Scaling of state and actions from a file of statistics: openpi's norm_stats.json, which its
checkpoints have as assets/ROBOT/norm_stats.json, or a LeRobot dataset's meta/stats.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from models.config import from_json
from models.files.foreign_json import read_json, section
from models.inputs.embodiment import Normalizer, Scaling

_KINDS: dict[Scaling, tuple[str, str]] = {
    "z-score": ("mean", "std"),
    "min-max": ("min", "max"),
    "quantile": ("q01", "q99"),
}
_LEROBOT = {"state": ("observation.state", "state"), "actions": ("action", "actions")}
_OPENPI_EPS, _LEROBOT_EPS = 1e-6, 1e-8


def read_scales(file: Path, state: Scaling, actions: Scaling) -> tuple[Normalizer, Normalizer]:
    """The scales of states and actions, as `read_scale` reads each."""
    return read_scale(file, "state", state), read_scale(file, "actions", actions)


def read_scale(
    file: Path,
    feature: Literal["state", "actions"],
    scaling: Scaling,
    dims: int | None = None,
) -> Normalizer:
    """The scale of a feature, with the authors' constant that keeps every divisor from being 0.

    Args:
      dims: number of the file's first dims that are the robot's; all if None.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it lacks the statistics, or they are not numbers, too few or of unequal lengths.
    """
    values, where = read_json(file), str(file)
    if "norm_stats" in values or file.name == "norm_stats.json":
        name, eps, values = str(feature), _OPENPI_EPS, section(values, "norm_stats", where)
    else:
        usual = _LEROBOT[feature]
        name, eps = next((n for n in usual if n in values), usual[0]), _LEROBOT_EPS
    return scale_of(section(values, name, where), where, name, scaling, eps, dims)


def scale_of(
    stats: Mapping[str, Any],
    where: str,
    name: str,
    scaling: Scaling,
    eps: float = _LEROBOT_EPS,
    dims: int | None = None,
) -> Normalizer:
    """The scale by the statistics of feature `name`, from `where`; other arguments and errors as
    `read_scale`."""
    if missing := [kind for kind in _KINDS[scaling] if stats.get(kind) is None]:
        raise ValueError(
            f"{where} has no {missing[0]} of {name}, which scaling by {scaling} needs; choose "
            f"another scaling, or another file."
        )
    first, second = (
        from_json(tuple[float, ...], stats[kind], f"{where}: {name}.{kind}")
        for kind in _KINDS[scaling]
    )
    if len(first) != len(second):
        raise ValueError(
            f"{where}: {' and '.join(_KINDS[scaling])} of {name} have {len(first)} and "
            f"{len(second)} numbers; expected equally many."
        )
    if dims is not None and len(first) < dims:
        raise ValueError(
            f"{where}: {name} has {len(first)} numbers, but the robot has {dims} dims; give the "
            "statistics of this robot."
        )
    first, second = first[:dims], second[:dims]
    if scaling == "z-score":
        offset, scale = first, tuple(std + eps for std in second)
    else:
        scale = tuple((high - low + eps) / 2 for low, high in zip(first, second, strict=True))
        offset = tuple(low + half for low, half in zip(first, scale, strict=True))
    try:
        return Normalizer(offset, scale)
    except ValueError as error:
        raise ValueError(f"{where}, {name}: {error}") from error
