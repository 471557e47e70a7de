"""Presets of SmolVLA."""

from dataclasses import replace

from models.families.presets import LORA, RELEASED, SMALL, ModelPreset, merged, qlora
from models.families.smolvla.model import SmolvlaConfig
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig

_BASE = SmolvlaConfig()
_SMOLVLA = replace(
    _BASE,
    vision=replace(_BASE.vision, remat="full"),
    language=replace(_BASE.language, remat="full"),
    expert=replace(_BASE.expert, remat="full"),
)
"""lerobot/smolvla_base: `--init` takes its folder."""

_QLORA = replace(
    _SMOLVLA,
    vision=replace(_SMOLVLA.vision, lora=LORA),
    language=replace(_SMOLVLA.language, attention_lora=LORA, mlp_lora=LORA),
    expert=replace(_SMOLVLA.expert, attention_lora=LORA, mlp_lora=LORA),
    compute=Compute(quantized=SmolvlaConfig.quantizable, quantized_kind="nf4"),
)
"""Adapters in every stack."""

_TINY = SmolvlaConfig(
    vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
    language=GemmaConfig(width=64, depth=2, hidden=128, heads=2, kv_heads=1, head_dim=32),
    expert=GemmaConfig(width=48, depth=2, hidden=256, heads=2, kv_heads=1, head_dim=32),
    image_size=48,
    shuffle=1,
    vocabulary=512,
    state_dim=8,
    action_dim=8,
    horizon=8,
    chunks=3,
    compute=Compute(dtype="float32"),
)
"""SmolVLA's architecture with small numbers, and a token for each patch: of 48 pixels it could not
tell colours from nine tokens."""

_EXPERT = ((r"^(expert|action|time|state)", 1.0), (".", 0.0))
_ALL = ((r"^vision/", 0.0), (".", 1.0))
_SETTINGS = merged(
    RELEASED,
    data={"state_scaling": "z-score", "action_scaling": "z-score"},
    optimizer={
        "learning_rate": 1e-4,
        "final_fraction": 0.025,
        "clip_norm": 10.0,
        "rate_factors": _EXPERT,
    },
)
"""LeRobot's: the expert and the projections learn, all else is frozen (`train_expert_only`)."""

PRESETS = {
    "smolvla": ModelPreset(_SMOLVLA, _SETTINGS),
    "smolvla-all": ModelPreset(_SMOLVLA, merged(_SETTINGS, optimizer={"rate_factors": _ALL})),
    "smolvla-qlora": ModelPreset(_QLORA, qlora(_SETTINGS)),
    "smolvla-tiny": ModelPreset(_TINY, SMALL),
}
"""`smolvla-all` also trains the language model, as with `train_expert_only` false; LeRobot leaves
out its last layer."""
