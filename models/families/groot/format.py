"""GR00T's checkpoints, as NVIDIA's fine-tuning and LeRobot's port leave them: safetensors whose
action head has a prefix of its own. Those of N1.7 are in `n17`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from models.families.groot import checkpoint, lerobot
from models.families.groot.conventions import groot_policy, released_processor, robots
from models.families.groot.n17 import format as n17
from models.families.groot.names import TABLE
from models.formats import CheckpointFormat, CheckpointInfo, ReadScales, require_scaling
from models.inputs.embodiment import Normalizer, Scaling
from models.inputs.processor import Processor
from models.model import ModelConfig

_RELEASED = "GR00T-N1.5-3B"


@dataclass(frozen=True)
class GrootOptions:
    """Options of `load_policy` for what files of GR00T do not say."""

    released: str | None = None
    """GR00T-N1.5-3B, if its folder has another name."""
    robot: str | None = None
    """Tag of the embodiment in NVIDIA's metadata that acts, if there are several."""
    modality: Path | None = None
    """GR00T's modality.json, which gives the order of a robot's parts in NVIDIA's checkpoints."""


def _recognises(path: Path) -> bool:
    if path.suffix != ".safetensors" and not any(path.glob("*.safetensors")):
        return False
    return any(name.startswith("action_head.") for name in checkpoint.open_groot(path).arrays)


def _inspect(path: Path) -> CheckpointInfo:
    source = checkpoint.open_groot(path)
    config = checkpoint.config(source, checkpoint.read_values(path))
    return CheckpointInfo(config, None, source, TABLE, GROOT)


def _acts(
    path: Path, info: CheckpointInfo, told: GrootOptions
) -> tuple[ModelConfig, Processor | None]:
    if told.released not in (None, _RELEASED):
        raise ValueError(
            f"released is '{told.released}', but {path} is in GR00T's format; give {_RELEASED}, or "
            "leave it out."
        )
    config: Any = info.config
    modality = None if told.modality is None else Path(told.modality)
    return groot_policy(path, config, told.robot, modality)


def _prepares(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    return released_processor(path, config)


def _statistics(folder: Path) -> Mapping[str, ReadScales]:
    """Scales from the files, which keep only smallest and largest values."""

    def read(tag: str, state: Scaling, actions: Scaling) -> tuple[Normalizer, Normalizer]:
        for what, wanted in (("state", state), ("action", actions)):
            require_scaling(str(folder), what, "min-max", wanted)
        robot = known[tag]()
        return robot.state, robot.actions

    known = robots(folder)
    return {tag: partial(read, tag) for tag in known}


GROOT = CheckpointFormat(
    "groot",
    ("groot",),
    _recognises,
    _inspect,
    _acts,
    _prepares,
    GrootOptions,
    _statistics,
    checkpoint.write,
    kinds=("groot", "gr00t_n1_5"),
)
LEROBOT = CheckpointFormat(
    "lerobot",
    ("groot",),
    lambda path: False,
    _inspect,
    _acts,
    _prepares,
    write=lerobot.write,
)
"""LeRobot's port, for writing; `GROOT` reads it too."""
FORMATS = (*n17.FORMATS, GROOT, LEROBOT)
