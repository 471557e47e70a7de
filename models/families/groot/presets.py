"""Presets of GR00T-N1.5 and N1.7."""

from dataclasses import replace

from models.families.groot.model import GrootConfig
from models.families.groot.n17.model import Groot17Config
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
from models.layers.qwen.qwen3 import QwenConfig
from models.layers.qwen.vision import QwenVisionConfig
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

_FULL = Groot17Config()
_GROOT17 = replace(
    _FULL,
    vision=replace(_FULL.vision, remat="full"),
    language=replace(_FULL.language, remat="full"),
    adapter=replace(_FULL.adapter, remat="full", dropout=0.2),
    dit=replace(_FULL.dit, remat="full", dropout=0.2),
    state_dropout=0.2,
)
"""GR00T-N1.7 at its released sizes, with NVIDIA's shares of dropout."""

_GROOT17_QLORA = replace(
    _GROOT17,
    vision=replace(_GROOT17.vision, lora=LORA),
    language=replace(_GROOT17.language, lora=LORA),
    adapter=replace(_GROOT17.adapter, lora=LORA),
    dit=replace(_GROOT17.dit, lora=LORA),
    compute=Compute(quantized=Groot17Config.quantizable, quantized_kind="nf4"),
)

_GROOT17_TINY = Groot17Config(
    vision=QwenVisionConfig(64, 2, 128, heads=4, patch=8, table=6, deep=(0,)),
    language=QwenConfig(64, 2, 128, 2, 1, 32, base=1e4, sections=(6, 5, 5), normed=False),
    adapter=_GROOT_TINY.adapter,
    dit=_GROOT_TINY.dit,
    image_size=48,
    vocabulary=512,
    embodiments=8,
    state_dim=8,
    action_dim=8,
    horizon=8,
    positions=16,
    hidden=64,
    chunks=3,
    compute=Compute(dtype="float32"),
)
"""N1.7's architecture with small numbers."""

_SETTINGS = merged(
    RELEASED,
    data={"state_scaling": "min-max", "action_scaling": "min-max"},
    optimizer={"learning_rate": 1e-4, "weight_decay": 1e-5},
)

_FROZEN = (("@language", 0.0), ("@vision", 0.0), (".", 1.0))
"""As NVIDIA fine-tunes N1.7: the backbone stays as it is."""

PRESETS = {
    "groot": ModelPreset(_GROOT, _SETTINGS),
    "groot-qlora": ModelPreset(_GROOT_QLORA, qlora(_SETTINGS)),
    "groot-tiny": ModelPreset(_GROOT_TINY, SMALL_ADAMW),
    "groot17": ModelPreset(_GROOT17, merged(_SETTINGS, optimizer={"rate_factors": _FROZEN})),
    "groot17-qlora": ModelPreset(_GROOT17_QLORA, qlora(_SETTINGS)),
    "groot17-tiny": ModelPreset(_GROOT17_TINY, SMALL_ADAMW),
}
