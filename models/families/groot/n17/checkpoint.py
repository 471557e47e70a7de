"""Checkpoints of GR00T-N1.7, NVIDIA's release and LeRobot's port: which files they are, and the
sizes that they tell.

Sizes come from the shapes. What no shape determines comes from the config.json of NVIDIA's files
and of their backbone, or else from the release: neither lies beside LeRobot's weights.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from models.checkpoints.rename import our_shapes
from models.checkpoints.sources import CheckpointSource, open_safetensors
from models.families.groot.checkpoint import check_variant
from models.families.groot.n17.model import Groot17Config
from models.families.groot.n17.names import BACKBONE, TABLE
from models.files.foreign_json import read_json, section, whole
from models.layers.dit import TransformerConfig
from models.layers.qwen.qwen3 import QwenConfig
from models.layers.qwen.vision import MERGE, QwenVisionConfig

PREFIX = "_groot_model."
"""Before LeRobot's names of tensors."""
BACKBONE_NAME, BASE_NAME = "nvidia/Cosmos-Reason2-2B", "nvidia/GR00T-N1.7-3B"
"""Names of the backbone and of the released model."""
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
    "positions",
)
VARIANT: tuple[tuple[str, Any], ...] = (
    ("backbone_model_type", "qwen"),
    ("reproject_vision", False),
    ("state_history_length", 1),
    ("use_vlln", True),
    ("add_pos_embed", True),
    ("num_timestep_buckets", 1000),
    ("noise_s", 0.999),
    ("noise_beta_alpha", 1.5),
    ("noise_beta_beta", 1.0),
    ("diffusion_model_cfg.interleave_self_attention", True),
    ("diffusion_model_cfg.norm_type", "ada_norm"),
    ("diffusion_model_cfg.positional_embeddings", None),
    ("vl_self_attention_cfg.positional_embeddings", None),
)
"""Released values of config.json that change the arithmetic, but not always a shape."""
_QWEN: tuple[tuple[str, Any], ...] = (
    ("text_config.hidden_act", "silu"),
    ("text_config.attention_bias", False),
    ("text_config.rms_norm_eps", 1e-6),
    ("text_config.rope_scaling.mrope_interleaved", True),
    ("vision_config.hidden_act", "gelu_pytorch_tanh"),
    ("vision_config.spatial_merge_size", MERGE),
    ("vision_config.temporal_patch_size", 2),
)
"""Values of the backbone's config.json, likewise."""


class Beside(NamedTuple):
    """Contents of the files beside the weights: `values` of the head, {} where only LeRobot's are
    there, and `backbone`, the config.json of the backbone, with the folder that has it."""

    values: dict[str, Any]
    backbone: dict[str, Any]
    folder: Path | None


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint's files."""
    return path if path.is_dir() else path.parent


def open_source(path: Path) -> CheckpointSource:
    """A checkpoint's arrays under NVIDIA's names, whichever code wrote it."""
    return open_safetensors(path).renamed(lambda name: name.removeprefix(PREFIX))


def recognises(path: Path) -> bool:
    """True for a file or folder of GR00T-N1.7's weights."""
    if path.suffix != ".safetensors" and not any(path.glob("*.safetensors")):
        return False
    names = list(open_source(path).arrays)
    return all(any(n.startswith(x) for n in names) for x in ("action_head.", BACKBONE))


def read_told(path: Path, base: Path | None = None, backbone: Path | None = None) -> Beside:
    """The config.json of the head and of the backbone.

    Args:
      base: for LeRobot's files, the folder of NVIDIA's that the policy began from. Without it, a
        folder of the name that config.json gives, there or beside it.
      backbone: the folder of the backbone's config.json. Without it, the backbone_config.json in
        the checkpoint's folder, or a folder of the backbone's name there or beside it.
    """
    root = folder_of(path)
    own = read_json(root / "config.json") if (root / "config.json").is_file() else {}
    values = own if own.get("type") != "groot" else {}
    if base is not None:
        values = read_json(Path(base) / "config.json")
    elif own.get("type") == "groot":
        named = str(own.get("base_model_path") or BASE_NAME)
        files = [each / named / "config.json" for each in (root, root.parent)]
        values = next((read_json(file) for file in files if file.is_file()), {})
    name = str(values.get("model_name", BACKBONE_NAME))
    beside = [each / name for each in (root, root.parent)] if backbone is None else [Path(backbone)]
    folder = next((each for each in beside if (each / "config.json").is_file()), None)
    files = [each / "backbone_config.json" for each in (root, *([Path(base)] if base else []))]
    files = files if folder is None else [folder / "config.json", *files]
    found = next((file for file in files if file.is_file()), None)
    return Beside(values, {} if found is None else read_json(found), folder)


