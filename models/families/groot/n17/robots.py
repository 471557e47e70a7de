"""The way a GR00T-N1.7 acts for a robot: its processor, from NVIDIA's files or LeRobot's.

NVIDIA's processor_config.json and statistics.json describe the parts of several robots. LeRobot
copies those of one into the steps of its pipelines, or has a dataset's least and largest values.
LeRobot's own processors are followed, so pictures that no OpenCV resizes are fitted as there.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.lerobot_pipeline import (
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAME,
    Step,
    read_pipeline,
    read_renamed,
    robot_names,
)
from models.families.groot.conventions import found_tokenizer
from models.families.groot.n17.checkpoint import Beside, folder_of
from models.families.groot.n17.model import TAGS, Groot17Config
from models.families.groot.n17.pictures import GrootPicture
from models.families.groot.n17.qwen_turn import DEFAULT, QwenTurn
from models.families.groot.n17.units import GrootUnits, Pose, Rows, UnitPart
from models.files.foreign_json import read_json, section, whole
from models.inputs.bpe import ByteBpe, has_tokenizer
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.history import NOW, History
from models.inputs.processor import Processor
from models.inputs.raw import RawKeys

PACK, ENCODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
DECODE, UNPACK = "groot_n1_7_action_decode_v1", "groot_action_unpack_unnormalize_v2"
PROCESSOR, STATISTICS, ROWS = "processor_config.json", "statistics.json", "embodiment_id.json"
LIBERO = "libero"
Acting = tuple[Groot17Config, Processor]
POSES: Mapping[str, Pose] = {"XYZ_ROT6D": "rot6d", "XYZ_ROTVEC": "rotvec"}


def tags(path: Path) -> tuple[str, ...]:
    """Robots that the files know."""
    root = folder_of(path)
    if is_lerobots(root):
        return (_tag(_steps(root)[0][PACK]),)
    file = _sidecar(root, STATISTICS)
    return tuple(read_json(file)) if file.is_file() else ()


def prepared(
    path: Path, told: Beside, config: Groot17Config, tag: str
) -> tuple[Groot17Config, Processor]:
    """Config and processor of a policy that acts for a robot.

    Raises:
      ValueError: the files lack something of it, or say what is not supported.
    """
    root = folder_of(path)
    if is_lerobots(root):
        return _lerobots(root, told, config)
    return _nvidias(root, told, config, tag)


def is_lerobots(root: Path) -> bool:
    """True for a folder with LeRobot's processor files."""
    return (root / PREPROCESSOR).is_file()


def tokenizer_of(path: Path, told: Beside) -> ByteBpe | None:
    """The tokenizer in the checkpoint's folder, one right below it, or the backbone's."""
    if told.folder is not None and has_tokenizer(told.folder):
        return ByteBpe.read(told.folder)
    return found_tokenizer(path)


def _sidecar(root: Path, name: str) -> Path:
    """A file of NVIDIA's processor, which fine-tunes keep in a folder of its own."""
    below = root / "processor" / name
    return below if below.is_file() and not (root / name).is_file() else root / name


def _nvidias(root: Path, told: Beside, config: Groot17Config, tag: str) -> Acting:
    file, where = _sidecar(root, PROCESSOR), str(_sidecar(root, STATISTICS))
    known = section(read_json(file), "processor_kwargs", str(file))
    robots = section(known, "modality_configs", str(file))
    statistics = read_json(_sidecar(root, STATISTICS))
    if tag not in robots or tag not in statistics:
        raise ValueError(
            f"{file} and {where} describe {sorted(set(robots) & set(statistics))}, not '{tag}'; "
            "give load_policy(robot=…) one of these."
        )
    for name in ("exclude_state", "use_mean_std"):
        if known.get(name):
            raise ValueError(f"{file}: {name} is true; only false is supported.")
    modality, numbers = section(robots, tag, str(file)), section(statistics, tag, where)
    own = _units(modality, numbers, known, f"{where}: {tag}", lerobots=False)
    cameras = _keys(modality, "video", str(file))
    language = _keys(modality, "language", str(file))
    keys = RawKeys(
        tuple((f"video.{name}", name) for name in cameras),
        tuple(f"state.{part.name}" for part in own.states),
        language[0] if language else "task",
        None,
    )
    rows = _sidecar(root, ROWS)
    row = whole(read_json(rows) if rows.is_file() else dict(TAGS), tag, -1, str(rows), least=0)
    robot = _robot(tag, cameras, own, keys)
    formal = bool(known.get("formalize_language", True))
    prompts = QwenTurn(tokenizer_of(root, told), formal=formal)
    fit = _pictures(known, told, config, [(256, 256)])
    config = replace(config, observed=_past(modality, str(file)))
    return _acting(config, robot, row, prompts, fit)


