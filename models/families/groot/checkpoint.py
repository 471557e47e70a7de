"""Checkpoints of GR00T-N1.5: NVIDIA's release, written by transformers, and LeRobot's port.

The two writers differ in a prefix, in whether the vision tower's name is doubled, and in which of
two tied names holds the embedding. Sizes come from the shapes. What no shape determines (head
counts, the horizon, the id of the image token) comes from config.json, or else from the release.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.checkpoints.layout import exported
from models.checkpoints.rename import our_shapes
from models.checkpoints.safetensors_format import new_model, write_file
from models.checkpoints.sources import CheckpointSource, open_safetensors
from models.families.groot.eagle_turn import EagleTurn
from models.families.groot.modality import Modality, write_modality
from models.families.groot.model import GrootConfig
from models.families.groot.names import LANGUAGE, TABLE, canonical
from models.files.foreign_json import read_json, section, whole
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.processor import Processor
from models.layers.adapters import merge
from models.layers.dit import TransformerConfig
from models.layers.qwen.qwen3 import QwenConfig
from models.layers.siglip import SiglipConfig
from models.policy import Policy

PyTree = Any

METADATA, MODALITY = "experiment_cfg/metadata.json", "experiment_cfg/modality.json"
_MOVES = (1e-9, 1e9)
"""Range of scales within which a dim counts as having moved."""
_SIZED = (
    "vision/blocks/norm1/scale",
    "vision/blocks/up/bias",
    "vision/position",
    "vision/embed/kernel",
    "embedding",
    "language/layers/attention/q_norm/scale",
    "language/layers/mlp/up/kernel",
    "adapter/blocks/norm1/scale",
    "dit/cross_blocks/up/kernel",
    "action_encoder/action/kernel",
    "state_encoder/hidden/kernel",
    "future_tokens",
    "positions",
)


def open_groot(path: Path) -> CheckpointSource:
    """A file or directory of safetensors under the names of `TABLE`, whichever code wrote it."""
    return open_safetensors(path).renamed(canonical)


def config(source: CheckpointSource, values: dict[str, Any]) -> GrootConfig:
    """The architecture of a checkpoint.

    Args:
      values: its config.json, see `read_values`.

    Raises:
      ValueError: config.json describes a variant that is not this architecture, tensors that sizes
        are read from are missing, or head counts do not divide widths.
    """
    check_variant(values, _VARIANT, source.where, "GR00T-N1.5")
    where, released = f"{source.where}: config.json", GrootConfig()
    head, eagle = (section(values, name, where) for name in ("action_head_cfg", "eagle_cfg"))

    def heads(width: int, settings: dict[str, Any], default: int, name: str) -> int:
        count = whole(settings, "num_attention_heads", default, f"{where}, {name}")
        if width % count:
            raise ValueError(
                f"{source.where}: {count} attention heads do not divide the {name}'s width of "
                f"{width}; give config.json the num_attention_heads that it was trained with."
            )
        return count

    def transformer(
        depth: int, width: int, settings: dict[str, Any], default: int, name: str
    ) -> TransformerConfig:
        count = heads(width, settings, default, name)
        return TransformerConfig(depth=depth, heads=count, head_dim=width // count)

    incomplete = f"{source.where} is not a complete GR00T-N1.5 checkpoint"
    shapes = our_shapes(TABLE, source.shapes, needed=_SIZED, where=incomplete)
    vision_depth, vision_width = shapes["vision/blocks/norm1/scale"]
    tokens, patch = shapes["vision/position"][0], math.isqrt(shapes["vision/embed/kernel"][0] // 3)
    vocabulary, width = shapes["embedding"]
    adapter_depth, adapter_width = shapes["adapter/blocks/norm1/scale"]
    pairs, action_width, _ = shapes["dit/cross_blocks/up/kernel"]
    kinds, action_dim, _ = shapes["action_encoder/action/kernel"]
    _, state_dim, hidden = shapes["state_encoder/hidden/kernel"]
    depth, head_dim = shapes["language/layers/attention/q_norm/scale"]
    q, k = (source.shapes[f"{LANGUAGE}.model.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    return GrootConfig(
        vision=SiglipConfig(
            width=vision_width,
            depth=vision_depth,
            hidden=shapes["vision/blocks/up/bias"][1],
            heads=heads(
                vision_width,
                section(eagle, "vision_config", where),
                released.vision.heads,
                "vision tower",
            ),
            patch=patch,
        ),
        language=QwenConfig(
            width=width,
            depth=depth,
            hidden=shapes["language/layers/mlp/up/kernel"][2],
            heads=q[0] // head_dim,
            kv_heads=k[0] // head_dim,
            head_dim=head_dim,
        ),
        adapter=transformer(
            adapter_depth,
            adapter_width,
            section(head, "vl_self_attention_cfg", where),
            released.adapter.heads,
            "VL self-attention",
        ),
        dit=transformer(
            2 * pairs,
            action_width,
            section(head, "diffusion_model_cfg", where),
            released.dit.heads,
            "diffusion transformer",
        ),
        image_size=patch * math.isqrt(tokens),
        vocabulary=vocabulary,
        image_token=whole(eagle, "image_token_index", released.image_token, where),
        embodiments=kinds,
        state_dim=state_dim,
        action_dim=action_dim,
        horizon=whole(values, "action_horizon", released.horizon, where),
        future_tokens=shapes["future_tokens"][0],
        positions=shapes["positions"][0],
        hidden=hidden,
        euler_steps=whole(head, "num_inference_timesteps", released.euler_steps, where),
    )


def read_values(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint's directory or beside its file; {} if there is none. The
    release's settings then apply to what shapes do not determine. If config.json has no
    `eagle_cfg`, Eagle's own config.json, in a folder right below, is used for it."""
    path = Path(path)
    root = path if path.is_dir() else path.parent
    file = root / "config.json"
    values = read_json(file) if file.exists() else {}
    below = sorted(root.glob("*/config.json")) if "eagle_cfg" not in values else []
    for told in map(read_json, below):
        if str(told.get("model_type", "")).startswith("eagle_2_5"):
            return values | {"eagle_cfg": told}
    return values


