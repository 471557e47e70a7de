"""The way a released π0 or π0.5 acts, according to its files, the table of released policies and
the caller.

Anything that none of them says is asked for in one error, never guessed: a policy that runs with a
horizon or action convention other than it was trained with fails silently.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from models.checkpoints.lerobot_pipeline import robot_names
from models.checkpoints.statistics_file import read_scale
from models.families.pi import lerobot
from models.families.pi.lerobot_statistics import read_normalizers
from models.families.pi.model import PiConfig
from models.families.pi.released import CAMERAS, Released, Source, StateOption, find_released
from models.formats import CheckpointInfo
from models.inputs.embodiment import Embodiment, Normalizer, Scaling
from models.inputs.pictures import Bilinear, BilinearDark
from models.inputs.processor import Processor
from models.inputs.raw import RawKeys

_TEXT_LIMITS = {"pi05": 200, "pi0": 48, "pi0_fast": 250}
_NORMALIZATION: dict[str, Scaling] = {"pi05": "quantile", "pi0": "z-score", "pi0_fast": "quantile"}
_STATES: dict[str, StateOption] = {"pi0": "suffix", "pi0_fast": "text"}
_FORMS = {"pi05": "text, text-padded or none", "pi0": "a suffix", "pi0_fast": "text"}
_EMPTY = re.compile(r"(^|\.)empty_camera_\d+$")


@dataclass(frozen=True)
class PiOptions:
    """Options of `load_policy` for what files of π do not say; None: as the files and the table
    `models.families.pi.released.RELEASED` say."""

    released: str | None = None
    """Name of the released policy, such as pi05_droid, if its folder has another name: a table
    supplies what the files lack."""
    horizon: int | None = None
    """Steps of a chunk, which openpi's checkpoints do not contain."""
    state: StateOption | None = None
    """Form in which π reads the state, which files of π0.5 do not say: text (the robot's dims),
    text-padded (all of the model's dims as text), suffix (a token of its own), or none."""
    relative: tuple[int, ...] | None = None
    """Action dims that the model measures from the state dim of the same number; give the option
    without numbers if there are none."""
    robot: str | None = None
    """Name of the statistics in an openpi checkpoint's assets that scale state and actions; without
    any, both are in the model's units."""


def openpi_policy(path: Path, info: CheckpointInfo, told: PiOptions) -> tuple[Any, Processor]:
    """Config and processor of a checkpoint in openpi's Orbax format.

    Args:
      info: has the config with the sizes inferred from the parameters.

    Raises:
      ValueError: as `load_policy`.
    """
    row = find_released(path, "openpi", told.released)
    return _openpi(path, info.config, row, told, None)


def lerobot_policy(path: Path, info: CheckpointInfo, told: PiOptions) -> tuple[Any, Processor]:
    """Config and processor of a directory from LeRobot, or from openpi's conversion to PyTorch.

    Args:
      info: as for `openpi_policy`.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: as `load_policy`.
    """
    config: Any = info.config
    found = lerobot.read_config(path)
    kind: Source = "lerobot" if found.kind else "openpi"
    row = find_released(path, kind, told.released)
    if not found.kind:
        return _openpi(path, config, row, told, found.horizon)
    _check_horizon(path, told, found.horizon)
    family = _family(config)
    if config.state_input == "text":
        config = replace(config, state_dim=found.state_dim)
    _check_family(path, config, row, told)
    dims = found.robot_state or config.state_dim, found.robot_action or config.action_dim
    questions = []
    noted = _noted(info, found)
    written = {True: "text-padded", False: "text", None: None}[noted]
    state: Any = told.state or written or (row.state if row else None)
    if family != "pi05":
        state = _STATES[family]
    elif state is None and dims[0] == config.state_dim:
        state = "text"
    elif state is None:
        questions.append(
            "state: 'text' if LeRobot 0.5.0 or later trained it (its prompt spells the robot's "
            f"{dims[0]} state dims), 'text-padded' if an earlier version did (it spelt all "
            f"{config.state_dim}), or 'none' if the weights never saw the state (openpi's "
            "pi05_libero, from which lerobot/pi05_libero_base was made)"
        )
    _ask(path, questions)
    names = found.cameras or CAMERAS
    (state_key, *cameras) = robot_names(found.renamed, ("observation.state", *names), str(path))
    robot = replace(
        Embodiment.in_model_units(tuple(cameras), *dims),
        absent=tuple(c for c, name in zip(cameras, names, strict=True) if _EMPTY.search(name)),
        keys=RawKeys(tuple((c, c) for c in cameras), (state_key,), "task"),
        adapter=found.adapter,
    )
    if scales := read_normalizers(path):
        state_scales, action_scales = scales["observation.state"], scales["action"]
        robot = replace(robot, name="LeRobot", state=state_scales, actions=action_scales)
    relative = found.relative if told.relative is None else tuple(told.relative)
    if family == "pi0_fast":
        rest = {
            "max_decoding_steps": found.max_decoding_steps,
            "temperature": found.temperature,
            "action_dim": dims[1],
        }
        config = replace(config, horizon=found.horizon, **rest)
    else:
        config = replace(config, state_input=_form(state))
    padded = state == "text-padded"
    made = _lerobots(config, found, padded, bool(noted or padded))
    return config, made.with_robots([_finished(robot, relative)])


