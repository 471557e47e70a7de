"""LeRobot's ports of π0 and π0.5, and openpi's own PyTorch files, which lack the leading `model.`.

Names are those of Hugging Face's PaliGemma and Gemma. Up to LeRobot 0.4.4 the embedding is tied to
`lm_head`, the only name saved; LeRobot 0.6.1 saves and unties both, and the embedding is read.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from models.checkpoints.layout import exported
from models.checkpoints.lerobot_pipeline import (
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAME,
    TOKENIZE,
    Step,
    read_pipeline,
    read_renamed,
)
from models.checkpoints.lerobot_scales import NORMALIZE, UNNORMALIZE, is_scaled, read_scaling
from models.checkpoints.rename import Rule, Table
from models.checkpoints.safetensors_format import Entry, new_model, write_file
from models.checkpoints.sources import CheckpointSource, open_safetensors
from models.checkpoints.torch_rules import STACKED, linear, norms, projections, siglip
from models.config import from_json
from models.families.pi.infer import pi_config
from models.families.pi.model import PiConfig
from models.files.foreign_json import read_json, section, whole

PyTree = Any

_PALIGEMMA = "paligemma_with_expert.paligemma"
_EXPERT = "paligemma_with_expert.gemma_expert"
_LAYER = f"{_EXPERT}.model.layers.{{l}}"
_LANGUAGE = f"{_PALIGEMMA}.model.language_model"
_VISION_HEADS = 16

_HEAD = f"{_PALIGEMMA}.lm_head.weight"
_SHARED = (
    *siglip(
        f"{_PALIGEMMA}.model.vision_tower.vision_model",
        f"{_PALIGEMMA}.model.multi_modal_projector.linear",
    ),
    Rule("embedding", f"{_LANGUAGE}.embed_tokens.weight", "v w -> v w", aliases=(_HEAD,)),
    *projections("language", _LANGUAGE),
    *norms("language", _LANGUAGE),
    *projections("expert", f"{_EXPERT}.model"),
    *linear("action_in", "action_in_proj"),
    *linear("action_out", "action_out_proj"),
)
_UNREAD = (
    r"gemma_expert\.(lm_head|model\.embed_tokens)\.",
    r"vision_model\.head\.",
    r"^(un)?normalize_(in|out)puts\.|^normalize_targets\.",
)

PI0 = Table(
    (
        *_SHARED,
        *norms("expert", f"{_EXPERT}.model"),
        *linear("state_in", "state_proj"),
        *linear("time_in", "action_time_mlp_in", also=("time_mlp_in",)),
        *linear("time_out", "action_time_mlp_out", also=("time_mlp_out",)),
    ),
    _UNREAD,
)
PI05 = Table(
    (
        *_SHARED,
        *linear("expert/layers/norm1/modulation", f"{_LAYER}.input_layernorm.dense", STACKED),
        *linear(
            "expert/layers/norm2/modulation", f"{_LAYER}.post_attention_layernorm.dense", STACKED
        ),
        *linear("expert/norm/modulation", f"{_EXPERT}.model.norm.dense"),
        *linear("time_in", "time_mlp_in", also=("action_time_mlp_in",)),
        *linear("time_out", "time_mlp_out", also=("action_time_mlp_out",)),
    ),
    (*_UNREAD, r"^state_proj\.", r"gemma_expert\.model\..*norm\.weight$"),
)

_OLDER = (
    (r"_orig_mod\.", ""),
    (r"^model\.(?=paligemma_with_expert|action_|state_proj|time_mlp|(un)?normalize)", ""),
    (r"paligemma\.language_model\.model\.", "paligemma.model.language_model."),
    (r"paligemma\.language_model\.lm_head\.", "paligemma.lm_head."),
    (r"paligemma\.(?=vision_tower|multi_modal_projector)", "paligemma.model."),
)
"""Prefixes of other writers: torch.compile's, LeRobot's, and transformers' before 4.52."""

_RELATIVE, _ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
_NUMBERS = (RENAME, _RELATIVE, NORMALIZE)
_PREPARE = "pi05_prepare_state_tokenizer_processor_step"
_PREPARE_FAST = "pi0_fast_prepare_state_tokenizer_processor_step"
_NEW_LINE, _ACTION_TOKENS = "pi0_new_line_processor", "action_tokenizer_processor"
ANY = "any"
"""Kind of a policy of which only files of steps are there."""
_BEFORE: dict[str, tuple[tuple[str, ...], ...]] = {
    "pi0": (_NUMBERS, (_NEW_LINE, TOKENIZE)),
    "pi05": ((*_NUMBERS, _PREPARE, TOKENIZE),),
    "pi0_fast": ((*_NUMBERS, _PREPARE_FAST, TOKENIZE), (*_NUMBERS, _ACTION_TOKENS)),
}
_BEFORE[ANY] = tuple(order for orders in list(_BEFORE.values()) for order in orders)
_AFTER = ((UNNORMALIZE, _ABSOLUTE),)
"""Steps that a policy's preparation and its actions go through here, in their order."""
_WORDS = {"pi0": _NEW_LINE, "pi05": _PREPARE, "pi0_fast": _PREPARE_FAST}
MODES = {"pi0": "MEAN_STD", "pi05": "QUANTILES", "pi0_fast": "MEAN_STD"}
"""LeRobot's scaling of state and actions where config.json does not name it."""


