"""GR00T with its adapters folded in: the same function, as its released format holds it."""

from dataclasses import replace
from typing import Any

from models.families.groot.model import GrootConfig
from models.layers.adapters import fold, in_f32

Params = dict[str, Any]


def merge(config: GrootConfig, params: Params) -> tuple[GrootConfig, Params]:
    """The same function without adapters: its config, and the parameters with adapters folded into
    their kernels. Quantised kernels are converted to f32 first."""
    params = in_f32(params)
    layers = params["language"]["layers"]
    folded = {part: fold(layers[part], config.language.lora) for part in ("attention", "mlp")}
    merged = params | {
        "vision": _folded(params["vision"], config.vision.lora, "blocks"),
        "language": params["language"] | {"layers": layers | folded},
        "adapter": _folded(params["adapter"], config.adapter.lora, "blocks"),
        "dit": _folded(params["dit"], config.dit.lora, "cross_blocks", "self_blocks"),
    }
    plain: Any = {
        name: replace(getattr(config, name), lora=None)
        for name in ("vision", "language", "adapter", "dit")
    }
    compute = config.compute.unquantized()
    return replace(config, compute=compute, **plain), merged


def _folded(stack: Params, lora: Any, *names: str) -> Params:
    return stack | {name: fold(stack[name], lora) for name in names}
