"""Adapters of π and π0-FAST as openpi has them."""

from typing import Any, TypeVar

from models.families.pi.fast.model import Pi0FastConfig
from models.families.pi.model import PiConfig
from models.layers.adapters import at_alpha_of_rank, merge

Params = dict[str, Any]
Config = TypeVar("Config", PiConfig, Pi0FastConfig)


def for_openpi(config: Config, params: Params) -> Params:
    """The parameters with which openpi computes the same function. Its variants scale adapters by
    1, so ours are scaled in advance. All adapters are folded in if the vision tower has some or if
    kernels are quantised, because openpi has no place for either."""
    if config.compute.quantized or config.vision.lora is not None:
        return merge(config, params)[1]
    changed = {}
    for name in {"language", "expert"} & params.keys():
        stack, layers = getattr(config, name), params[name]["layers"]
        parts = {
            part: at_alpha_of_rank(layers[part], lora)
            for part, lora in (("attention", stack.attention_lora), ("mlp", stack.mlp_lora))
        }
        changed[name] = params[name] | {"layers": layers | parts}
    return params | changed
