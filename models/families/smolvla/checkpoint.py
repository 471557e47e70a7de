"""SmolVLA's folders as LeRobot writes them: what config.json tells of the model, the facts of its
vision-language model that no file has, and how the policy prepares its inputs.

A folder lacks the config and the tokenizer of SmolVLM2, which LeRobot takes from the hub by
`vlm_model_name`. They are read from a folder of that name in the policy's, or else a table has the
published models' facts, and the tokenizer is asked for.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from models.checkpoints.lerobot_pipeline import TOKENIZE
from models.checkpoints.lerobot_policy import (
    ACTION,
    STATE,
    LerobotPolicy,
    PolicyFields,
    read_policy,
)
from models.checkpoints.sources import CheckpointSource
from models.config import from_json
from models.families.smolvla.inputs import Cut, TaskLine
from models.families.smolvla.model import SmolvlaConfig
from models.families.smolvla.names import CONNECTOR, EXPERT, TEXT, VISION
from models.files.foreign_json import read_json, section, whole
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.inputs.processor import Processor
from models.inputs.raw import RawKeys
from models.layers.gemma import GemmaConfig
from models.layers.siglip import SiglipConfig

NEW_LINE = "pi0_new_line_processor"
"""Alias of LeRobot's `smolvla_new_line_processor` in `models.checkpoints.lerobot_pipeline`."""
AROUND = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class SmolvlaFields(PolicyFields):
    """Fields of config.json, with the defaults of LeRobot 0.6.1."""

    type: str = "smolvla"
    chunk_size: int = 50
    n_action_steps: int = 50
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] | None = (512, 512)
    empty_cameras: int = 0
    adapt_to_pi_aloha: bool = False
    use_delta_joint_actions_aloha: bool = False
    tokenizer_max_length: int = 48
    num_steps: int = 10
    use_cache: bool = True
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True
    optimizer_lr: float = 1e-4
    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_eps: float = 1e-8
    optimizer_weight_decay: float = 1e-10
    optimizer_grad_clip_norm: float = 10
    scheduler_warmup_steps: int = 1000
    scheduler_decay_steps: int = 30_000
    scheduler_decay_lr: float = 2.5e-6
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    load_vlm_weights: bool = False
    add_image_special_tokens: bool = False
    attention_mode: Literal["cross_attn", "self_attn"] = "cross_attn"
    prefix_length: int = -1
    pad_language_to: str = "longest"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    min_period: float = 4e-3
    max_period: float = 4.0
    rtc_config: dict[str, Any] | None = None
    compile_model: bool = False
    compile_mode: str = "max-autotune"

    def __post_init__(self) -> None:
        refused = {
            "use_delta_joint_actions_aloha": "LeRobot itself does not carry it out",
            "adapt_to_pi_aloha": "LeRobot converts scaled joints, which is not supported",
        }
        if self.empty_cameras:
            refused["add_image_special_tokens"] = "with empty_cameras above 0 it is not supported"
        for name, why in refused.items():
            if getattr(self, name):
                raise ValueError(f"{name} is true; {why}: remove it if it was not used.")

    @property
    def side(self) -> int:
        """Side of the pictures that the model sees.

        Raises:
          ValueError: they are not squares of one size.
        """
        shapes = set(self.picture_shapes)
        sizes = shapes if self.resize_imgs_with_padding is None else {self.resize_imgs_with_padding}
        if len(sizes) != 1 or len(set(*sizes)) != 1:
            raise ValueError(
                f"resize_imgs_with_padding is {self.resize_imgs_with_padding} and pictures are "
                f"{sorted(shapes)}; only squares of one size are supported."
            )
        return next(iter(sizes))[0]


@dataclass(frozen=True)
class Vlm:
    """Facts of a SmolVLM2 that shapes do not tell: `heads`, `kv_heads` and `head_dim` of its
    language model, `vision_heads` of its tower, and the ids of AROUND."""

    heads: int
    kv_heads: int
    head_dim: int
    vision_heads: int
    image_tokens: tuple[int, ...] = (49_189, 49_152)


VLMS: Mapping[str, Vlm] = {
    "SmolVLM2-500M-Video-Instruct": Vlm(15, 5, 64, 12),
    "SmolVLM2-256M-Video-Instruct": Vlm(9, 3, 64, 12),
}
"""The published models whose patches divide LeRobot's pictures."""
_FIXED = {
    "text_config": {"rms_norm_eps": 1e-5, "hidden_act": "silu"},
    "vision_config": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
}
"""Settings of SmolVLM2 that are carried out; others are refused."""


