"""Low-rank adapters (arXiv 2106.09685) folded into the kernels they adapt, so that acting has no
extra cost, or scaled in advance, so that other code can read the weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.layers.layers import Lora
from models.layers.quantized import dequantize, is_quantized
from models.sharding import path_name

Params = dict[str, Any]


def fold(blocks: Params, lora: Lora | None) -> Params:
    """The stacked projections among `blocks` ("q", "out", "up", …) without their adapters:
    A·B·alpha/rank is added to every kernel, computed in f32 and stored in the kernel's dtype."""
    if lora is None:
        return blocks
    return {
        name: _fold(name, block, lora) if "lora_a" in block else block
        for name, block in blocks.items()
    }


def at_alpha_of_rank(blocks: Params, lora: Lora | None) -> Params:
    """The projections among `blocks` with every B replaced by B·alpha/rank, in f32: the same
    function for code that takes alpha to be the rank."""
    if lora is None or lora.alpha == lora.rank:
        return blocks
    return {
        name: block | {"lora_b": block["lora_b"].astype(jnp.float32) * (lora.alpha / lora.rank)}
        if "lora_b" in block
        else block
        for name, block in blocks.items()
    }


def in_f32(params: Params) -> Params:
    """The parameters with quantised kernels converted to f32, so that adapters folded into them
    lose nothing."""

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        return dequantize(path_name(path), x) if is_quantized(x) else x

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)


def _fold(name: str, dense: dict[str, Array], lora: Lora) -> dict[str, Array]:
    kernel, a, b = (jnp.asarray(dense[leaf]) for leaf in ("kernel", "lora_a", "lora_b"))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = a @ (b.sum(1, keepdims=True) if name == "out" else b)
    if name in ("q", "k", "v", "qkv"):
        product = jnp.moveaxis(product, 1, 2)
    folded = kernel.astype(jnp.float32) + product * (lora.alpha / lora.rank)
    rest = {leaf: x for leaf, x in dense.items() if not leaf.startswith("lora_")}
    return rest | {"kernel": folded.astype(kernel.dtype)}
