"""Low-rank adapters (arXiv 2106.09685) folded into the kernels they adapt, so that acting has no
extra cost, or scaled in advance, so that other code can read the weights.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.layers.layers import Lora
from models.layers.quantized import dequantize, is_quantized
from models.sharding import path_name

Params = dict[str, Any]
Config = TypeVar("Config")
_ADAPTERS = ("lora", "attention_lora", "mlp_lora")
"""Fields of a stack's config: adapters of all of it, or of parts that are named before `_lora`."""


def merge(config: Config, params: Params) -> tuple[Config, Params]:
    """The same function without adapters: its config, and the parameters with the adapters of each
    stack folded into its kernels. Quantised kernels are converted to f32 first."""
    model: Any = config
    params, plain = in_f32(params), {}
    for name in {field.name for field in fields(model)} & params.keys():
        stack = getattr(model, name)
        if adapters := {each: getattr(stack, each) for each in _ADAPTERS if hasattr(stack, each)}:
            params = params | {name: _without(params[name], adapters, adapters.get("lora"))}
            plain[name] = replace(stack, **dict.fromkeys(adapters))
    return replace(model, compute=model.compute.unquantized(), **plain), params


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


def _without(blocks: Params, adapters: Mapping[str, Lora | None], within: Lora | None) -> Params:
    """The blocks with the adapters of all projections below them folded in; `within`: adapters of
    the part that they are in."""
    found = {}
    for name, block in blocks.items():
        if not isinstance(block, dict):
            found[name] = block
        elif "lora_a" in block and within is not None:
            found[name] = _fold(name, block, within)
        else:
            found[name] = _without(block, adapters, adapters.get(f"{name}_lora", within))
    return found


def _fold(name: str, dense: dict[str, Array], lora: Lora) -> dict[str, Array]:
    """A stacked projection ("q", "out", "up", …) without its adapter: A·B·alpha/rank is added to
    its kernel, computed in f32 and stored in the kernel's dtype."""
    kernel, a, b = (jnp.asarray(dense[leaf]) for leaf in ("kernel", "lora_a", "lora_b"))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = a @ (b.sum(1, keepdims=True) if name == "out" else b)
    if name in ("q", "k", "v", "qkv"):
        product = jnp.moveaxis(product, 1, 2)
    folded = kernel.astype(jnp.float32) + product * (lora.alpha / lora.rank)
    rest = {leaf: x for leaf, x in dense.items() if not leaf.startswith("lora_")}
    return rest | {"kernel": folded.astype(kernel.dtype)}