def config(path: Path, source: CheckpointSource) -> SmolvlaConfig:
    """The model in the files.

    Raises:
      ValueError: config.json asks for what is not supported, or neither the folder nor the table
        has the facts of its vision-language model.
    """
    where = _folder(path) / "config.json"
    told = from_json(SmolvlaFields, read_json(where), str(where))
    vlm, shapes = _vlm(path, told), source.shapes

    def size(name: str, axis: int = 0) -> int:
        if name not in shapes:
            raise ValueError(f"{source.where} lacks {name}, which every SmolVLA has.")
        return shapes[name][axis]

    def depth(stack: str) -> int:
        numbers = [re.match(rf"{re.escape(stack)}\.layers\.(\d+)\.", name) for name in shapes]
        return 1 + max((int(found[1]) for found in numbers if found), default=-1)

    def decoder(stack: str) -> GemmaConfig:
        gate = f"{stack}.layers.0.mlp.gate_proj.weight"
        sizes = size(gate, 1), depth(stack), size(gate)
        return GemmaConfig(*sizes, vlm.heads, vlm.kv_heads, vlm.head_dim)

    patches = f"{VISION}.embeddings.patch_embedding.weight"
    hidden = size(f"{VISION}.encoder.layers.0.mlp.fc1.weight")
    tower = size(patches), depth(f"{VISION}.encoder"), hidden, vlm.vision_heads, size(patches, 2)
    crosses = told.attention_mode == "cross_attn"
    try:
        return SmolvlaConfig(
            SiglipConfig(*tower),
            decoder(TEXT),
            decoder(EXPERT),
            image_size=told.side,
            grid=math.isqrt(size(f"{VISION}.embeddings.position_embedding.weight")),
            shuffle=math.isqrt(size(f"{CONNECTOR}.weight", 1) // size(patches)),
            vocabulary=size(f"{TEXT}.embed_tokens.weight"),
            image_tokens=vlm.image_tokens if told.add_image_special_tokens else (),
            self_attention_every=max(told.self_attn_every_n_layers, 0) if crosses else 1,
            state_dim=told.max_state_dim,
            action_dim=told.max_action_dim,
            horizon=told.chunk_size,
            n_action_steps=told.n_action_steps,
            min_period=told.min_period,
            max_period=told.max_period,
            euler_steps=told.num_steps,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read(path: Path) -> LerobotPolicy[SmolvlaFields]:
    """The policy's folder without its weights; raises as `read_policy`."""
    steps = NEW_LINE, TOKENIZE
    found = read_policy(path, SmolvlaFields, (steps,), steps, base=True)
    if found.picture_scales:
        raise ValueError(
            f"{path} scales pictures (VISUAL of normalization_mapping); only IDENTITY is supported."
        )
    return found


def preparation(path: Path, config: SmolvlaConfig) -> Processor:
    """The preparation with which a policy was trained, for a robot in the model's units; without a
    tokenizer if none lies in its folder."""
    found = read(path)
    told, (tokenizer, settings) = found.fields, _tokenizer(path, found.fields)
    step = found.before.get(TOKENIZE)
    values, where = ({}, "") if step is None else (step.config, str(step.file))
    prompts = TaskLine(
        tokenizer,
        whole(values, "max_length", told.tokenizer_max_length, where),
        _cut(settings.get("truncation_side", "left"), path),
    )
    made = config.processor([Embodiment.in_model_units((), config.state_dim, config.action_dim)])
    return replace(made, prompts=prompts)


def acting(path: Path, config: SmolvlaConfig) -> Processor:
    """The preparation of a policy for its own robot. Any of several cameras may be missing, as in
    LeRobot."""
    found = read(path)
    told, scales = found.fields, found.scales
    cameras = tuple(found.robot[name] for name in told.named("VISUAL"))
    robot = Embodiment.in_model_units(cameras, told.dims("STATE"), told.dims("ACTION"))
    robot = replace(
        robot,
        absent=cameras if len(cameras) > 1 else (),
        keys=RawKeys(
            tuple((name, name) for name in cameras),
            (found.robot.get(STATE, STATE),),
            "task",
            ignored=told.named("ENV"),
        ),
    )
    if scales:
        robot = replace(robot, name="LeRobot", state=scales[STATE], actions=scales[ACTION])
    return preparation(path, config).with_robots([robot])


def _cut(side: Any, path: Path) -> Cut:
    if side not in get_args(Cut):
        raise ValueError(f"{path}: truncation_side is {side!r}; expected one of {get_args(Cut)}.")
    return side


def _vlm(path: Path, told: SmolvlaFields) -> Vlm:
    file = _vlm_folder(path, told) / "config.json"
    if not file.is_file():
        known = VLMS.get(told.vlm_model_name.rpartition("/")[2])
        if known is None:
            raise ValueError(
                f"{_folder(path)} lacks the config.json and tokenizer.json of its "
                f"vlm_model_name, {told.vlm_model_name[:80]!r}; copy them into a folder of that "
                f"name in it (the facts of {' and '.join(VLMS)} are known)."
            )
        return known
    values, where = read_json(file), str(file)
    for name, fixed in _FIXED.items():
        part = section(values, name, where)
        if wrong := [x for x, wanted in fixed.items() if part.get(x, wanted) != wanted]:
            raise ValueError(
                f"{file}: {wrong[0]} of {name} is {str(part[wrong[0]])[:80]}; only "
                f"{fixed[wrong[0]]} is supported."
            )
    text, vision = (section(values, name, where) for name in _FIXED)
    heads = whole(text, "num_attention_heads", 32, where)
    width = whole(text, "hidden_size", 0, where)
    head_dim = {"head_dim": text.get("head_dim") or width // heads}
    tokenizer = _tokenizer(path, told)[0] if told.add_image_special_tokens else None
    return Vlm(
        heads,
        whole(text, "num_key_value_heads", heads, where),
        whole(head_dim, "head_dim", 0, where),
        whole(vision, "num_attention_heads", 16, where),
        *(() if tokenizer is None else (tuple(map(tokenizer.id, AROUND)),)),
    )


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _vlm_folder(path: Path, told: SmolvlaFields) -> Path:
    """The folder of the vision-language model in the policy's, by the last two parts of its name:
    no name leads out of it."""
    parts = [part for part in Path(told.vlm_model_name).parts if part not in ("/", "..")]
    return _folder(path).joinpath(*parts[-2:])


def _tokenizer(path: Path, told: SmolvlaFields) -> tuple[ByteBpe | None, dict[str, Any]]:
    """The tokenizer in a policy's folder or its vision-language model's, and its settings."""
    folders = (_folder(path), _vlm_folder(path, told))
    found = next((x for x in folders if (x / "tokenizer.json").is_file()), None)
    if found is None:
        return None, {}
    file = found / "tokenizer_config.json"
    return ByteBpe.read(found / "tokenizer.json"), read_json(file) if file.is_file() else {}
