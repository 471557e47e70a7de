"""The way a GR00T-N1.5 acts: its processor, from the files of NVIDIA's fine-tuning or of LeRobot's.

NVIDIA keeps statistics by part of the robot in experiment_cfg/metadata.json, but the order of the
parts only in a Python class, so a `modality.json` is required. LeRobot keeps whole columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from models.checkpoints.lerobot_pipeline import (
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAME,
    Step,
    read_pipeline,
    read_renamed,
    robot_names,
)
from models.config import from_json
from models.families.groot.checkpoint import METADATA, MODALITY
from models.families.groot.eagle_turn import DEFAULT, EagleTurn
from models.families.groot.modality import Modality, read_modality
from models.families.groot.model import TAGS, GrootConfig
from models.files.foreign_json import read_json, section
from models.inputs.bpe import ByteBpe, has_tokenizer
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.pictures import Stretched, StretchedMiddle
from models.inputs.processor import Processor
from models.inputs.raw import RawKeys

_TURNED = ("gr1", "oxe_droid", "agibot_genie1")
"""Tags of the base model's own robots. Their data configs convert state or actions: to sines and
cosines, or to six numbers per rotation."""
_PACK, _UNPACK = "groot_pack_inputs_v3", "groot_action_unpack_unnormalize_v1"
_BEFORE = (RENAME, _PACK, "groot_eagle_encode_v3", "groot_eagle_collate_v3")
"""Steps of LeRobot's that are carried out, in their order."""
_STILL_STATE, _STILL_ACTION = 1e12, 1e-12
"""Scales of a dim that never moved: its state is always 0, its action always its only value."""


def groot_policy(
    path: Path,
    config: GrootConfig,
    robot: str | None = None,
    modality: Path | None = None,
) -> tuple[GrootConfig, Processor | None]:
    """Config and processor of a checkpoint. There is no processor if no file has its statistics, or
    if they are of several robots and none is chosen, as in the released base model.

    Args:
      robot: tag of the embodiment to act for, if the files have several.
      modality: a modality.json, which orders the parts of a robot in NVIDIA's files.

    Raises:
      ValueError: the files do not say how the policy acts (the message lists every question), or
        what they say does not fit together.
    """
    root = _folder(path)
    values = _config(root)
    if _is_lerobots(root, values):
        tag, acting = _lerobot(root, values)
        if robot not in (None, tag):
            raise ValueError(f"{root} acts only as '{tag}', not as '{robot}'; leave out the robot.")
    elif (root / METADATA).is_file() and (robot or modality or len(read_json(root / METADATA)) < 2):
        beside = root / MODALITY
        modality = beside if modality is None and beside.is_file() else modality
        acting = _nvidia(root / METADATA, robot, modality)
        tag = acting.name
    else:
        return config, None
    config = config.for_robots([tag])
    return config, released_processor(path, config).with_robots([acting])


def robots(path: Path) -> dict[str, Callable[[], Embodiment]]:
    """Readers, by tag, of the robots whose statistics are in a folder of LeRobot's or NVIDIA's;
    empty if the folder is not of a GR00T. NVIDIA's need the modality.json beside their statistics.

    Raises:
      ValueError: (a reader) as `groot_policy`.
    """
    root = _folder(path)
    values = _config(root)
    if _is_lerobots(root, values):
        tag, robot = _lerobot(root, values)
        return {tag: lambda: robot}
    file, beside = root / METADATA, root / MODALITY
    if not file.is_file():
        return {}
    modality = beside if beside.is_file() else None
    return {tag: partial(_nvidia, file, tag, modality) for tag in read_json(file)}


def released_processor(path: Path, config: GrootConfig) -> Processor:
    """The preparation with which a checkpoint of another code was trained, for a robot in the
    model's units; without a tokenizer if none lies in its folder."""
    whole = _config(_folder(path)).get("type") == "groot"
    read_pipelines(_folder(path))
    return replace(
        config.processor([Embodiment.in_model_units((), config.state_dim, config.action_dim)]),
        prompts=EagleTurn(found_tokenizer(path)),
        pictures=(Stretched if whole else StretchedMiddle)(config.image_size),
    )


def found_tokenizer(path: Path) -> ByteBpe | None:
    """The tokenizer in a checkpoint's folder or in one right below it."""
    root = _folder(path)
    folders = [root, *sorted(x for x in root.iterdir() if x.is_dir())]
    found = next((folder for folder in folders if has_tokenizer(folder)), None)
    return None if found is None else ByteBpe.read(found)


def from_range(
    low: Float[np.ndarray, " d"], high: Float[np.ndarray, " d"], still: float
) -> Normalizer:
    """Maps the least and largest value to −1 and 1; if they are equal, the scale is `still`."""
    moves = high > low
    scale = np.where(moves, (high - low) / 2, still)
    offset = np.where(moves, (low + high) / 2, low)
    return Normalizer(tuple(offset.tolist()), tuple(scale.tolist()))


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _config(root: Path) -> dict[str, Any]:
    """The config.json of a checkpoint's folder, empty where there is none."""
    file = root / "config.json"
    return read_json(file) if file.is_file() else {}


