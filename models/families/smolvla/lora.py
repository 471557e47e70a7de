"""SmolVLA with its adapters folded in: the same function, as LeRobot's files hold it."""

from dataclasses import replace
from typing import Any

from models.families.smolvla.model import SmolvlaConfig
from models.layers.adapters import fold, in_f32
from models.layers.gemma import GemmaConfig

Params = dict[str, Any]


def merge(config: SmolvlaConfig, params: Params) -> tuple[SmolvlaConfig, Params]:
    """The same function without adapters: its config, and the parameters with adapters folded into
    their kernels. Quantised kernels are converted to f32 first."""
    params = in_f32(params)
    vision, language, expert = (params[name] for name in ("vision", "language", "expert"))
    stacks = {n: _folded(x, config.expert) for n, x in expert["layers"].items()}
    merged = params | {
        "vision": vision | {"blocks": fold(vision["blocks"], config.vision.lora)},
        "language": language | {"layers": _folded(language["layers"], config.language)},
        "expert": expert | {"layers": stacks},
    }
    plain: Any = {
        name: replace(getattr(config, name), attention_lora=None, mlp_lora=None)
        for name in ("language", "expert")
    }
    tower, compute = replace(config.vision, lora=None), config.compute.unquantized()
    return replace(config, vision=tower, compute=compute, **plain), merged


def _folded(layers: Params, config: GemmaConfig) -> Params:
    parts = {"attention": config.attention_lora, "mlp": config.mlp_lora}
    return layers | {part: fold(layers[part], lora) for part, lora in parts.items()}
