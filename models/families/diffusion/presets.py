"""Presets of Diffusion Policy."""

from models.families.diffusion.model import DiffusionConfig
from models.families.diffusion.noise import NoiseConfig
from models.families.diffusion.unet import UnetConfig
from models.families.presets import SMALL_ADAMW, ModelPreset, merged
from models.layers.vision.resnet import ResnetConfig

_TINY = DiffusionConfig(
    resnet=ResnetConfig(norm="group", width=16),
    unet=UnetConfig(widths=(64, 128), time_width=64),
    noise=NoiseConfig(sampler="ddim"),
    separate=False,
    keypoints=16,
    horizon=16,
    action_steps=8,
    chunks=4,
    euler_steps=10,
)
"""Diffusion Policy with small numbers: one encoder with group norm, several noised chunks for each
observation, and a sampler of few steps."""

_SCALINGS = {"state_scaling": "min-max", "action_scaling": "min-max"}

PRESETS = {
    "diffusion": ModelPreset(
        DiffusionConfig(),
        {
            "rows": {"number": 8, "samples": 1},
            "data": _SCALINGS,
            "optimizer": {
                "name": "adamw",
                "learning_rate": 1e-4,
                "b1": 0.95,
                "b2": 0.999,
                "weight_decay": 1e-6,
                "warmup_steps": 500,
                "final_fraction": 0.0,
                "clip_norm": 10.0,
                "ema_decay": 0.0,
            },
            "trainer": {"train_steps": 100_000, "save_every": 20_000},
        },
    ),
    "diffusion-tiny": ModelPreset(_TINY, merged(SMALL_ADAMW, data=_SCALINGS)),
}
"""LeRobot 0.6's defaults, but for Adam, whose weight decay is a part of the gradient there and
AdamW's here; and a small one."""
