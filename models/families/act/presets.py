"""Presets of ACT."""

from models.families.act.model import ActConfig
from models.families.presets import SMALL_ADAMW, ModelPreset, Settings, merged
from models.layers.vision.resnet import ResnetConfig

_SETTINGS: Settings = {
    "rows": {"number": 8, "samples": 1},
    "data": {"state_scaling": "z-score", "action_scaling": "z-score"},
    "optimizer": {
        "learning_rate": 1e-5,
        "b2": 0.999,
        "weight_decay": 1e-4,
        "schedule": "constant",
        "warmup_steps": 0,
        "clip_norm": 10.0,
        "ema_decay": 0.0,
        "rate_factors": (("@backbone", 1.0), (".", 1.0)),
    },
    "trainer": {"train_steps": 100_000, "save_every": 20_000},
}
"""LeRobot's own, in which the backbone has a rate of its own, equal to that of the rest."""

_TINY = ActConfig(
    tower=ResnetConfig(norm="group", width=16),
    width=64,
    heads=4,
    hidden=128,
    encoder_depth=2,
    vae_depth=1,
    latent=8,
    dropout=0.0,
    image_size=64,
    state_dim=8,
    action_dim=8,
    horizon=8,
    n_action_steps=8,
)
"""ACT's architecture with small numbers, and a ResNet that learns from nothing."""

PRESETS = {
    "act": ModelPreset(ActConfig(), _SETTINGS),
    "act-tiny": ModelPreset(
        _TINY, merged(SMALL_ADAMW, data={"state_scaling": "z-score", "action_scaling": "z-score"})
    ),
}
