"""GR00T-N1.7's policies as NVIDIA's code and LeRobot's keep them, with adapters folded in.

Neither keeps the config of the backbone, nor LeRobot that of the head: both lie here in folders
below, named as the hub's, so that the files say all that this code reads of them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.checkpoints.layout import exported
from models.checkpoints.lerobot_pipeline import step, write_pipeline
from models.checkpoints.safetensors_format import Entry, new_model, write_file
from models.families.groot.n17 import robots
from models.families.groot.n17.checkpoint import BACKBONE_NAME, BASE_NAME, PREFIX, VARIANT
from models.families.groot.n17.model import TAGS, Groot17Config
from models.families.groot.n17.names import EMBEDDING, LM_HEAD, TABLE
from models.families.groot.n17.pictures import GrootPicture
from models.families.groot.n17.qwen_turn import QwenTurn
from models.families.groot.n17.units import GrootUnits, UnitPart
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment, Normalizer
from models.layers.adapters import merge
from models.policy import Policy

_TASK = "annotation.human.task_description"
Values = dict[str, Any]


def write_nvidias(policy: Policy, target: Path) -> None:
    """Writes weights, config.json and, if the policy has a processor, its processor_config.json,
    statistics.json and embodiment_id.json. A robot with plain scales becomes one whose dims are
    parts of their own, scaled by mean and deviation.

    Raises:
      ValueError: `target` holds a model, or NVIDIA's code has no place for the policy's prompts,
        pictures or units, or for some parameter.
    """
    robot, config = _robot(policy, "NVIDIA"), policy.model.config
    own = None if robot is None else robot.own or _by_dims(robot, config.horizon)
    cut = isinstance(own, GrootUnits) and own.dims < sum(part.dims for part in own.actions)
    if isinstance(own, GrootUnits) and (own.gripper or cut):
        raise ValueError(
            "NVIDIA's files have no place for LeRobot's change of the gripper, or for actions that "
            "are cut; give --to lerobot."
        )
    config, arrays = _begun(policy, target)
    arrays[LM_HEAD] = arrays[EMBEDDING]
    _write(target, arrays, _head(config))
    if robot is None or not isinstance(own, GrootUnits):
        return
    tag, row = _named(robot, config, policy)
    flags = {
        "modality_configs": {tag: _modality(robot, own, config)},
        **_prepared(policy, own, config),
        "max_action_horizon": config.horizon,
        "apply_sincos_state_encoding": True,
        "use_relative_action": own.relative,
    }
    told = {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": flags}
    _json(target / robots.PROCESSOR, told)
    _json(target / robots.STATISTICS, {tag: _statistics(own)})
    _json(target / robots.ROWS, {tag: row})


def write_lerobots(policy: Policy, target: Path) -> None:
    """Writes the policy of one robot as LeRobot 0.6 keeps it. LeRobot clips the state and the
    actions to the ranges of their statistics, also where the policy did not.

    Raises:
      ValueError: `target` holds a model, LeRobot would prepare the policy's inputs or its actions
        differently, or it has no place for some parameter.
    """
    robot, config = _robot(policy, "LeRobot"), policy.model.config
    if robot is None:
        raise ValueError("LeRobot's files are of one robot, but this policy has none.")
    own = robot.own or _by_ranges(robot, config.horizon)
    assert isinstance(own, GrootUnits)
    scales = {part.scale for part in (*own.states, *own.actions)}
    if scales != {"range"} or any(part.pose == "rotvec" for part in own.actions):
        raise ValueError(
            f"LeRobot's GR00T has ranges and rot6d poses alone, but '{robot.name}' has scales "
            f"{sorted(scales)} or rotation vectors; give --to groot or chiliad."
        )
    config, arrays = _begun(policy, target)
    arrays[LM_HEAD] = arrays.pop(EMBEDDING)
    tag, row = _named(robot, config, policy)
    parts = {"raw_stats": _statistics(own), "modality_config": _modality(robot, own, config)}
    prepared = _prepared(policy, own, config)
    cameras = parts["modality_config"]["video"]["modality_keys"]
    transform = robots.LIBERO if own.gripper else None
    values = {
        "type": "groot",
        "n_obs_steps": 1,
        "input_features": {
            **{f"observation.images.{x}": _feature("VISUAL", 3, policy) for x in cameras},
            "observation.state": _feature("STATE", len(robot.state.offset)),
        },
        "output_features": {"action": _feature("ACTION", own.dims)},
        "chunk_size": config.horizon,
        "n_action_steps": config.horizon,
        "max_state_dim": config.state_dim,
        "max_action_dim": config.action_dim,
        "base_model_path": BASE_NAME,
        "embodiment_tag": tag,
        "use_relative_actions": own.relative,
        "action_decode_transform": transform,
    }
    named = {PREFIX + name: entry for name, entry in arrays.items()}
    _write(target, named, values, {PREFIX + EMBEDDING: PREFIX + LM_HEAD})
    _json(target / BASE_NAME / "config.json", _head(config))
    packed = ("max_state_dim", "max_action_dim", "formalize_language", "clip_outliers")
    pack = {name: prepared.pop(name) for name in (*packed, "use_percentiles")} | {
        "state_horizon": 1,
        "action_horizon": config.horizon,
        "valid_action_horizon": own.steps,
        "video_horizon": config.observed.views,
        "language_key": "task",
        "embodiment_tag": tag,
        "embodiment_mapping": {**TAGS, tag: row},
        "normalize_min_max": True,
        "state_dropout_prob": 0.0,
        "video_modality_keys": cameras,
    }
    device = step("device_processor", device="cpu", float_dtype=None)
    before = [
        step("rename_observations_processor", rename_map={}),
        step("to_batch_processor"),
        step(robots.PACK, **pack, **parts),
        step(robots.ENCODE, **prepared, device="cpu"),
        device,
    ]
    acted: Values = {"env_action_dim": own.dims, "use_relative_action": own.relative}
    acted |= {"use_percentiles": False, "action_decode_transform": transform}
    flat: dict[str, Entry] = {}
    for feature, each in (("observation.state", own.states), ("action", own.actions)):
        for side, name in (("low", "min"), ("high", "max")):
            kept = np.concatenate([np.ravel(getattr(part, side)) for part in each])
            flat[f"{feature}.{name}"] = kept.shape, partial(np.asarray, kept)
    write_pipeline(target, "policy_preprocessor", before, flat, (robots.PACK,))
    after = [step(robots.DECODE, **acted, **parts), device]
    write_pipeline(target, "policy_postprocessor", after, {}, ())


def _begun(policy: Policy, target: Path) -> tuple[Groot17Config, dict[str, Entry]]:
    """Config and arrays without adapters, after the backbone's files are written."""
    new_model(target)
    config, params = merge(policy.model.config, policy.params)
    arrays, backbone = exported(params, TABLE, "A GR00T-N1.7 checkpoint"), target / BACKBONE_NAME
    language, vision = config.language, config.vision
    rope = {"mrope_interleaved": True, "mrope_section": list(language.sections)}
    tower = {"num_heads": vision.heads, "deepstack_visual_indexes": list(vision.deep)}
    text = {"rope_theta": language.base, "rope_scaling": {**rope, "rope_type": "default"}}
    told = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower}
    _json(backbone / "config.json", told)
    processor = policy.processor
    if processor is not None and isinstance(fit := processor.fits[0], GrootPicture):
        size = {"shortest_edge": fit.least, "longest_edge": fit.most}
        _json(backbone / "preprocessor_config.json", {"size": size, "patch_size": vision.patch})
    if processor is not None and processor.has_tokenizer:
        text_tokenizer = processor.tokenizer
        if isinstance(text_tokenizer, ByteBpe):
            (backbone / "tokenizer.json").write_text(text_tokenizer.json, encoding="utf-8")
    return config, arrays


