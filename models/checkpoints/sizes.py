"""The sizes of a π0 or π0.5 model from the shapes of its parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from models.checkpoints.rename import Shape, Table, our_shapes
from models.checkpoints.sources import Source
from models.gemma import GemmaConfig
from models.siglip import SiglipConfig


class LoraRanks(NamedTuple):
    """Ranks of a stack's LoRA factors, None without; their alphas no shape tells."""

    attention: int | None
    mlp: int | None


@dataclass(frozen=True)
class PiSizes:
    """What shapes tell of a `PiConfig`. `state_dim` is None where no state projection is (π0.5)."""

    vision: SiglipConfig
    language: GemmaConfig
    expert: GemmaConfig
    image_size: int
    vocabulary: int
    action_dim: int
    state_dim: int | None
    time: Literal["modulation", "input"]
    language_lora: LoraRanks
    expert_lora: LoraRanks


def pi_sizes(source: Source, table: Table, known: Mapping[str, int] | None = None) -> PiSizes:
    """Reads the sizes off the checkpoint's shapes by the rules of `table`.

    Args:
      known: sizes of axes that the checkpoint merges.

    Raises:
      ValueError: parameters are missing without which they cannot be told; all such are listed.
    """
    shapes = our_shapes(table, source.shapes, known)
    needed = [
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
    ]
    missing = [f"{path} ({table.by_path[path].theirs})" for path in needed if path not in shapes]
    if missing:
        raise ValueError(
            f"{source.where} is not a whole π0 or π0.5 checkpoint; without these its sizes cannot "
            f"be told: {', '.join(missing)}."
        )
    blocks, (tokens, width) = shapes["vision/blocks/q/kernel"], shapes["vision/position"]
    patch = math.isqrt(shapes["vision/embed/kernel"][0] // 3)
    state = shapes.get("state_in/kernel")
    return PiSizes(
        vision=SiglipConfig(
            width=width,
            depth=blocks[0],
            hidden=shapes["vision/blocks/up/kernel"][2],
            heads=blocks[2],
            patch=patch,
        ),
        language=_stack(shapes, "language"),
        expert=_stack(shapes, "expert"),
        image_size=math.isqrt(tokens) * patch,
        vocabulary=shapes["embedding"][0],
        action_dim=shapes["action_in/kernel"][0],
        state_dim=None if state is None else state[0],
        time="input" if state is not None else "modulation",
        language_lora=_ranks(shapes, "language"),
        expert_lora=_ranks(shapes, "expert"),
    )


def _stack(shapes: Mapping[str, Shape], name: str) -> GemmaConfig:
    depth, width, heads, head_dim = shapes[f"{name}/layers/attention/q/kernel"]
    return GemmaConfig(
        width=width,
        depth=depth,
        hidden=shapes[f"{name}/layers/mlp/gate/kernel"][2],
        heads=heads,
        kv_heads=shapes[f"{name}/layers/attention/k/kernel"][2],
        head_dim=head_dim,
    )


def _ranks(shapes: Mapping[str, Shape], name: str) -> LoraRanks:
    factors = (shapes.get(f"{name}/layers/{path}/lora_a") for path in ("attention/q", "mlp/gate"))
    return LoraRanks(*(None if shape is None else shape[-1] for shape in factors))
