"""Products of π0.5's layers at their released widths on a Hopper GPU: in every recipe of float8
against bf16, forward and for both gradients, and forward alone with kernels kept in float8.

Scales and rounding are part of what is timed. What is compared alternates in one process; ratios
are taken within a round, and figures are medians.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import PiConfig
from models.layers import fp8
from models.layers.quantized import dot, dot_in_float8, quantize_kernel
from models.terminal import Console, track
from parallel.planning.cluster import chip_of
from tools.bench.attempt import attempt
from tools.bench.models.attention import alternate, rows

_TOKENS, _ACTED, _ROUNDS, _KINDS = 16384, 816, 10, 3
"""Tokens of a batch and of one observation's prefix, rounds, and what is compared in each."""


class LayerProduct(NamedTuple):
    """A product of `tokens` by a kernel of `inner` by `outer`."""

    tokens: int
    inner: int
    outer: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.inner:,} to {self.outer:,}"

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.inner * self.outer


def sizes(tokens: int) -> list[LayerProduct]:
    """Products of π0.5: the language model's gate or up, its down, its queries; the expert's gate
    or up; SigLIP's up."""
    pi = PiConfig()
    language, expert, vision = pi.language, pi.expert, pi.vision
    return [
        LayerProduct(tokens, language.width, language.hidden),
        LayerProduct(tokens, language.hidden, language.width),
        LayerProduct(tokens, language.width, language.heads * language.head_dim),
        LayerProduct(tokens, expert.width, expert.hidden),
        LayerProduct(tokens, vision.width, vision.hidden),
    ]


def run(console: Console, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds and TFLOP/s by product; `ratio` is bf16 over the recipe "block" where a gradient
    passes the language model's widest kernel.

    Raises:
      ValueError: the first device is no GPU, and the sizes are the released ones.
    """
    device = jax.devices()[0]
    if not tiny and device.platform != "gpu":
        raise ValueError(
            f"The benchmark of products needs a GPU; the first device here is "
            f"{device.device_kind} ({device.platform})."
        )
    cases = [
        (*case, _shrunk(size) if tiny else size)
        for case in (("training", _training, 3), ("acting", _acting, 1))
        for size in sizes(_TOKENS if case[0] == "training" else _ACTED)
    ]
    table = [
        {"of": of, "size": str(size), **row}
        for of, calls, products, size in track(cases, "Products", console=console)
        for row in _measured(calls(size), products * size.flops, 1 if tiny else _ROUNDS)
    ]
    bf16, block = (
        next((row["ms"] for row in table[:_KINDS] if row["name"] == name and "ms" in row), math.nan)
        for name in ("bf16", "block")
    )
    return {
        "ratio": bf16 / block,
        "ours": f"{block:.2f} ms in float8, a scale a block",
        "other": f"{bf16:.2f} ms in bf16; gradient of {table[0]['size']}",
        "unit": "ms",
        "rows": table,
    }


def _training(size: LayerProduct) -> dict[str, Callable[[], Any]]:
    """Results and both gradients by name of the recipe."""
    x, kernel, g = _operands(size)

    def step(product: Callable[..., Any]) -> Callable[[], Any]:
        def both(x: Any, kernel: Any, g: Any) -> Any:
            y, back = jax.vjp(product, x, kernel)
            return y, back(g)

        return partial(jax.jit(both), x, kernel, g)

    recipes: tuple[fp8.Recipe, ...] = ("current", "block")
    return {"bf16": step(_plain)} | {
        recipe: step(partial(fp8.dot, recipe=recipe)) for recipe in recipes
    }


def _acting(size: LayerProduct) -> dict[str, Callable[[], Any]]:
    """Results alone: of a kernel in bf16, kept in float8 and read in bf16, and multiplied in
    float8."""
    x, kernel, _ = _operands(size)
    kernel = kernel.astype(x.dtype)
    kept = quantize_kernel("mlp/up/kernel", kernel[None], "float8")
    kept = jax.tree.map(lambda leaf: leaf[0], kept)
    return {
        "bf16": partial(jax.jit(_plain), x, kernel),
        "kept in float8": partial(jax.jit(dot), x, kept),
        "block": partial(jax.jit(dot_in_float8), x, kept),
    }


def _plain(x: Any, kernel: Any) -> Any:
    return x @ kernel.astype(x.dtype)


def _operands(size: LayerProduct) -> tuple[Any, Any, Any]:
    """Activations and a gradient in bf16, and a master kernel."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (size.tokens, size.inner), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (size.inner, size.outer)) / size.inner**0.5
    return x, kernel, jax.random.normal(keys[2], (size.tokens, size.outer), jnp.bfloat16)


def _measured(
    calls: dict[str, Callable[[], Any]], flops: float, rounds: int
) -> list[dict[str, Any]]:
    """Each call's median time, ratio to the first, TFLOP/s and share of the bf16 peak, or error."""
    ran = {name: attempt(partial(_once, call)) for name, call in calls.items()}
    able = {name: calls[name] for name, failure in ran.items() if not failure}
    found = [{"name": name, **failure} for name, failure in ran.items() if failure]
    chip = chip_of(jax.devices()[0].device_kind)
    for row in rows(alternate(able, rounds), "ratio") if able else []:
        rate = flops / row["ms"] * 1e3
        share = {} if chip is None else {"bf16_peak_share": rate / chip.peak("bfloat16")}
        found.append(row | {"TFLOP/s": rate / 1e12} | share)
    return found


def _once(call: Callable[[], Any]) -> dict[str, Any]:
    jax.block_until_ready(call())
    return {}


def _shrunk(size: LayerProduct) -> LayerProduct:
    return LayerProduct(*(max(8, n // 64) for n in size))