@dataclass(frozen=True)
class LerobotConfig:
    """Facts that config.json tells and shapes do not: `horizon` of a chunk, the `text` limit in
    tokens, `state_dim` and `action_dim` as padded, `cameras` in the model's order, the robot's own
    dims if it says, and the action dims that are `relative` to the state.

    `earlier`: True if a LeRobot before 0.5.0 wrote it, None if the files do not tell. `kind`:
    "pi0", "pi05" or "pi0_fast"; "" for openpi's conversion to PyTorch. `max_decoding_steps`: tokens
    of a chunk that π0-FAST writes at most, drawn at `temperature`. `euler_steps`: of the others'
    sampler. `rtc_max_delay`: see PiConfig. `scaling`: LeRobot's name of the scaling of "STATE" and
    "ACTION". `renamed`: {the robot's name of an observation: the policy's}, where they differ.
    `adapter`: see Embodiment.
    """

    horizon: int
    text: int
    state_dim: int = 32
    cameras: tuple[str, ...] = ()
    action_dim: int = 32
    robot_state: int | None = None
    robot_action: int | None = None
    relative: tuple[int, ...] = ()
    earlier: bool | None = None
    kind: str = ""
    max_decoding_steps: int = 256
    temperature: float = 0.0
    euler_steps: int = 10
    rtc_max_delay: int = 0
    scaling: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""


_MEMORY = "policies that read earlier observations are not supported yet"
_REFUSED = {
    "use_visual_memory": _MEMORY,
    "use_proprioceptive_memory": _MEMORY,
    "use_delta_joint_actions_aloha": "LeRobot itself does not carry it out; remove it if it was "
    "not used",
}
"""Settings of config.json under which a policy cannot act here, and why."""


def open_lerobot(path: Path) -> CheckpointSource:
    """A file or directory of safetensors under the names of this module's tables."""

    def plain(name: str) -> str:
        for older, newer in _OLDER:
            name = re.sub(older, newer, name)
        return name

    return open_safetensors(path).renamed(plain)


def table(source: CheckpointSource) -> Table:
    """π0's table or π0.5's, depending on whether flow time modulates the expert's norms."""
    return PI05 if f"{_EXPERT}.model.norm.dense.weight" in source.shapes else PI0


def config(source: CheckpointSource, told: LerobotConfig) -> PiConfig:
    """Config of the model in the files (see `pi_config`), with values that config.json `told`.

    Heads are merged in these files. If the metadata, which our export writes, does not give their
    numbers, they are taken to be Gemma's (one key-value head) and So400m's (16).
    """
    found = pi_config(source, table(source), told.horizon, known_axes(source))
    return replace(found, euler_steps=told.euler_steps, rtc_max_delay=told.rtc_max_delay)


def known_axes(source: CheckpointSource) -> dict[str, int]:
    """Sizes of axes that these files merge, see `config`."""
    known = {
        axis: _heads(source, name, default)
        for axis, name, default in (("g", "kv_heads", 1), ("h", "vision_heads", _VISION_HEADS))
    }
    key = source.shapes.get(f"{_LANGUAGE}.layers.0.self_attn.k_proj.weight")
    if key:
        known["d"] = key[0] // known["g"]
    return known


