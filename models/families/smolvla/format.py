"""SmolVLA's checkpoints in LeRobot's format."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoints.lerobot_policy import ACTION, STATE, is_policy, open_policy
from models.checkpoints.lerobot_scales import SCALINGS
from models.families.smolvla import checkpoint
from models.families.smolvla.export import write
from models.families.smolvla.names import table
from models.formats import CheckpointFormat, CheckpointInfo, NoOptions, ReadScales, require_scaling
from models.inputs.embodiment import Normalizer, Scaling
from models.inputs.processor import Processor
from models.model import ModelConfig


def _inspect(path: Path) -> CheckpointInfo:
    source = open_policy(path)
    config = checkpoint.config(path, source)
    return CheckpointInfo(config, None, source, table(len(config.crosses)), LEROBOT)


def _acts(path: Path, info: CheckpointInfo, told: NoOptions) -> tuple[ModelConfig, Processor]:
    config: Any = info.config
    return config, checkpoint.acting(path, config)


def _prepares(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    return checkpoint.preparation(path, config)


def _statistics(folder: Path) -> Mapping[str, ReadScales]:
    if not is_policy(folder, "smolvla") or not checkpoint.read(folder).scales:
        return {}
    return {"": partial(_scales, folder)}


def _scales(folder: Path, state: Scaling, actions: Scaling) -> tuple[Normalizer, Normalizer]:
    found = checkpoint.read(folder)
    for what, name, wanted in (("state", STATE, state), ("action", ACTION, actions)):
        mode = found.modes[name]
        require_scaling(str(folder), what, SCALINGS.get(mode, mode), wanted, SCALINGS)
    return found.scales[STATE], found.scales[ACTION]


LEROBOT = CheckpointFormat(
    "lerobot",
    ("smolvla",),
    partial(is_policy, kind="smolvla"),
    _inspect,
    _acts,
    _prepares,
    statistics=_statistics,
    write=write,
    kinds=("smolvla",),
)
FORMATS = (LEROBOT,)