def config(source: CheckpointSource, told: Beside, guess: bool = False) -> Groot17Config:
    """The architecture of a checkpoint.

    Args:
      guess: head counts that nothing says are guessed, where only shapes are to be compared.

    Raises:
      ValueError: config.json describes a variant that is not this architecture, tensors that sizes
        are read from are missing, or the files do not say head counts that the release has not.
    """
    values, released, where = told.values, Groot17Config(), f"{source.where}: config.json"
    check_variant(values, VARIANT, source.where, "GR00T-N1.7")
    check_variant(told.backbone, _QWEN, f"{source.where}, its backbone", "Qwen3-VL")
    text, vision = (section(told.backbone, f"{x}_config", where) for x in ("text", "vision"))
    shapes = our_shapes(TABLE, source.shapes, needed=_SIZED, where=f"{source.where} is incomplete")
    vision_depth, vision_width = shapes["vision/blocks/norm1/scale"]
    vocabulary, width = shapes["embedding"]
    adapter_depth, adapter_width = shapes["adapter/blocks/norm1/scale"]
    pairs, action_width, _ = shapes["dit/cross_blocks/up/kernel"]
    kinds, action_dim, _ = shapes["action_encoder/action/kernel"]
    _, state_dim, hidden = shapes["state_encoder/hidden/kernel"]
    depth, head_dim = shapes["language/layers/attention/q_norm/scale"]
    layer = f"{BACKBONE}language_model.layers.0.self_attn"
    q, k = (source.shapes[f"{layer}.{x}_proj.weight"] for x in "qk")
    mergers = shapes.get("vision/deep_mergers/norm/scale", (0,))[0]

    def heads(name: str, settings: dict[str, Any], key: str, wide: int, usual: int, of: int) -> int:
        """`of`: the width for which the release has its usual count."""
        count = whole(settings, key, usual, f"{where}, {name}")
        if wide % count == 0 and (key in settings or wide == of):
            return count
        if guess:
            return math.gcd(wide, 4)
        raise ValueError(
            f"{source.where}: nothing says how many attention heads the {name} of width {wide} "
            "has; give load_policy(backbone=…), the folder of the backbone's config.json, and for "
            "LeRobot's files base=…, the folder of NVIDIA's that the policy began from."
        )

    def transformer(key: str, deep: int, wide: int, usual: TransformerConfig) -> TransformerConfig:
        count = heads(
            key, section(values, key, where), "num_attention_heads", wide, usual.heads, usual.width
        )
        return TransformerConfig(depth=deep, heads=count, head_dim=wide // count)

    usual = released.vision
    tower = QwenVisionConfig(
        width=vision_width,
        depth=vision_depth,
        hidden=shapes["vision/blocks/up/bias"][1],
        heads=heads("tower", vision, "num_heads", vision_width, usual.heads, usual.width),
        patch=math.isqrt(shapes["vision/embed/kernel"][0] // 6),
        table=math.isqrt(shapes["vision/position"][0]),
        deep=tuple(vision.get("deepstack_visual_indexes", usual.deep if mergers == 3 else ()))
        if not guess or vision
        else tuple(range(mergers)),
    )
    rope = section(text, "rope_parameters", where) or section(text, "rope_scaling", where)
    sections = tuple(rope.get("mrope_section", released.language.sections))
    if guess and sum(sections) != head_dim // 2:
        sections = ()
    language = QwenConfig(
        width=width,
        depth=depth,
        hidden=shapes["language/layers/mlp/up/kernel"][2],
        heads=q[0] // head_dim,
        kv_heads=k[0] // head_dim,
        head_dim=head_dim,
        base=float(rope.get("rope_theta", text.get("rope_theta", released.language.base))),
        sections=sections,
        normed=False,
    )
    if (layers := whole(values, "select_layer", depth, where)) != depth:
        raise ValueError(
            f"{source.where} has {depth} layers of the language model, but config.json has "
            f"select_layer = {layers}; only checkpoints that are cut to it are supported."
        )
    alternate = values.get("use_alternate_vl_dit", True)
    every = whole(values, "attend_text_every_n_blocks", released.text_every, where)
    return Groot17Config(
        vision=tower,
        language=language,
        adapter=transformer(
            "vl_self_attention_cfg", adapter_depth, adapter_width, released.adapter
        ),
        dit=transformer("diffusion_model_cfg", 2 * pairs, action_width, released.dit),
        image_size=max(1, 256 // tower.edge) * tower.edge,
        vocabulary=vocabulary,
        embodiments=kinds,
        state_dim=state_dim,
        action_dim=action_dim,
        horizon=whole(values, "action_horizon", released.horizon, where),
        positions=shapes["positions"][0],
        hidden=hidden,
        text_every=every if alternate else 0,
        euler_steps=whole(values, "num_inference_timesteps", released.euler_steps, where),
    )