def _steps(root: Path) -> tuple[dict[str, Step], dict[str, Step]]:
    before = read_pipeline(root / PREPROCESSOR, ((RENAME, PACK, ENCODE),), (PACK, ENCODE))
    return before, read_pipeline(root / POSTPROCESSOR, ((DECODE,), (UNPACK,)))


def _tag(pack: Step) -> str:
    return str(pack.config.get("embodiment_tag"))


def _lerobots(root: Path, told: Beside, config: Groot17Config) -> Acting:
    before, after = _steps(root)
    file, pack = str(root / PREPROCESSOR), before[PACK].config
    values, modality = read_json(root / "config.json"), section(pack, "modality_config", file)
    if (DECODE in after) != bool(modality):
        raise ValueError(
            f"{root / POSTPROCESSOR} has the step {', '.join(after)}, which does not belong to the "
            f"statistics in {PREPROCESSOR}; copy both of the same policy."
        )
    tag, features = _tag(before[PACK]), section(values, "input_features", "config.json")
    shapes = {
        name: tuple(section(features, name, "config.json").get("shape") or (3, 256, 256))[1:]
        for name in features
        if section(features, name, "config.json").get("type") == "VISUAL"
    }
    cameras = _lerobots_cameras(pack.get("video_modality_keys"), sorted(shapes))
    transform = values.get("action_decode_transform")
    if modality:
        decode = after[DECODE].config
        flags = {**pack, "use_relative_action": decode.get("use_relative_action", False)}
        own = _units(modality, section(pack, "raw_stats", file), flags, file, lerobots=True)
        own = replace(own, dims=int(decode.get("env_action_dim") or own.dims))
        if transform == LIBERO:
            own = replace(own, gripper="sign")
    else:
        own = _flat_units(before[PACK], after[UNPACK])
        told_so = after[UNPACK].config
        turned = told_so.get("libero_gripper_action", False)
        turned = transform == LIBERO if "action_decode_transform" in values else turned
        if turned and own.dims >= 7:
            signed = told_so.get("libero_gripper_binarize", True)
            own = replace(own, gripper="sign" if signed else "linear")
    (state, *names) = robot_names(read_renamed(before), ("observation.state", *cameras), file)
    keys = RawKeys(tuple((name, name) for name in names), (state,), "task", DEFAULT)
    row = whole(section(pack, "embodiment_mapping", file), tag, 0, file, least=0)
    formal = bool(pack.get("formalize_language", True))
    prompts = QwenTurn(tokenizer_of(root, told), formal=formal, default=DEFAULT)
    seen = [shapes[name] for name in cameras]
    fit = _pictures(before[ENCODE].config, told, config, seen)
    config = replace(config, observed=_past(modality, file))
    if not told.values:
        config = replace(config, horizon=whole(pack, "action_horizon", config.horizon, file))
    return _acting(config, _robot(tag, tuple(names), own, keys), row, prompts, fit)


def _acting(
    config: Groot17Config, robot: Embodiment, row: int, prompts: QwenTurn, fit: GrootPicture
) -> Acting:
    config = replace(config, image_size=fit.shape, projectors=(row,))
    return config, replace(config.processor([robot]), prompts=prompts, pictures=fit)


