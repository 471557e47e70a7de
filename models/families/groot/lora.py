"""GR00T with its adapters folded in: the same function, as its released format holds it."""

from dataclasses import replace
from typing import Any, TypeVar

from models.families.groot.head import HeadConfig
from models.layers.adapters import fold, in_f32

Params = dict[str, Any]
Config = TypeVar("Config", bound=HeadConfig)


def merge(config: Config, params: Params) -> tuple[Config, Params]:
    """The same function without adapters: its config, and the parameters with adapters folded into
    their kernels. Quantised kernels are converted to f32 first."""
    params, stacks = in_f32(params), ("vision", "language", "adapter", "dit")
    lora: Any = {name: getattr(config, name).lora for name in stacks}
    layers = params["language"]["layers"]
    folded = {part: fold(layers[part], lora["language"]) for part in ("attention", "mlp")}
    merged = params | {
        "vision": _folded(params["vision"], lora["vision"], "blocks"),
        "language": params["language"] | {"layers": layers | folded},
        "adapter": _folded(params["adapter"], lora["adapter"], "blocks"),
        "dit": _folded(params["dit"], lora["dit"], "cross_blocks", "self_blocks"),
    }
    plain: Any = {name: replace(getattr(config, name), lora=None) for name in stacks}
    compute = config.compute.unquantized()
    return replace(config, compute=compute, **plain), merged


def _folded(stack: Params, lora: Any, *names: str) -> Params:
    return stack | {name: fold(stack[name], lora) for name in names}
