"""GR00T-N1.7's checkpoints, as NVIDIA's code and LeRobot's port leave them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.families.groot.n17 import checkpoint, robots, write
from models.families.groot.n17.checkpoint import read_told
from models.families.groot.n17.names import TABLE
from models.formats import CheckpointFormat, CheckpointInfo
from models.inputs.embodiment import Embodiment
from models.inputs.processor import Processor
from models.model import ModelConfig


@dataclass(frozen=True)
class Groot17Options:
    """Options of `load_policy` for what files of GR00T-N1.7 do not say."""

    robot: str | None = None
    """Tag of the embodiment that acts, if NVIDIA's files know several."""
    backbone: Path | None = None
    """Folder of the backbone's config.json, preprocessor_config.json and tokenizer
    (nvidia/Cosmos-Reason2-2B), if it lies neither in the checkpoint's folder nor beside it."""
    base: Path | None = None
    """For LeRobot's files: folder of NVIDIA's config.json that the policy began from, if that is
    not the released model."""


def _inspect(path: Path) -> CheckpointInfo:
    source = checkpoint.open_source(path)
    config = checkpoint.config(source, read_told(path), guess=True)
    return CheckpointInfo(config, None, source, TABLE, GROOT17)


def _acts(
    path: Path, info: CheckpointInfo, options: Groot17Options
) -> tuple[ModelConfig, Processor | None]:
    told = read_told(path, options.base, options.backbone)
    config = checkpoint.config(checkpoint.open_source(path), told)
    known = robots.tags(path)
    robot = options.robot or (known[0] if len(known) == 1 else None)
    if robot is None:
        return config, None
    if robots.is_lerobots(checkpoint.folder_of(path)) and robot not in known:
        raise ValueError(f"{path} acts only as '{known[0]}', not '{robot}'; leave out the robot.")
    return robots.prepared(path, told, config, robot)


def _prepares(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    """The preparation of the first robot that the files know, with a robot in the model's units;
    pictures must have the model's size."""
    told = read_told(path)
    plain = [Embodiment.in_model_units((), config.state_dim, config.action_dim)]
    made: Processor = config.processor(plain, robots.tokenizer_of(path, told))
    known = robots.tags(path)
    if not known:
        return made
    _, found = robots.prepared(path, told, config, known[0])
    fit: Any = replace(found.fits[0], size=config.pictures[0].shape, any_size=False)  # type: ignore[call-arg]
    return replace(made, prompts=found.prompts, pictures=fit)


GROOT17 = CheckpointFormat(
    "groot",
    ("groot17",),
    checkpoint.recognises,
    _inspect,
    _acts,
    _prepares,
    Groot17Options,
    write=write.write_nvidias,
    kinds=("groot", "Gr00tN1d7"),
)
LEROBOT17 = replace(
    GROOT17, name="lerobot", recognises=lambda path: False, write=write.write_lerobots
)
"""LeRobot's port, for writing; `GROOT17` reads it too."""
FORMATS = (GROOT17, LEROBOT17)