def _write(
    target: Path,
    arrays: Mapping[str, Entry],
    values: Values,
    aliases: Mapping[str, str] | None = None,
) -> None:
    metadata = {"format": "pt", **(aliases or {})}
    write_file(new_model(target), arrays, jnp.dtype("float32"), metadata)
    _json(target / "config.json", values)


def _json(file: Path, values: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=2) + "\n")


def _feature(kind: str, size: int, policy: Policy | None = None) -> Values:
    """A feature of LeRobot's; a picture's has the policy's height and width."""
    fits = policy.processor.fits if policy is not None and policy.processor is not None else ()
    return {"type": kind, "shape": [size, *(fits[0].shape if fits else ())]}


def _robot(policy: Policy, whose: str) -> Embodiment | None:
    """The robot of a policy whose inputs another code's GR00T prepares alike; None for a policy
    without a processor.

    Raises:
      ValueError: it does not.
    """
    processor = policy.processor
    if processor is None:
        return None
    robot = processor.embodiments[policy.embodiment]
    alike = isinstance(processor.prompts, QwenTurn) and isinstance(processor.pictures, GrootPicture)
    if not alike or robot.adapter or not isinstance(robot.own, GrootUnits | None):
        raise ValueError(
            f"{whose}'s GR00T-N1.7 prepares prompts, pictures and units in its own ways, but this "
            f"policy has others for '{robot.name}'; give --to chiliad."
        )
    return robot


