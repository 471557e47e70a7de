"""The config of a π0 or π0.5 model from the shapes of its parameters."""

import math
from collections.abc import Mapping
from typing import Any

from models.checkpoints.rename import Shape, Table, our_shapes
from models.checkpoints.sources import CheckpointSource
from models.families.pi.model import PiConfig
from models.layers.gemma import GemmaConfig
from models.layers.layers import Lora
from models.layers.siglip import SiglipConfig

_PREFIX = (
    "vision/embed/kernel",
    "vision/position",
    "vision/blocks/q/kernel",
    "vision/blocks/up/kernel",
    "embedding",
)
_STACK = ("attention/q/kernel", "attention/k/kernel", "mlp/gate/kernel")


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
    reads_state = "state_in/kernel" in table.by_path
    also = ("action_in/kernel", *(["state_in/kernel"] if reads_state else []))
    shapes, sizes = stack_sizes(source, table, "π0 or π0.5", known, ("language", "expert"), also)
    action_dim = shapes["action_in/kernel"][0]
    return PiConfig(
        **sizes,
        state_dim=shapes["state_in/kernel"][0] if reads_state else action_dim,
        action_dim=action_dim,
        horizon=horizon,
        state_input="suffix" if reads_state else "text",
        time="input" if reads_state else "modulation",
    )


def stack_sizes(
    source: CheckpointSource,
    table: Table,
    what: str,
    known: Mapping[str, int] | None,
    stacks: tuple[str, ...],
    also: tuple[str, ...] = (),
) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Shapes of a checkpoint's parameters, and those fields of a config that give the sizes of its
    vision tower, embedding and `stacks`; raises as `pi_config`, also if parameters `also` are
    missing."""
    needed = (*_PREFIX, *also, *(f"{name}/layers/{path}" for name in stacks for path in _STACK))
    where = f"{source.where} is not a complete {what} checkpoint"
    shapes = our_shapes(table, source.shapes, known, needed, where)
    blocks, (places, width) = shapes["vision/blocks/q/kernel"], shapes["vision/position"]
    patch = math.isqrt(shapes["vision/embed/kernel"][0] // 3)
    hidden = shapes["vision/blocks/up/kernel"][2]
    return shapes, {
        "vision": SiglipConfig(width, blocks[0], hidden, heads=blocks[2], patch=patch),
        "image_size": math.isqrt(places) * patch,
        "vocabulary": shapes["embedding"][0],
        **{name: _gemma_config(shapes, name) for name in stacks},
    }


def _gemma_config(shapes: Mapping[str, Shape], name: str) -> GemmaConfig:
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
