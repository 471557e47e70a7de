"""Low-rank adapters (arXiv 2106.09685) folded into the kernels they adapt, so that acting costs
nothing more and other codes can read the weights.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from models.layers.layers import Lora
from models.pi.model import PiConfig

Params = dict[str, Any]


def merge(config: PiConfig, params: Params) -> tuple[PiConfig, Params]:
    """The same function without adapters: its config, and parameters in which every kernel has
    gained A·B·alpha/rank (computed in f32, kept in the kernel's dtype)."""
    merged = dict(params)
    for name in ("language", "expert"):
        stack = getattr(config, name)
        layers = dict(params[name]["layers"])
        for part, lora in (("attention", stack.attention_lora), ("mlp", stack.mlp_lora)):
            if lora is not None:
                layers[part] = {k: _fold(k, v, lora) for k, v in layers[part].items()}
        merged[name] = params[name] | {"layers": layers}
    plain = {
        name: replace(getattr(config, name), attention_lora=None, mlp_lora=None)
        for name in ("language", "expert")
    }
    return replace(config, **plain), merged


def _fold(name: str, dense: dict[str, Array], lora: Lora) -> dict[str, Array]:
    kernel, a, b = (jnp.asarray(dense[leaf]) for leaf in ("kernel", "lora_a", "lora_b"))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = a @ (b.sum(1, keepdims=True) if name == "out" else b)
    if name in ("q", "k", "v"):
        product = jnp.moveaxis(product, 1, 2)
    folded = kernel.astype(jnp.float32) + product * (lora.alpha / lora.rank)
    rest = {leaf: x for leaf, x in dense.items() if not leaf.startswith("lora_")}
    return rest | {"kernel": folded.astype(kernel.dtype)}