def write(policy: Policy, target: Path) -> None:
    """Writes a policy by `export`, with adapters folded into their kernels, and the files of its
    processor if it has one: its statistics in experiment_cfg/metadata.json under the robot's tag,
    the order of cameras in the modality.json beside it, and tokenizer.json.

    NVIDIA's files have no place for how pictures are fitted; NVIDIA's data configs define that.

    Raises:
      ValueError: `target` holds a model, or NVIDIA's code has no place for the prompts, units or
        cameras of the policy, or for some parameter.
    """
    names = _checked(policy)
    config, params = merge(policy.model.config, policy.params)
    export(params, config, target)
    if policy.processor is None:
        return
    robot = policy.processor.embodiments[policy.embodiment]
    tag, _ = config.robot(policy.embodiment)
    parts = {"state": robot.state, "action": robot.actions}
    statistics = {kind: {"all": least_and_largest(scale)} for kind, scale in parts.items()}
    told = {tag: {"statistics": statistics, "modalities": {}, "embodiment_tag": tag}}
    spans = {kind: {"all": (0, len(scale.offset))} for kind, scale in parts.items()}
    video = dict(zip(names, robot.cameras, strict=True))
    modality = Modality(video=video, annotation=("human.task_description",), **spans)
    write_modality(modality, Path(target) / MODALITY)
    (Path(target) / METADATA).write_text(json.dumps(told, indent=2) + "\n")
    prompts = policy.processor.prompts
    if prompts is not None and isinstance(text := prompts.tokenizer, ByteBpe):
        (Path(target) / "tokenizer.json").write_text(text.json, encoding="utf-8")


def _checked(policy: Policy) -> list[str]:
    """Names of cameras in modality.json, for a policy whose inputs NVIDIA's code prepares alike."""
    if policy.processor is None:
        return []
    _, robot = eagle_robot(policy, "NVIDIA")
    names = [camera.rpartition(".")[2] for camera in robot.cameras]
    if len(set(names)) < len(names):
        raise ValueError(
            "modality.json names a camera by the last part of its name, but cameras of "
            f"'{robot.name}' would then share a name ({', '.join(robot.cameras)}); give --to "
            "chiliad."
        )
    return names


def eagle_robot(policy: Policy, whose: str) -> tuple[Processor, Embodiment]:
    """The processor and robot of a policy that another code's GR00T can prompt and act with.

    Raises:
      ValueError: prompts are not Eagle's, or its units have no place in `whose` files.
    """
    processor = policy.processor
    if processor is None or not isinstance(processor.prompts, EagleTurn):
        raise ValueError(
            f"{whose}'s GR00T reads prompts with Eagle's chat and tokenizer, but this policy does "
            "not; give --to chiliad."
        )
    robot = processor.embodiments[policy.embodiment]
    if robot.adapter or any(d >= 0 for d in robot.relative):
        raise ValueError(
            f"{whose}'s files have no place for the units of '{robot.name}' (adapter "
            f"'{robot.adapter}', relative {list(robot.relative)}); give --to chiliad."
        )
    return processor, robot


def least_and_largest(scale: Normalizer) -> dict[str, list[float]]:
    """Values that a scale maps to −1 and 1, "min" and "max"; equal in a dim that never moved."""
    offset, half = np.asarray(scale.offset), np.asarray(scale.scale)
    half = np.where((half > _MOVES[0]) & (half < _MOVES[1]), half, 0)
    return {"min": (offset - half).tolist(), "max": (offset + half).tolist()}


