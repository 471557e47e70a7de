"""π's checkpoints as openpi's Orbax directories and as safetensors of LeRobot, or of openpi's
conversion to PyTorch; π0-FAST's among them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from models.checkpoints.lerobot_scales import SCALINGS
from models.checkpoints.sources import open_orbax
from models.checkpoints.statistics_file import read_scales
from models.families.pi import export, lerobot, openpi
from models.families.pi.conventions import (
    PiOptions,
    lerobot_policy,
    lerobot_processor,
    openpi_policy,
    openpi_processor,
)
from models.families.pi.fast import checkpoint as pi0_fast
from models.families.pi.fast import export as fast_export
from models.families.pi.lerobot_statistics import has_statistics, read_modes
from models.formats import CheckpointFormat, CheckpointInfo, ReadScales, require_scaling
from models.inputs.embodiment import Normalizer, Scaling
from models.policy import Policy

_STATS = "norm_stats.json"


def _is_openpi(path: Path) -> bool:
    return any((at / "_METADATA").is_file() for at in (path, path / "params"))


def _is_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors" or any(path.glob("*.safetensors"))


def _inspect_openpi(path: Path) -> CheckpointInfo:
    source = open_orbax(path)
    if pi0_fast.is_fast(source):
        table = pi0_fast.OPENPI
        return CheckpointInfo(pi0_fast.config(source, table), None, source, table, OPENPI)
    return CheckpointInfo(openpi.config(source), None, source, openpi.table(source), OPENPI)


def _inspect_lerobot(path: Path) -> CheckpointInfo:
    source, told = lerobot.open_lerobot(path), lerobot.read_config(path)
    if told.kind == "pi0_fast":
        table = pi0_fast.lerobot_table(source)
        config = pi0_fast.config(source, table, lerobot.known_axes(source))
        return CheckpointInfo(config, None, source, table, LEROBOT)
    table = lerobot.table(source)
    return CheckpointInfo(lerobot.config(source, told), None, source, table, LEROBOT)


def _openpi_statistics(folder: Path) -> Mapping[str, ReadScales]:
    if (folder / _STATS).is_file():
        return {folder.name: partial(read_scales, folder / _STATS)}
    assets = folder / "assets"
    files = sorted(assets.rglob(_STATS))
    return {x.parent.relative_to(assets).as_posix(): partial(read_scales, x) for x in files}


def _lerobot_statistics(folder: Path) -> Mapping[str, ReadScales]:
    return {"": partial(_in_processor, folder)} if has_statistics(folder) else {}


def _in_processor(folder: Path, state: Scaling, actions: Scaling) -> tuple[Normalizer, Normalizer]:
    """Scales from LeRobot's files, whose processor says by what each feature is scaled."""
    modes = read_modes(folder)

    def scale(what: str, feature: str, wanted: Scaling) -> Normalizer:
        if feature not in modes:
            raise ValueError(
                f"{folder} has no scale for {feature}; give a file that has its statistics."
            )
        mode, found = modes[feature]
        require_scaling(str(folder), what, SCALINGS.get(mode, mode), wanted, SCALINGS)
        return found

    return scale("state", "observation.state", state), scale("action", "action", actions)


def _write_openpi(policy: Policy, target: Path) -> None:
    fast = policy.model.config.family == "pi0_fast"
    (fast_export if fast else export).write_openpi(policy, target)


OPENPI = CheckpointFormat(
    "openpi",
    ("pi", "pi0_fast"),
    _is_openpi,
    _inspect_openpi,
    openpi_policy,
    openpi_processor,
    PiOptions,
    _openpi_statistics,
    _write_openpi,
)
LEROBOT = CheckpointFormat(
    "lerobot",
    ("pi",),
    _is_safetensors,
    _inspect_lerobot,
    lerobot_policy,
    lerobot_processor,
    PiOptions,
    _lerobot_statistics,
    export.write_lerobot,
    general=True,
    kinds=("pi0", "pi05", "pi0_fast"),
)
FORMATS = (LEROBOT, OPENPI)