def read_config(path: Path) -> LerobotConfig:
    """Reads the config.json beside the weights, LeRobot's or that of openpi's PyTorch conversion.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is of another policy, lacks a field, or describes a model with memory.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist, but it gives the policy's horizon; copy it there."
        )
    values, where = read_json(file), str(file)
    kind = values.get("type", "pi05")
    horizons = [name for name in ("chunk_size", "action_horizon") if values.get(name) is not None]
    if kind not in ("pi0", "pi05", "pi0_fast"):
        raise ValueError(
            f"{file} describes a policy of type {str(kind)[:80]!r}, expected 'pi0', 'pi05' or "
            "'pi0_fast'; to read another, name a file that registers its CheckpointFormat with "
            "--family (docs/own_model.md)."
        )
    if not horizons:
        raise ValueError(f"{file} has neither chunk_size nor action_horizon; add one.")
    if "type" not in values and (file.parent / PREPROCESSOR).is_file():
        raise ValueError(f"{file} has no type, such as 'pi0'; copy or download it again.")
    inputs, outputs = (section(values, f"{x}_features", where) for x in ("input", "output"))
    for name, why in _REFUSED.items():
        if values.get(name):
            raise ValueError(f"{file} has {name}; {why}.")
    before, after = read_steps(path, values.get("type", ""))
    told = before[TOKENIZE].config if TOKENIZE in before else {}
    if told.get("max_length") is None:
        text = whole(values, "tokenizer_max_length", 48 if kind == "pi0" else 200, where)
    else:
        text = whole(told, "max_length", 0, str(before[TOKENIZE].file))
    action = _dim(outputs, "action", where)
    old_steps = whole(values, "num_steps", 10, where)  # its name before LeRobot 0.4
    action_dim = whole(values, "max_action_dim", 32, where)
    return LerobotConfig(
        horizon=whole(values, horizons[0], 0, where),
        text=text,
        state_dim=whole(values, "max_state_dim", 32, where),
        cameras=tuple(
            name for name in inputs if section(inputs, name, where).get("type") == "VISUAL"
        ),
        robot_state=_dim(inputs, "observation.state", where),
        action_dim=action_dim,
        robot_action=action,
        relative=_relative(file, values, before, after, action or action_dim),
        earlier=_is_earlier(file, values, before),
        kind=str(values.get("type", "")),
        max_decoding_steps=whole(values, "max_decoding_steps", 256, where),
        temperature=from_json(float, values.get("temperature", 0.0), f"{where}: temperature"),
        euler_steps=whole(values, "num_inference_steps", old_steps, where),
        rtc_max_delay=whole(values, "rtc_training_max_delay", 0, where, least=0),
        scaling=read_modes(file.parent, values, before.get(NORMALIZE), after.get(UNNORMALIZE)),
        renamed=read_renamed(before),
        adapter="aloha" if values.get("adapt_to_pi_aloha") else "",
    )


def read_steps(path: Path, kind: str) -> tuple[dict[str, Step], dict[str, Step]]:
    """The steps before and after the network of a policy of a kind, by their names; {} for a file
    that is not there, and for openpi's conversion (kind "").

    Raises:
      ValueError: as `read_pipeline`.
    """
    folder = path if path.is_dir() else path.parent
    if not kind:
        return {}, {}
    needed = () if kind == ANY else (_WORDS[kind], TOKENIZE)
    return (
        read_pipeline(folder / PREPROCESSOR, _BEFORE[kind], needed),
        read_pipeline(folder / POSTPROCESSOR, _AFTER),
    )


def read_modes(
    folder: Path, values: dict[str, Any], before: Step | None, after: Step | None
) -> dict[str, str]:
    """LeRobot's name of the scaling of states and actions, as `read_scaling`.

    Raises:
      ValueError: as `read_scaling`, or pictures are scaled.
    """
    told = section(values, "normalization_mapping", str(folder))
    known = values.get("normalization_mapping") is not None
    found = read_scaling(folder, told if known else None, before, after)
    if (visual := found.pop("VISUAL", "IDENTITY")) != "IDENTITY":
        raise ValueError(
            f"{folder} scales pictures by {visual[:80]} (VISUAL); only IDENTITY is supported."
        )
    if not is_scaled(before, "observation.state"):
        found["STATE"] = "IDENTITY"
    return found


def export(params: PyTree, config: LerobotConfig, path: Path, dtype: str = "float32") -> None:
    """Writes `path/model.safetensors` and `path/config.json` as LeRobot's pi0 and pi05 read them.

    LeRobot builds only gemma_2b, gemma_300m and So400m. Models of other sizes are written in the
    same way, for this library to read.

    Args:
      dtype: "float32" or "bfloat16".

    Raises:
      ValueError: the directory holds a model, or LeRobot's format has no place for some parameter
        (LoRA factors must be merged first).
    """
    path = Path(path)
    file = new_model(path)
    flat = flatten_dict(params, sep="/")
    modulated = "expert/norm/modulation/kernel" in flat
    rules = PI05 if modulated else PI0
    theirs = exported(params, rules, "A LeRobot checkpoint")
    embedding = theirs.pop(f"{_LANGUAGE}.embed_tokens.weight")
    theirs[_HEAD] = embedding  # the one name that every version of LeRobot reads
    arrays: dict[str, Entry] = {f"model.{name}": entry for name, entry in theirs.items()}
    # The port's expert has an output head that nothing reads but strict loading requires.
    head = (flat["embedding"].shape[0], flat["action_in/kernel"].shape[1])
    arrays[f"model.{_EXPERT}.lm_head.weight"] = (head, lambda: np.zeros(1, np.float32))
    vision, key = flat["vision/blocks/q/kernel"], flat["language/layers/attention/k/kernel"]
    noted = {"vision_heads": str(vision.shape[2]), "kv_heads": str(key.shape[2])}
    if config.earlier is not None:
        noted["earlier"] = str(config.earlier)
    path.mkdir(parents=True, exist_ok=True)
    write_file(file, arrays, jnp.dtype(dtype), {"format": "pt", **noted})
    values = _json(config, flat, "pi05" if modulated else "pi0", dtype)
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _dim(features: dict[str, Any], name: str, where: str) -> int | None:
    if name not in features:
        return None
    shape = section(features, name, where).get("shape")
    if not isinstance(shape, list) or len(shape) != 1:
        raise ValueError(f"{where}: {name} has shape {str(shape)[:80]}; expected one size.")
    return whole({name: shape[0]}, name, 0, where)


def _relative(
    file: Path,
    values: dict[str, Any],
    before: Mapping[str, Step],
    after: Mapping[str, Step],
    dims: int,
) -> tuple[int, ...]:
    """Action dims relative to the state, by the preprocessor's step or else by config.json."""
    if step := before.get(_RELATIVE):
        used, excluded, names = (
            step.config.get(x) for x in ("enabled", "exclude_joints", "action_names")
        )
    else:
        used, excluded, names = (
            values.get(x)
            for x in ("use_relative_actions", "relative_exclude_joints", "action_feature_names")
        )
    turned = after[_ABSOLUTE].config.get("enabled") if _ABSOLUTE in after else False
    if before and after and bool(used) != bool(turned):
        raise ValueError(
            f"{PREPROCESSOR} of {file.parent} {'makes' if used else 'does not make'} actions "
            f"relative to the state, but {POSTPROCESSOR} {'adds' if turned else 'does not add'} it "
            "again; copy both files of the same policy."
        )
    if not used:
        return ()
    lists = [[] if x is None else x for x in (excluded, names)]
    if not all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in lists):
        raise ValueError(
            f"{file}: relative_exclude_joints and action_feature_names are {str(lists)[:80]}; "
            "expected lists of names."
        )
    tokens = [name.lower() for name in lists[0] if name]
    kept = {d for d, name in enumerate(lists[1]) if any(token in name.lower() for token in tokens)}
    return tuple(d for d in range(dims) if d not in kept)


