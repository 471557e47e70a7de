"""The small π0.5 with adapters in every stack, on a frozen base that is kept in few bits."""

import functools
from dataclasses import replace
from typing import Any

import jax

from models.families.pi.model import PiConfig
from models.layers.layers import Lora
from models.layers.quantized import quantize
from tests.helpers.parallel import small_pi

BLOCKS = r"^(vision/blocks|(language|expert)/layers/(attention|mlp))/"
ADAPTERS = (("lora_[ab]$", 1.0), (".", 0.0))
OPTIMIZER = replace(
    small_pi.OPTIMIZER, learning_rate=3e-3, rate_factors=ADAPTERS, frozen_dtype="bfloat16"
)


def adapted(kind: Any = None, config: PiConfig = small_pi.CONFIG) -> PiConfig:
    """The config with adapters, its base in f32 (None) or a kind of few bits."""
    lora = Lora(rank=2, alpha=2.0)
    stacks: Any = {
        name: replace(getattr(config, name), attention_lora=lora, mlp_lora=lora)
        for name in ("language", "expert")
    }
    config = replace(config, vision=replace(config.vision, lora=lora), **stacks)
    return config if kind is None else config.computing(quantized=BLOCKS, quantized_kind=kind)


@functools.cache
def parameters(config: PiConfig) -> Any:
    """`small_pi.parameters`, whose kernels are kept as the config says (numpy)."""
    whole, kept = small_pi.parameters(config), config.compute
    if not kept.quantized:
        return whole
    small = jax.jit(lambda p: quantize(p, kept.quantized, kept.quantized_kind))(whole)
    return jax.device_get(small)