def read_pipelines(root: Path) -> tuple[dict[str, Step], dict[str, Step]]:
    """The steps of LeRobot's files before and after the network; raises as `read_pipeline`."""
    before = read_pipeline(root / PREPROCESSOR, (_BEFORE,), _BEFORE[1:])
    return before, read_pipeline(root / POSTPROCESSOR, ((_UNPACK,),))


def _is_lerobots(root: Path, values: dict[str, Any]) -> bool:
    return values.get("type") == "groot" and (root / PREPROCESSOR).is_file()


def _lerobot(root: Path, values: dict[str, Any]) -> tuple[str, Embodiment]:
    where = str(root / "config.json")
    features = section(values, "input_features", where)
    kinds = {name: section(features, name, where).get("type") for name in features}
    cameras = tuple(sorted(name for name, kind in kinds.items() if kind == "VISUAL"))
    before, after = read_pipelines(root)
    file, told = root / PREPROCESSOR, before[_PACK].config
    saved = [(str(step.file), step.statistics()) for step in (*before.values(), *after.values())]
    tag = str(told.get("embodiment_tag"))
    known = section(told, "embodiment_mapping", str(file))
    row = known.get(tag, 0)

    def scale(feature: str, still: float) -> Normalizer:
        kinds = [f"{feature}.{kind}" for kind in ("min", "max")]
        found = {place: x for place, x in saved if all(kind in x for kind in kinds)}
        if not found:
            raise ValueError(
                f"{file} has no statistics of {feature} (min and max), nor has {POSTPROCESSOR}; "
                "copy all policy_*.json and policy_*.safetensors of the policy again."
            )
        ranges = [np.stack([x[kind].ravel() for kind in kinds]) for x in found.values()]
        if not all(np.array_equal(ranges[0], other) for other in ranges):
            raise ValueError(
                f"{' and '.join(found)} have different statistics of {feature}; copy both of the "
                "same policy."
            )
        low, high = ranges[0].astype(np.float64)
        return from_range(low, high, still)

    (state, *names) = robot_names(read_renamed(before), ("observation.state", *cameras), str(file))
    robot = Embodiment(
        tag,
        tuple(names),
        scale("observation.state", _STILL_STATE),
        scale("action", _STILL_ACTION),
        keys=RawKeys(tuple((name, name) for name in names), (state,), "task", DEFAULT),
    )
    return (tag if TAGS.get(tag) == row else str(row)), robot


def _nvidia(file: Path, robot: str | None, modality: Path | None) -> Embodiment:
    known = read_json(file)
    tag = robot or (next(iter(known)) if len(known) == 1 else None)
    if tag is None or tag not in known:
        raise ValueError(
            f"{file} has statistics of {list(known)}; say which robot to act for, such as "
            f"load_policy(robot='{next(iter(known), 'new_embodiment')}')."
        )
    if tag in _TURNED:
        raise ValueError(
            f"{file}: '{tag}' is a robot of the base model, and NVIDIA's data config converts its "
            "state and actions in a way that is not supported here; fine-tune the model as "
            "new_embodiment."
        )
    if modality is None:
        raise ValueError(
            f"{file} does not give the order of the cameras of '{tag}' and of the parts of its "
            "state and actions; give the modality.json that lists them in the order of its data "
            "config, load_policy(modality='…/meta/modality.json'), or put it into the same "
            "folder."
        )
    told = section(known, tag, str(file))
    parts, where = read_modality(modality), f"{file}: {tag}"
    _check_plain(section(told, "modalities", where), parts, where)
    statistics = section(told, "statistics", where)
    return Embodiment(
        tag,
        tuple(parts.video),
        _scales(statistics, "state", parts.state, _STILL_STATE, where),
        _scales(statistics, "action", parts.action, _STILL_ACTION, where),
        keys=RawKeys(
            tuple((f"video.{name}", name) for name in parts.video),
            tuple(f"state.{name}" for name in parts.state),
            f"annotation.{next(iter(parts.annotation), 'human.task_description')}",
            DEFAULT,
        ),
    )


def _check_plain(modalities: dict[str, Any], parts: Modality, where: str) -> None:
    for kind in ("state", "action"):
        told = section(modalities, kind, where)
        for name in getattr(parts, kind):
            turned = section(told, name, where).get("rotation_type")
            if turned is not None:
                raise ValueError(
                    f"{where}: {kind}.{name} is a rotation ({str(turned)[:40]}), which NVIDIA's "
                    "data config converts and Chiliad does not; leave it out, or fine-tune."
                )


def _scales(
    statistics: dict[str, Any], kind: str, parts: Mapping[str, Any], still: float, where: str
) -> Normalizer:
    told = section(statistics, kind, where)
    lows: list[float] = []
    highs: list[float] = []
    for name, (first, last) in parts.items():
        if name not in told:
            raise ValueError(f"{where} has no statistics of {kind}.{name}, only of {list(told)}.")
        values = section(told, name, where)
        for kept, which in ((lows, "min"), (highs, "max")):
            numbers = from_json(tuple[float, ...], values.get(which), f"{where}: {name}.{which}")
            if len(numbers) != last - first:
                raise ValueError(
                    f"{where}: {kind}.{name} has {len(numbers)} statistics, but modality.json "
                    f"gives it {last - first} dims ({first} to {last})."
                )
            kept.extend(numbers)
    return from_range(np.array(lows), np.array(highs), still)
