"""π and π0-FAST with adapters folded in, or with adapters as openpi has them. Without adapters, the
same function acts fastest, and code that has no adapters can read it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from models.families.pi.fast.model import Pi0FastConfig
from models.families.pi.model import PiConfig
from models.layers.adapters import at_alpha_of_rank, fold, in_f32
from models.layers.layers import Lora

Params = dict[str, Any]
Config = TypeVar("Config", PiConfig, Pi0FastConfig)


def merge(config: Config, params: Params) -> tuple[Config, Params]:
    """The same function without adapters: its config, and the parameters with adapters folded into
    their kernels. Quantised kernels are converted to f32 first."""
    params = _decoders(config, in_f32(params), fold)
    blocks = fold(params["vision"]["blocks"], config.vision.lora)
    plain: Any = {
        name: replace(getattr(config, name), attention_lora=None, mlp_lora=None)
        for name in _names(params)
    }
    vision, compute = replace(config.vision, lora=None), config.compute.unquantized()
    merged = params | {"vision": params["vision"] | {"blocks": blocks}}
    return replace(config, vision=vision, compute=compute, **plain), merged


def for_openpi(config: Config, params: Params) -> Params:
    """The parameters with which openpi computes the same function. Its variants scale adapters by
    1, so ours are scaled in advance. All adapters are folded in if the vision tower has some or if
    kernels are quantised, because openpi has no place for either."""
    if config.compute.quantized or config.vision.lora is not None:
        return merge(config, params)[1]
    return _decoders(config, params, at_alpha_of_rank)


def _decoders(
    config: Config, params: Params, change: Callable[[Params, Lora | None], Params]
) -> Params:
    """The parameters with every decoder's projections, and their adapters, changed by `change`."""
    changed = {}
    for name in _names(params):
        stack, layers = getattr(config, name), params[name]["layers"]
        parts = {
            part: change(layers[part], lora)
            for part, lora in (("attention", stack.attention_lora), ("mlp", stack.mlp_lora))
        }
        changed[name] = params[name] | {"layers": layers | parts}
    return params | changed


def _names(params: Params) -> list[str]:
    return [name for name in ("language", "expert") if name in params]
