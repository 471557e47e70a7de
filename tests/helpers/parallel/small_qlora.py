"""The small π0.5 with adapters in every stack, on a frozen base that is kept in few bits."""

from dataclasses import replace
from typing import Any

import jax

from models.layers.layers import Lora
from models.layers.quantized import is_quantized, quantize_kernel
from models.model import init_params
from models.pi.model import Pi, PiConfig
from models.sharding import path_name
from parallel.optimizer import OptimizerConfig
from tests.helpers.parallel import small_pi

BLOCKS = r"^(vision/blocks|(language|expert)/layers/(attention|mlp))/"
ADAPTERS = (("lora_[ab]$", 1.0), (".", 0.0))
OPTIMIZER = replace(small_pi.OPTIMIZER, learning_rate=3e-3, rate_factors=ADAPTERS)


def adapted(kind: Any = None, config: PiConfig = small_pi.CONFIG) -> PiConfig:
    """The config with adapters, its base in f32 (None) or a kind of few bits."""
    lora = Lora(rank=2, alpha=2.0)
    stacks: Any = {
        name: replace(getattr(config, name), attention_lora=lora, mlp_lora=lora)
        for name in ("language", "expert")
    }
    config = replace(config, vision=replace(config.vision, lora=lora), **stacks)
    return config if kind is None else config.computing(quantized=BLOCKS, quantized_kind=kind)


class Kept:
    """A model whose parameters begin as they are kept in training, as `tools.train` has it."""

    def __init__(self, config: PiConfig) -> None:
        self.model = Pi(config)
        self.init = lambda key: init_params(self.model, key)
        self.loss = self.model.loss


def parameters(config: PiConfig) -> Any:
    """`small_pi.parameters`, whose kernels are kept as the config says."""
    whole = small_pi.parameters(config)
    if not config.compute.quantized:
        return whole
    like = jax.eval_shape(Kept(config).init, jax.random.key(0))

    def leaf(path: Any, small: Any, kernel: Any) -> Any:
        if not is_quantized(small):
            return kernel
        return quantize_kernel(path_name(path), kernel, config.compute.quantized_kind)

    return jax.tree_util.tree_map_with_path(leaf, like, whole, is_leaf=is_quantized)


def optimizer(**changes: Any) -> OptimizerConfig:
    return replace(OPTIMIZER, **changes)
