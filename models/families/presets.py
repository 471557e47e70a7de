"""Presets as families bring them: a model, and what a run that trains it sets otherwise than by
default, from which `tools.recipes.presets` makes the run's config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.layers import Lora
from models.model import ModelConfig

Settings = Mapping[str, Mapping[str, Any]]
"""Values by section and field of a run's config: {"optimizer": {"learning_rate": 1e-4}}."""


@dataclass(frozen=True)
class ModelPreset:
    """A model and the settings of a run that trains it; fields not named keep their defaults."""

    model: ModelConfig
    settings: Settings


def merged(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """The settings with these fields of sections changed or added."""
    changed = {name: {**settings.get(name, {}), **fields} for name, fields in sections.items()}
    return {**settings, **changed}


SMALL: Settings = {
    "rows": {"number": 16, "samples": 2},
    "data": {"encoding": "raw"},
    "optimizer": {
        "name": "muon",
        "learning_rate": 6e-3,
        "b2": 0.98,
        "weight_decay": 1e-3,
        "warmup_steps": 100,
        "ema_decay": 0.98,
    },
    "trainer": {"train_steps": 3000, "save_every": 500, "eval_every": 500},
}
"""Settings of models that learn from pixels on two CPU cores in minutes."""

SMALL_ADAMW = merged(SMALL, optimizer={"name": "adamw", "learning_rate": 1.5e-3})

RELEASED: Settings = {
    "rows": {"number": 16, "samples": 4},
    "augment": {
        "crop": 0.95,
        "rotation": 5,
        "brightness": 0.3,
        "contrast": 0.4,
        "saturation": 0.5,
    },
    "optimizer": {"learning_rate": 2.5e-5, "weight_decay": 1e-10, "warmup_steps": 1000},
    "trainer": {"train_steps": 30_000, "eval_every": 1000},
}
"""Settings to fine-tune released models."""

LORA = Lora(16, 16.0)
_ADAPTERS = (("lora_[ab]$", 1.0), (r"^(action|state|time)_", 1.0), (".", 0.0))
"""Adapters and the small layers around the action expert learn; all else is frozen."""


def qlora(settings: Settings, **optimizer: Any) -> Settings:
    """The settings for adapters trained on a frozen base in 4 bits (docs/qlora.md)."""
    return merged(
        settings,
        rows={"number": 4, "samples": 4},
        optimizer={"rate_factors": _ADAPTERS, "frozen_dtype": "bfloat16", **optimizer},
    )
