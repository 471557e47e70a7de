"""Presets of GR00T-N1.5."""

from dataclasses import replace

from models.families.groot.model import GrootConfig
from models.families.presets import (
    LORA,
    RELEASED,
    SMALL_ADAMW,
    ModelPreset,
    merged,
    qlora,
)
from models.layers.dit import TransformerConfig
from models.layers.layers import Compute
from models.layers.qwen3 import QwenConfig
from models.layers.siglip import SiglipConfig

_GROOT = GrootConfig(
    vision=SiglipConfig(remat="full"),
    language=QwenConfig(remat="full"),
    adapter=replace(GrootConfig().adapter, remat="full"),
    dit=replace(GrootConfig().dit, remat="full"),
)
"""GR00T-N1.5 at its released sizes. Samples are prepared as for our other models, not as NVIDIA's
processor does (docs/presets.md)."""

_GROOT_QLORA = replace(
    _GROOT,
    vision=replace(_GROOT.vision, lora=LORA),
    language=replace(_GROOT.language, lora=LORA),
    adapter=replace(_GROOT.adapter, lora=LORA),
    dit=replace(_GROOT.dit, lora=LORA),
    compute=Compute(quantized=GrootConfig.quantizable, quantized_kind="nf4"),
)
"""Adapters in every stack; the tables of state encoders and action decoders stay f32, and learn."""

_GROOT_TINY = GrootConfig(
    vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
    language=QwenConfig(width=64, depth=2, hidden=128, heads=2, kv_heads=1, head_dim=32),
    adapter=TransformerConfig(depth=1, heads=2, head_dim=32),
    dit=TransformerConfig(depth=4, heads=2, head_dim=32),
    image_size=48,
    vocabulary=512,
    image_token=511,
    embodiments=8,
    state_dim=8,
    action_dim=8,
    horizon=8,
    future_tokens=4,
    positions=16,
    hidden=64,
    chunks=3,
    film=True,
    compute=Compute(dtype="float32"),
)
"""GR00T's architecture with small numbers."""

_SETTINGS = merged(
    RELEASED,
    data={"state_scaling": "min-max", "action_scaling": "min-max"},
    optimizer={"learning_rate": 1e-4, "weight_decay": 1e-5},
)

PRESETS = {
    "groot": ModelPreset(_GROOT, _SETTINGS),
    "groot-qlora": ModelPreset(_GROOT_QLORA, qlora(_SETTINGS)),
    "groot-tiny": ModelPreset(_GROOT_TINY, SMALL_ADAMW),
}