def openpi_processor(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    """The preparation with which an openpi checkpoint was trained, for a robot in the model's
    units, without a tokenizer."""
    return _openpis(config, find_released(path, "openpi"))


def lerobot_processor(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    """As `openpi_processor`, of LeRobot's folder, or of openpi's conversion to PyTorch. Where
    neither the files of a π0.5 nor the table say which version wrote it, it counts as 0.5.0's.

    Args:
      config: the config to train with, which says whether the prompt has the state.
    """
    found = lerobot.read_config(path)
    if not found.kind:
        return openpi_processor(path, info, config)
    row, noted = find_released(path, "lerobot"), _noted(info, found)
    listed = row is not None and row.state == "text-padded"
    earlier = listed if noted is None else noted
    return _lerobots(config, found, earlier and config.state_input == "text", earlier)


def _familys(config: Any) -> Any:
    """The family's own preparation, for a robot in the model's units."""
    return config.processor([Embodiment.in_model_units((), config.state_dim, config.action_dim)])


def _lerobots(config: Any, found: lerobot.LerobotConfig, padded: bool, dark: bool) -> Processor:
    """LeRobot's preparation; 0.5.0 introduced black borders, and text of only the robot's dims."""
    own = _familys(config)
    prompts = replace(own.prompts, limit=found.text)
    if _family(config) == "pi0":
        prompts = replace(prompts, normalize="line")
    return replace(
        own,
        prompts=replace(prompts, pad_state_text=padded),
        pictures=(BilinearDark if dark else Bilinear)(config.image_size),
    )


def _openpis(config: Any, row: Released | None, padded: bool = False) -> Processor:
    own = _familys(config)
    limit = (row.text if row else None) or _TEXT_LIMITS[_family(config)]
    fast = _family(config) == "pi0_fast"
    prompts = replace(own.prompts, limit=limit, pad_state_text=padded)
    return replace(own, prompts=prompts, black_absent=fast)


def _noted(info: CheckpointInfo, found: lerobot.LerobotConfig) -> bool | None:
    """True if a LeRobot before 0.5.0 wrote the files, None if they do not tell."""
    metadata = {} if info.source is None else info.source.metadata
    return {"True": True, "False": False}.get(metadata.get("earlier", ""), found.earlier)


def _openpi(
    path: Path, config: Any, row: Released | None, told: PiOptions, horizon: int | None
) -> tuple[Any, Processor]:
    _check_family(path, config, row, told)
    _check_horizon(path, told, horizon)
    name, file = _statistics(path, row, told)
    family = _family(config)
    known = row or Released(family)
    horizon = told.horizon or horizon or known.horizon
    state = told.state or known.state
    relative = known.relative if told.relative is None else tuple(told.relative)
    questions = []
    if horizon is None:
        questions.append("horizon: how many steps a chunk has (action_horizon of openpi's config)")
    if family != "pi05":
        state = _STATES[family]
    elif state is None:
        questions.append(
            "state: 'text' if its prompt spells the state (discrete_state_input, as in pi05_droid),"
            " or 'none' if it never saw the state (as in pi05_libero)"
        )
    if relative is None and file is not None:
        questions.append(
            "relative: the action dims that are differences from the state dim of the same number "
            "(openpi's DeltaActions), () if none is"
        )
    _ask(path, questions)
    assert horizon is not None
    config = replace(config, horizon=horizon)
    if family != "pi0_fast":
        config = replace(config, state_input=_form(state))
    dims = known.state_dims or config.state_dim, known.action_dims or config.action_dim
    robot = Embodiment.in_model_units(known.cameras or CAMERAS, *dims)
    robot = replace(robot, absent=known.absent, keys=known.keys, adapter=known.adapter)
    if file is not None:
        scaling = known.normalization or _NORMALIZATION[family]
        state_scale = read_scale(file, "state", scaling, known.state_dims)
        action_scale = read_scale(file, "actions", scaling, known.action_dims)
        if row is None and family != "pi0_fast":
            state_scale = _of_robot(state_scale, config.state_dim)
            action_scale = _of_robot(action_scale, config.action_dim)
        robot = replace(robot, name=name, state=state_scale, actions=action_scale)
    if family == "pi0_fast":
        dims = len(robot.state.offset), len(robot.actions.offset)
        config = replace(config, state_dim=dims[0], action_dim=dims[1])
    made = _openpis(config, row, state == "text-padded")
    return config, made.with_robots([_finished(robot, relative or ())])


def _of_robot(scale: Normalizer, width: int) -> Normalizer:
    """The scales of a robot's dims, in a file that was padded to the model's width; all of them if
    none is scaled."""
    if len(scale.offset) != width or not scale.cut(0).offset:
        return scale
    return next((x for d in range(1, width) if len((x := scale.cut(d)).offset) == d), scale)


def _form(state: StateOption | None) -> Any:
    return "text" if state == "text-padded" else state


def _ask(path: Path, questions: list[str]) -> None:
    if questions:
        raise ValueError(
            f"Neither the files in {path} nor the folder's name says how this policy acts. Say "
            "which released policy it is, such as released='pi05_droid', or answer with "
            f"load_policy's options: {'; '.join(questions)}."
        )


def _check_family(path: Path, config: Any, row: Released | None, told: PiOptions) -> None:
    family = _family(config)
    if row is not None and row.family != family:
        raise ValueError(
            f"{path} is taken for the released {told.released or path.name}, a {row.family}, but "
            f"its parameters are those of a {family}; set released to its own name."
        )
    known = ("text", "text-padded", "none") if family == "pi05" else (_STATES[family],)
    if told.state is not None and told.state not in known:
        raise ValueError(
            f"{path} is a {family}, whose state is {_FORMS[family]}"
            + f", so it cannot be '{told.state}'."
        )


def _check_horizon(path: Path, told: PiOptions, written: int | None) -> None:
    if written is not None and told.horizon not in (None, written):
        raise ValueError(
            f"{path}: horizon is {told.horizon}, but its config.json says {written}; leave out "
            "horizon."
        )


def _family(config: Any) -> Literal["pi0", "pi05", "pi0_fast"]:
    if not isinstance(config, PiConfig):
        return "pi0_fast"
    return "pi05" if config.time == "modulation" else "pi0"


def _statistics(path: Path, row: Released | None, told: PiOptions) -> tuple[str, Path | None]:
    """Name and file of the statistics to scale by. There is no file if there are no statistics, or
    if a released base model has several robots and the caller chooses none: only that choice makes
    its actions those of a robot."""
    root = path if path.is_dir() else path.parent
    if row is not None and root.name == "params":
        root = root.parent
    assets = root / "assets"
    files = sorted(assets.rglob("norm_stats.json"))
    found = {str(file.parent.relative_to(assets)): file for file in files}
    wanted = told.robot
    if wanted is not None and wanted not in found:
        raise ValueError(f"{assets} has no statistics for '{wanted}', only {list(found)}.")
    if wanted is None and row is not None and row.assets in found:
        wanted = row.assets
    if wanted is None and len(found) > 1:
        if row is not None and row.relative is told.relative is None:
            return "", None
        raise ValueError(
            f"{assets} has statistics of {list(found)}; choose one, such as "
            f"load_policy(robot='{next(iter(found))}')."
        )
    if wanted is None and not found and row is not None and row.assets is not None:
        raise ValueError(
            f"{assets} has no norm_stats.json, which scales this policy's state and actions; copy "
            f"the folder {row.assets} of its release there."
        )
    name = wanted or next(iter(found), "")
    return name, found.get(name)


def _finished(robot: Embodiment, relative: tuple[int, ...]) -> Embodiment:
    dims = min(len(robot.state.offset), len(robot.actions.offset))
    wrong = [d for d in relative if not 0 <= d < dims]
    if wrong:
        raise ValueError(
            f"relative names dims {wrong}, but {robot.name} has {len(robot.state.offset)} state "
            f"and {len(robot.actions.offset)} action dims; give only dims that both have."
        )
    if relative:
        places = range(len(robot.actions.offset))
        robot = replace(robot, relative=tuple(d if d in relative else -1 for d in places))
    return robot
