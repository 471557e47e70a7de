"""Products of π0.5's layers at their released widths on a Hopper GPU: every recipe of float8
compared with bf16, forward and for both gradients, and forward alone with kernels kept in float8.

Scales and rounding are timed too. Forward alone passes several layers, each with a kernel of its
own, so that no kernel is in the cache from the last call. Compared calls alternate in one process;
ratios are taken within a round, and figures are medians.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import PiConfig
from models.files.terminal import Console, track
from models.layers.float8 import fp8
from models.layers.quantized import dot, dot_in_float8, quantize_kernel
from parallel.planning.cluster import chip_of
from tools.bench.attempt import attempt, tell
from tools.bench.models.attention import alternate, rows

_TOKENS, _ACTED, _ROUNDS, _KINDS = 16384, 816, 10, 3
"""Tokens of a batch and of one observation's prefix, rounds, and what is compared in each."""
_BEYOND_CACHE, _MOST_LAYERS = 2**27, 32
"""Least number of float8 bytes that the kernels of a call hold, and largest number of kernels."""


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
            f"The products benchmark needs a GPU; the first device here is {device.device_kind} "
            f"({device.platform})."
        )
    trained, acted = (
        [_shrunk(size) if tiny else size for size in sizes(tokens)] for tokens in (_TOKENS, _ACTED)
    )
    cases = [
        *(("training", size, partial(_training, size), 3, 1) for size in trained),
        *(("acting", size, partial(_acting, size, n), n, n) for size, n in _layers(acted, tiny)),
    ]
    table: list[dict[str, Any]] = []
    for of, size, calls, products, layers in track(cases, "Products", console=console):
        found = _measured(calls(), products * size.flops, 1 if tiny else _ROUNDS, layers)
        table += [{"of": of, "size": str(size), **row} for row in found]
        tell(console, {"unit": "ms", "rows": table})
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


def _layers(acted: list[LayerProduct], tiny: bool) -> list[tuple[LayerProduct, int]]:
    """Products with the number of kernels that do not fit the GPU's cache together."""
    most = 1 if tiny else _MOST_LAYERS
    return [(s, min(most, math.ceil(_BEYOND_CACHE / (s.inner * s.outer)))) for s in acted]


def _acting(size: LayerProduct, layers: int) -> dict[str, Callable[[], Any]]:
    """Forward results alone, of so many layers, with kernels in bf16, kept in float8 and read in
    bf16, and multiplied in float8."""
    operands = [_operands(size, seed)[:2] for seed in range(layers)]
    xs, kernels = [x for x, _ in operands], [kernel.astype(x.dtype) for x, kernel in operands]
    kept = [
        jax.tree.map(lambda leaf: leaf[0], quantize_kernel("mlp/up/kernel", k[None], "float8"))
        for k in kernels
    ]

    def each(product: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda xs, kernels: list(map(product, xs, kernels)))

    return {
        "bf16": partial(each(_plain), xs, kernels),
        "kept in float8": partial(each(dot), xs, kept),
        "block": partial(each(dot_in_float8), xs, kept),
    }


def _plain(x: Any, kernel: Any) -> Any:
    return x @ kernel.astype(x.dtype)


def _operands(size: LayerProduct, seed: int = 0) -> tuple[Any, Any, Any]:
    """Activations and a gradient in bf16, and a master kernel."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (size.tokens, size.inner), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (size.inner, size.outer)) / size.inner**0.5
    return x, kernel, jax.random.normal(keys[2], (size.tokens, size.outer), jnp.bfloat16)


def _measured(
    calls: dict[str, Callable[[], Any]], flops: float, rounds: int, layers: int
) -> list[dict[str, Any]]:
    """Each call's median time for one of its layers, ratio to the first, TFLOP/s and share of the
    bf16 peak, or error."""
    ran = {name: attempt(partial(_once, call)) for name, call in calls.items()}
    able = {name: calls[name] for name, failure in ran.items() if not failure}
    found = [{"name": name, **failure} for name, failure in ran.items() if failure]
    chip = chip_of(jax.devices()[0].device_kind)
    for row in rows(alternate(able, rounds), "ratio") if able else []:
        rate = flops / row["ms"] * 1e3
        share = {} if chip is None else {"bf16_peak_share": rate / chip.peak("bfloat16")}
        row["ms"] /= layers
        found.append(row | {"TFLOP/s": rate / 1e12} | share)
    return found


def _once(call: Callable[[], Any]) -> dict[str, Any]:
    jax.block_until_ready(call())
    return {}


def _shrunk(size: LayerProduct) -> LayerProduct:
    return LayerProduct(*(max(8, n // 64) for n in size))