def _is_earlier(file: Path, values: dict[str, Any], before: Mapping[str, Step]) -> bool | None:
    """True if a LeRobot before 0.5.0 wrote the files; None if they do not say.

    No file names a version. `use_relative_actions` came with 0.5.1, `cudnn_deterministic` of
    train_config.json with 0.5.0, and `use_peft` with 0.4.3.
    """
    if "use_relative_actions" in values or _RELATIVE in before:
        return False
    training = file.parent / "train_config.json"
    if training.is_file():
        return "cudnn_deterministic" not in read_json(training)
    return None if "use_peft" in values or "type" not in values else True


def _heads(source: CheckpointSource, name: str, default: int) -> int:
    told = source.metadata.get(name, str(default))
    if not (told.isascii() and told.isdigit() and len(told) < 6 and int(told)):
        raise ValueError(
            f"{source.where}: {name} in its metadata is {told[:80]!r}; expected a number of heads."
        )
    return int(told)


def _json(config: LerobotConfig, flat: dict[str, Any], kind: str, dtype: str) -> dict[str, Any]:
    """Contents of config.json. Fields with the default of every LeRobot version are left out,
    because some versions lack them."""
    action_dim, (tokens, _) = flat["action_in/kernel"].shape[0], flat["vision/position"].shape
    patch = math.isqrt(flat["vision/embed/kernel"].shape[0] // 3)
    side = math.isqrt(tokens) * patch
    state = flat["state_in/kernel"].shape[0] if "state_in/kernel" in flat else config.state_dim
    features = {name: {"type": "VISUAL", "shape": [3, side, side]} for name in config.cameras}
    features["observation.state"] = {"type": "STATE", "shape": [config.robot_state or state]}
    dims = config.robot_action or action_dim
    actions = [f"action_{d:02d}" for d in range(dims)]
    relative = {  # fields of LeRobot 0.5.1 and later
        "use_relative_actions": True,
        "relative_exclude_joints": [x for d, x in enumerate(actions) if d not in config.relative],
        "action_feature_names": actions,
    }
    return {
        "type": kind,
        "dtype": dtype,
        "chunk_size": config.horizon,
        "n_action_steps": config.horizon,
        "max_state_dim": state,
        "max_action_dim": action_dim,
        "tokenizer_max_length": config.text,
        "image_resolution": [side, side],
        "input_features": features,
        "output_features": {"action": {"type": "ACTION", "shape": [dims]}},
        **(relative if config.relative else {}),
        **({"num_inference_steps": config.euler_steps} if config.euler_steps != 10 else {}),
        **({"rtc_training_max_delay": config.rtc_max_delay} if config.rtc_max_delay else {}),
    }