def _lerobots_cameras(wanted: Any, known: list[str]) -> tuple[str, ...]:
    """The cameras that LeRobot shows, in its order: those of the names, else all by alphabet."""
    found = []
    for name in wanted or ():
        spellings = [f"observation.images.{name}"]
        spellings += ["observation.images.image2"] if name == "wrist_image" else []
        found += [spelling for spelling in spellings if spelling in known][:1]
    return tuple(found or known)


def _robot(tag: str, cameras: tuple[str, ...], own: GrootUnits, keys: RawKeys) -> Embodiment:
    dims = sum(part.dims for part in own.states)
    units = Normalizer.identity(dims), Normalizer.identity(own.dims)
    return Embodiment(tag, cameras, *units, keys=keys, own=own)


def _keys(modality: dict[str, Any], kind: str, where: str) -> tuple[str, ...]:
    return tuple(map(str, section(modality, kind, where).get("modality_keys") or ()))


def _past(modality: dict[str, Any], where: str) -> History:
    """The past of `video.delta_indices`, such as [-15, 0]."""
    ago = section(modality, "video", where).get("delta_indices") or [0]
    if any(type(step) is not int or step > 0 for step in ago) or 0 not in ago:
        raise ValueError(
            f"{where}: video has delta_indices {ago}; give steps back, and 0 for the present."
        )
    past = tuple(sorted(-step for step in ago if step))
    return History((("images", past),), shown=True) if past else NOW


def _pictures(
    known: Mapping[str, Any], told: Beside, config: Groot17Config, cameras: list[tuple[int, ...]]
) -> GrootPicture:
    """The fit of pictures, with the size that those of the first camera get."""
    target, edge = known.get("image_target_size"), known.get("shortest_image_edge")
    crop, cut = known.get("crop_fraction"), known.get("image_crop_size")
    if crop is None:
        crop = cut[0] / target[0] if cut and target else 0.0
    file = told.folder / "preprocessor_config.json" if told.folder is not None else None
    limits = read_json(file) if file is not None and file.is_file() else {}
    size = section(limits, "size", str(file))
    fit = GrootPicture(
        (256, 256),
        area=bool(known.get("use_albumentations", False)),
        edge=int(edge or target[0]) if target else 0,
        crop=float(crop),
        target=tuple(target) if target else (256, 256),
        letter_box=bool(known.get("letter_box_transform", False)),
        step=config.vision.edge,
        least=limits.get("min_pixels", size.get("shortest_edge", 65_536)),
        most=limits.get("max_pixels", size.get("longest_edge", 16_777_216)),
        any_size=True,
    )
    first = fit(np.zeros((*(cameras[0] if cameras else (256, 256)), 3), np.uint8))
    return replace(fit, size=first.shape[:2])