def _named(robot: Embodiment, config: Groot17Config, policy: Policy) -> tuple[str, int]:
    """The robot's tag and row; one that came from such files keeps its tag."""
    tag, row = config.robot(policy.embodiment)
    return (tag if robot.own is None else robot.name), row


def _by_dims(robot: Embodiment, horizon: int) -> GrootUnits:
    """Plain scales as parts of one dim each, by offset and scale."""

    def parts(scale: Normalizer, name: str, origins: Sequence[int] = ()) -> tuple[UnitPart, ...]:
        each = zip(scale.offset, scale.scale, origins or [-1] * len(scale.offset), strict=True)
        return tuple(
            UnitPart(f"{name}_{d}", ((offset,),), ((width,),), "z-score", origin)
            for d, (offset, width, origin) in enumerate(each)
        )

    actions = parts(robot.actions, "action", robot.relative)
    return GrootUnits(horizon, parts(robot.state, "state"), actions, len(actions), clip=False)


def _by_ranges(robot: Embodiment, horizon: int) -> GrootUnits:
    """Plain scales as the ranges that they map to ±1.

    Raises:
      ValueError: actions are relative to the state.
    """

    def part(scale: Normalizer, name: str) -> tuple[UnitPart, ...]:
        offset, half = np.asarray(scale.offset), np.asarray(scale.scale)
        half = np.where((half > 1e-9) & (half < 1e9), half, 0)
        return (UnitPart(name, (tuple(offset - half),), (tuple(offset + half),)),)

    if any(origin >= 0 for origin in robot.relative):
        raise ValueError(
            f"LeRobot scales relative actions by each step, but '{robot.name}' does not; give --to "
            "groot or chiliad."
        )
    states, actions = part(robot.state, "state"), part(robot.actions, "action")
    return GrootUnits(horizon, states, actions, len(robot.actions.offset), near=False)


def _prepared(policy: Policy, own: GrootUnits, config: Groot17Config) -> Values:
    """Preparation of prompts, pictures and numbers, by the names that both codes have for it."""
    processor: Any = policy.processor
    fit, prompts = processor.fits[0], processor.prompts
    return {
        "image_crop_size": None,
        "image_target_size": list(fit.target) if fit.edge else None,
        "shortest_image_edge": fit.edge or None,
        "crop_fraction": fit.crop,
        "use_albumentations": fit.area,
        "letter_box_transform": fit.letter_box,
        "model_name": BACKBONE_NAME,
        "formalize_language": prompts.formal,
        "max_state_dim": config.state_dim,
        "max_action_dim": config.action_dim,
        "use_percentiles": False,
        "clip_outliers": own.clip,
    }