def export(params: PyTree, config: GrootConfig, path: Path, dtype: str = "float32") -> None:
    """Writes `path/model.safetensors` and `path/config.json` as transformers lays them out.

    Leaves out the parts of their model that are not used (the vision tower's pooling head, the
    language model's output head).

    Args:
      dtype: "float32" or "bfloat16".

    Raises:
      ValueError: the directory holds a model, or their format has no place for some parameter (LoRA
        factors must be merged first).
    """
    path = Path(path)
    file = new_model(path)
    arrays = exported(params, TABLE, "A GR00T-N1.5 checkpoint")
    path.mkdir(parents=True, exist_ok=True)
    write_file(file, arrays, jnp.dtype(dtype), {"format": "pt"})
    (path / "config.json").write_text(json.dumps(_values(config, dtype), indent=2) + "\n")


_VARIANT: tuple[tuple[str, Any], ...] = (
    ("eagle_cfg.select_layer", -1),
    ("eagle_cfg.use_pixel_shuffle", False),
    ("eagle_cfg.mlp_connector_layers", 1),
    ("eagle_cfg.text_config.rope_theta", 1e6),
    ("backbone_cfg.project_to_dim", None),
    ("action_head_cfg.use_vlln", True),
    ("action_head_cfg.add_pos_embed", True),
    ("action_head_cfg.num_timestep_buckets", 1000),
    ("action_head_cfg.noise_s", 0.999),
    ("action_head_cfg.noise_beta_alpha", 1.5),
    ("action_head_cfg.noise_beta_beta", 1.0),
    ("action_head_cfg.diffusion_model_cfg.interleave_self_attention", True),
    ("action_head_cfg.diffusion_model_cfg.norm_type", "ada_norm"),
    ("action_head_cfg.diffusion_model_cfg.positional_embeddings", None),
    ("action_head_cfg.vl_self_attention_cfg.positional_embeddings", None),
)
"""Released values of config.json that change the arithmetic, but not always a shape."""


def check_variant(
    config: Mapping[str, Any], released: Sequence[tuple[str, Any]], where: str, model: str
) -> None:
    """Raises ValueError if a config.json has a value other than the `released` one of its path."""
    for path, expected in released:
        value: Any = config
        for key in path.split("."):
            value = value.get(key, expected) if isinstance(value, Mapping) else expected
        if value != expected:
            raise ValueError(
                f"{where}: config.json has {path} = {value!r}; only {expected!r}, as in the "
                f"released {model}, is supported."
            )


def _values(config: GrootConfig, dtype: str) -> dict[str, Any]:
    """config.json; `eagle_cfg` is what the release keeps in the config of its Eagle model."""

    def heads(stack: TransformerConfig) -> dict[str, Any]:
        return {
            "num_attention_heads": stack.heads,
            "attention_head_dim": stack.head_dim,
            "num_layers": stack.depth,
            "dropout": 0.2,
            "final_dropout": True,
        }

    vision, language = config.vision, config.language
    values: dict[str, Any] = {
        "model_type": "gr00t_n1_5",
        "architectures": ["GR00T_N1_5"],
        "action_dim": config.action_dim,
        "action_horizon": config.horizon,
        "compute_dtype": dtype,
        "model_dtype": "float32",
        "torch_dtype": dtype,
        "hidden_size": language.width,
        "backbone_cfg": {
            "select_layer": language.depth,
            "tune_llm": False,
            "tune_visual": True,
        },
        "action_head_cfg": {
            "action_dim": config.action_dim,
            "action_horizon": config.horizon,
            "backbone_embedding_dim": language.width,
            "diffusion_model_cfg": {
                **heads(config.dit),
                "cross_attention_dim": language.width,
                "output_dim": config.hidden,
            },
            "hidden_size": config.hidden,
            "input_embedding_dim": config.dit.width,
            "max_action_dim": config.action_dim,
            "max_num_embodiments": config.embodiments,
            "max_seq_len": config.positions,
            "max_state_dim": config.state_dim,
            "model_dtype": "float32",
            "num_inference_timesteps": config.euler_steps,
            "num_target_vision_tokens": config.future_tokens,
            "vl_self_attention_cfg": heads(config.adapter),
        },
        "eagle_cfg": {
            "model_type": "eagle_2_5_vl",
            "force_image_size": config.image_size,
            "image_token_index": config.image_token,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": vision.width,
                "num_hidden_layers": vision.depth,
                "num_attention_heads": vision.heads,
                "intermediate_size": vision.hidden,
                "patch_size": vision.patch,
                "image_size": config.image_size,
                "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-6,
            },
            "text_config": {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": config.vocabulary,
                "hidden_size": language.width,
                "num_hidden_layers": language.depth,
                "num_attention_heads": language.heads,
                "num_key_value_heads": language.kv_heads,
                "head_dim": language.head_dim,
                "intermediate_size": language.hidden,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
            },
        },
    }
    for place, value in _VARIANT:
        *sections, name = place.split(".")
        section = values
        for key in sections:
            section = section[key]
        section[name] = value
    return values
