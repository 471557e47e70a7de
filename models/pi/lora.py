"""π and π0-FAST without their adapters, the same function: what codes can read that know none, and
what acts fastest; and with adapters as openpi has them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from models.layers.adapters import at_alpha_of_rank, fold, in_f32
from models.layers.layers import Lora
from models.pi.fast.model import Pi0FastConfig
from models.pi.model import PiConfig

Params = dict[str, Any]
Config = TypeVar("Config", PiConfig, Pi0FastConfig)


def merge(config: Config, params: Params) -> tuple[Config, Params]:
    """The same function without adapters: its config, and parameters with the adapters folded into
    their kernels. Kernels in few bits become f32 first."""
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
    """The parameters by which openpi computes the same. Its variants scale adapters by 1, so that
    ours are scaled in advance; where it has no place for them, in the vision tower, or for the
    kernels in few bits beneath them, all are folded in."""
    if config.compute.quantized or config.vision.lora is not None:
        return merge(config, params)[1]
    return _decoders(config, params, at_alpha_of_rank)


def _decoders(
    config: Config, params: Params, change: Callable[[Params, Lora | None], Params]
) -> Params:
    """The parameters with the projections of every decoder, by their adapters, changed."""
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