def _modality(robot: Embodiment, own: GrootUnits, config: Groot17Config) -> Values:
    names = [camera.rpartition(".")[2] for camera in robot.cameras]
    if len(set(names)) < len(names):
        raise ValueError(
            f"A camera is known by the last part of its name, but cameras of '{robot.name}' would "
            f"then share a name ({', '.join(robot.cameras)}); give --to chiliad."
        )

    def told(deltas: Sequence[int], keys: Sequence[str], parts: Sequence[UnitPart] = ()) -> Values:
        return {
            "delta_indices": list(deltas),
            "modality_keys": list(keys),
            "sin_cos_embedding_keys": [x.name for x in parts if x.scale == "sines"] or None,
            "mean_std_embedding_keys": [x.name for x in parts if x.scale == "z-score"] or None,
            "action_configs": None,
        }

    ends = np.cumsum([part.dims for part in own.states]).tolist()
    firsts = {end - part.dims: part.name for part, end in zip(own.states, ends, strict=True)}
    forms = {pose: form for form, pose in robots.POSES.items()}
    configs = [
        {
            "rep": "RELATIVE" if part.origin >= 0 else "ABSOLUTE",
            "type": "EEF" if part.pose else "NON_EEF",
            "format": forms.get(part.pose, "DEFAULT"),
            "state_key": firsts[part.origin] if part.origin >= 0 else None,
        }
        for part in own.actions
    ]
    action = told(range(own.steps), [part.name for part in own.actions], own.actions)
    return {
        "video": told([*(-n for n in reversed(config.observed.camera("images"))), 0], names),
        "state": told([0], [part.name for part in own.states], own.states),
        "action": {**action, "action_configs": configs},
        "language": told([0], [_TASK]),
    }


def _statistics(own: GrootUnits) -> Values:
    def numbers(part: UnitPart, rows: slice | int = 0) -> Values:
        low, high = np.asarray(part.low)[rows], np.asarray(part.high)[rows]
        mean, deviation = (low + high) / 2, (high - low) / 4
        if part.scale == "z-score":
            mean, deviation, low, high = low, high, low - high, low + high
        each = {"min": low, "max": high, "mean": mean, "std": deviation, "q01": low, "q99": high}
        return {name: x.tolist() for name, x in each.items()}

    kinds = {"state": own.states, "action": own.actions}
    told = {kind: {part.name: numbers(part) for part in each} for kind, each in kinds.items()}
    relative = [part for part in own.actions if part.origin >= 0]
    rows = {part.name: slice(None) if len(part.low) > 1 else 0 for part in relative}
    told["relative_action"] = {part.name: numbers(part, rows[part.name]) for part in relative}
    return told


def _head(config: Groot17Config) -> Values:
    """NVIDIA's config.json."""

    def stack(of: Any, name: str) -> Values:
        fixed = {k.partition(".")[2]: x for k, x in VARIANT if k.startswith(name)}
        sizes = {"num_attention_heads": of.heads, "attention_head_dim": of.head_dim}
        dropped = {"dropout": 0.2, "final_dropout": True}
        return {"num_layers": of.depth, **sizes, **dropped, **fixed}

    stacks = {"diffusion_model_cfg": config.dit, "vl_self_attention_cfg": config.adapter}
    made = {name: stack(of, name) for name, of in stacks.items()}
    made["diffusion_model_cfg"]["output_dim"] = config.hidden
    return {
        "architectures": ["Gr00tN1d7"],
        "model_type": "Gr00tN1d7",
        "model_name": BACKBONE_NAME,
        **{name: value for name, value in VARIANT if "." not in name},
        "model_dtype": "float32",
        "select_layer": config.language.depth,
        "backbone_embedding_dim": config.language.width,
        "action_horizon": config.horizon,
        "max_state_dim": config.state_dim,
        "max_action_dim": config.action_dim,
        "hidden_size": config.hidden,
        "input_embedding_dim": config.dit.width,
        "max_num_embodiments": config.embodiments,
        "max_seq_len": config.positions,
        "use_alternate_vl_dit": config.text_every > 0,
        "attend_text_every_n_blocks": max(config.text_every, 1),
        "num_inference_timesteps": config.euler_steps,
        "state_dropout_prob": config.state_dropout,
        **made,
    }
