"""π without its adapters, the same function: what codes can read that know none, and what acts
fastest.
"""

from dataclasses import replace
from typing import Any

from models.layers.adapters import fold, in_f32
from models.pi.model import PiConfig

Params = dict[str, Any]


def merge(config: PiConfig, params: Params) -> tuple[PiConfig, Params]:
    """The same function without adapters: its config, and parameters with the adapters folded into
    their kernels. Kernels in few bits become f32 first."""
    params = in_f32(params)
    merged = dict(params)
    for name in ("language", "expert"):
        stack, layers = getattr(config, name), params[name]["layers"]
        folded = {
            part: fold(layers[part], lora)
            for part, lora in (("attention", stack.attention_lora), ("mlp", stack.mlp_lora))
        }
        merged[name] = params[name] | {"layers": layers | folded}
    blocks = fold(params["vision"]["blocks"], config.vision.lora)
    merged["vision"] = params["vision"] | {"blocks": blocks}
    plain: Any = {
        name: replace(getattr(config, name), attention_lora=None, mlp_lora=None)
        for name in ("language", "expert")
    }
    vision = replace(config.vision, lora=None)
    compute = config.compute.unquantized()
    return replace(config, vision=vision, compute=compute, **plain), merged
