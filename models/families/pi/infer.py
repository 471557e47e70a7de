"""The config of a π0 or π0.5 model from the shapes of its parameters."""

import math
from collections.abc import Mapping

from models.checkpoints.rename import Shape, Table, our_shapes
from models.checkpoints.sources import CheckpointSource
from models.families.pi.model import PiConfig
from models.layers.gemma import GemmaConfig
from models.layers.layers import Lora
from models.layers.siglip import SiglipConfig

_NEEDED = (
    "vision/embed/kernel",
    "vision/position",
    "vision/blocks/q/kernel",
    "vision/blocks/up/kernel",
    "embedding",
    "action_in/kernel",
    *(
        f"{stack}/layers/{path}/kernel"
        for stack in ("language", "expert")
        for path in ("attention/q", "attention/k", "mlp/gate")
    ),
)


def pi_config(
    source: CheckpointSource, table: Table, horizon: int, known: Mapping[str, int] | None = None
) -> PiConfig:
    """Infers a config from the checkpoint's shapes by the rules of `table`.

    Anything that shapes do not determine is as in openpi: state as text in π0.5 and as the expert's
    token in π0, LoRA scaled by 1 (alpha equal to the rank, as in openpi's variants).

    Args:
      horizon: steps of a chunk, which no shape determines.
      known: sizes of axes that the checkpoint merges.

    Raises:
      ValueError: parameters that determine sizes are missing (all of them are listed), or the sizes
        contradict each other.
    """
    shapes = our_shapes(table, source.shapes, known)
    reads_state = "state_in/kernel" in table.by_path
    needed = (*_NEEDED, *(["state_in/kernel"] if reads_state else []))
    missing = [f"{path} ({table.by_path[path].theirs})" for path in needed if path not in shapes]
    if missing:
        raise ValueError(
            f"{source.where} is not a complete π0 or π0.5 checkpoint; these arrays, which "
            f"determine the model's sizes, are missing: {', '.join(missing)}."
        )
    vision = siglip_config(shapes)
    action_dim = shapes["action_in/kernel"][0]
    return PiConfig(
        vision=vision,
        language=gemma_config(shapes, "language"),
        expert=gemma_config(shapes, "expert"),
        image_size=math.isqrt(shapes["vision/position"][0]) * vision.patch,
        vocabulary=shapes["embedding"][0],
        state_dim=shapes["state_in/kernel"][0] if reads_state else action_dim,
        action_dim=action_dim,
        horizon=horizon,
        state_input="suffix" if reads_state else "text",
        time="input" if reads_state else "modulation",
    )


def siglip_config(shapes: Mapping[str, Shape]) -> SiglipConfig:
    """Sizes of the vision tower, from the shapes of its parameters."""
    blocks = shapes["vision/blocks/q/kernel"]
    return SiglipConfig(
        width=shapes["vision/position"][1],
        depth=blocks[0],
        hidden=shapes["vision/blocks/up/kernel"][2],
        heads=blocks[2],
        patch=math.isqrt(shapes["vision/embed/kernel"][0] // 3),
    )


def gemma_config(shapes: Mapping[str, Shape], name: str) -> GemmaConfig:
    """Sizes of the stack `name` and of its adapters, from the shapes of its parameters."""
    depth, width, heads, head_dim = shapes[f"{name}/layers/attention/q/kernel"]
    return GemmaConfig(
        width=width,
        depth=depth,
        hidden=shapes[f"{name}/layers/mlp/gate/kernel"][2],
        heads=heads,
        kv_heads=shapes[f"{name}/layers/attention/k/kernel"][2],
        head_dim=head_dim,
        attention_lora=_lora(shapes, f"{name}/layers/attention/q/lora_a"),
        mlp_lora=_lora(shapes, f"{name}/layers/mlp/gate/lora_a"),
    )


def _lora(shapes: Mapping[str, Shape], path: str) -> Lora | None:
    return Lora(shapes[path][-1], float(shapes[path][-1])) if path in shapes else None