def _rows(values: Any, where: str) -> Rows:
    try:
        rows = np.atleast_2d(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        rows = np.zeros((0, 0))
    if rows.ndim != 2 or not rows.size or not np.isfinite(rows).all():
        raise ValueError(f"{where} is {str(values)[:80]}; expected finite numbers.")
    return tuple(map(tuple, rows.tolist()))


def _flat_units(pack: Step, unpack: Step) -> GrootUnits:
    """Units of LeRobot's files without parts: a dataset's least and largest values."""
    found, after = pack.statistics(), unpack.statistics()
    parts = {}
    for feature in ("observation.state", "action"):
        for side in ("min", "max"):
            name = f"{feature}.{side}"
            if name not in found or not np.array_equal(found[name], after.get(name, ())):
                raise ValueError(
                    f"{pack.file} and {POSTPROCESSOR} do not have the same statistics {name}; copy "
                    "all policy_*.json and policy_*.safetensors of the policy again."
                )
        low, high = (_rows(found[f"{feature}.{side}"], pack.name) for side in ("min", "max"))
        parts[feature] = (UnitPart(feature, low, high),)
    flags = pack.config
    if not flags.get("normalize_min_max", True) or not unpack.config.get("clip_normalized_action"):
        raise ValueError(
            f"{pack.file}: normalize_min_max or clip_normalized_action is false; only true is "
            "supported."
        )
    return GrootUnits(
        steps=whole(flags, "valid_action_horizon", 40, str(pack.file)),
        states=parts["observation.state"],
        actions=parts["action"],
        dims=int(unpack.config.get("env_action_dim") or parts["action"][0].dims),
        clip=bool(flags.get("clip_outliers", True)),
        near=False,
    )


def _units(
    modality: dict[str, Any],
    statistics: dict[str, Any],
    flags: Mapping[str, Any],
    where: str,
    lerobots: bool,
) -> GrootUnits:
    """Units of a robot whose parts are described; LeRobot knows ranges alone."""
    sides = ("q01", "q99") if flags.get("use_percentiles") else ("min", "max")

    def numbers(kind: str, name: str, which: tuple[str, str]) -> tuple[Rows, Rows]:
        values = section(section(statistics, kind, where), name, where)
        low, high = (_rows(values.get(x), f"{where}: {kind}.{name}.{x}") for x in which)
        return low, high

    def listed(kind: str, keys: str) -> set[str]:
        return set() if lerobots else set(section(modality, kind, where).get(keys) or ())

    if len(section(modality, "state", where).get("delta_indices") or [0]) != 1:
        raise ValueError(f"{where}: state has several delta_indices; only the present is read.")
    turned = listed("state", "sin_cos_embedding_keys")
    turned = turned if flags.get("apply_sincos_state_encoding") else set()
    centred = listed("state", "mean_std_embedding_keys")
    states = []
    for name in _keys(modality, "state", where):
        if name in turned:
            states.append(UnitPart(name, *numbers("state", name, sides), scale="sines"))
        elif name in centred:
            states.append(UnitPart(name, *numbers("state", name, ("mean", "std")), scale="z-score"))
        else:
            states.append(UnitPart(name, *numbers("state", name, sides)))
    ends = np.cumsum([part.dims for part in states]).tolist()
    first = {part.name: end - part.dims for part, end in zip(states, ends, strict=True)}
    action = section(modality, "action", where)
    names, told = _keys(modality, "action", where), action.get("action_configs")
    if told is None and lerobots:
        raise ValueError(
            f"{where}: action_configs is null, with which LeRobot returns the model's own numbers; "
            "use NVIDIA's files of the policy."
        )
    steps = len(action.get("delta_indices") or ())
    centred, actions = listed("action", "mean_std_embedding_keys"), []
    for name, each in zip(names, told or [{}] * len(names), strict=True):
        rep, kind = (str(each.get(x, usual)) for x, usual in (("rep", "ABSOLUTE"), ("type", "")))
        relative = rep.upper() == "RELATIVE" and bool(flags.get("use_relative_action"))
        form = str(each.get("format")).upper().replace("+", "_")
        pose: Pose = POSES.get(form, "") if relative and kind.upper() == "EEF" else ""
        if relative and kind.upper() == "EEF" and not pose:
            raise ValueError(
                f"{where}: the relative pose '{name}' has format {form}; expected one of "
                f"{', '.join(POSES)}."
            )
        origin = str(each.get("state_key") or name)
        if relative and origin not in first:
            raise ValueError(
                f"{where}: '{name}' is relative to '{origin}', which is no part of the state."
            )
        which = ("mean", "std") if name in centred else ("min", "max") if relative else sides
        low, high = numbers("relative_action" if relative else "action", name, which)
        if len(low) > 1 and len(low) < steps:
            raise ValueError(
                f"{where}: '{name}' has statistics of {len(low)} steps, but a chunk has {steps}."
            )
        actions.append(
            UnitPart(
                name,
                low[:steps],
                high[:steps],
                "z-score" if name in centred else "range",
                first[origin] if relative else -1,
                pose,
            )
        )
    return GrootUnits(
        steps=steps,
        states=tuple(states),
        actions=tuple(actions),
        dims=sum(part.dims for part in actions),
        clip=bool(flags.get("clip_outliers", True)),
        near=not lerobots,
    )
