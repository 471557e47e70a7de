"""Scaling of state and actions of LeRobot's π, and the bases that were saved without any."""

from pathlib import Path

from models.checkpoints.lerobot_pipeline import POSTPROCESSOR, PREPROCESSOR, Step
from models.checkpoints.lerobot_scales import (
    NORMALIZE,
    UNNORMALIZE,
    find_scale,
    has_buffers,
    refuse_lost,
)
from models.families.pi import lerobot
from models.families.pi.lerobot import ANY, MODES, LerobotConfig, open_lerobot, read_steps
from models.inputs.embodiment import Normalizer


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
    config = (folder / "config.json").is_file()
    told = lerobot.read_config(path) if config else _told_by_steps(folder)
    if not told.kind:
        return {}
    before, after = read_steps(path, told.kind)
    steps = [before.get(NORMALIZE), after.get(UNNORMALIZE)]
    usual = MODES.get(told.kind, "IDENTITY")
    state, action = (told.scaling.get(kind, usual) for kind in ("STATE", "ACTION"))
    features = (
        ("observation.state", state, told.robot_state or told.state_dim, steps),
        ("action", action, told.robot_action or told.action_dim, steps[::-1]),
    )
    scales, lacking = {}, []
    for name, mode, dims, order in features:
        scale = find_scale(path, name, mode, dims, order, lambda: open_lerobot(path).arrays)
        if scale is None:
            lacking.append((name, mode))
        else:
            scales[name] = mode, scale
    if len(lacking) == len(features) and _is_base(path, told, steps[0]):
        return {}
    if lacking:
        refuse_lost(path, *lacking[0])
    return scales


def has_statistics(path: Path) -> bool:
    """True if a policy's folder has files of steps, or buffers among its weights."""
    if any((path / name).is_file() for name in (PREPROCESSOR, POSTPROCESSOR)):
        return True
    return any(path.glob("model*.safetensors")) and has_buffers(open_lerobot(path).arrays)


def _told_by_steps(folder: Path) -> LerobotConfig:
    """Facts that the files of steps tell where they are alone."""
    before, after = read_steps(folder, ANY)
    scaling = lerobot.read_modes(folder, {}, before.get(NORMALIZE), after.get(UNNORMALIZE))
    return LerobotConfig(0, 0, state_dim=0, action_dim=0, kind=ANY, scaling=scaling)


def _is_base(path: Path, told: LerobotConfig, before: Step | None) -> bool:
    """True if a policy is of no robot, and was saved without statistics; or if its files, as those
    that LeRobot did not write, say nothing of scaling."""
    if not told.scaling:
        return True
    if told.robot_state not in (None, told.state_dim):
        return False
    if told.robot_action not in (None, told.action_dim):
        return False
    if before is None:
        return has_buffers(open_lerobot(path).arrays)
    return "state_file" not in before.entry
