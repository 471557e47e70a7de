"""Loss and gradients of π0.5 at its released sizes on a Hopper GPU, in float8 against bf16.

All programs share one set of f32 parameters and one batch, and alternate in one run, so a GPU that
warms slows all alike; the figure is the median. No optimizer runs: its 27 GB of moments would
change no program's products.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from models import PackedBatch, Pi, PiConfig
from models.files.terminal import Console
from models.layers.layers import Compute
from parallel.planning.random_batch import random_batch
from tools.bench.attempt import attempt, tell
from tools.bench.models.attention import alternate
from tools.recipes.presets import TINY

_ROWS, _SAMPLES, _ROUNDS = 8, 2, 20
_HOPPER = 9.0
_RECIPES: tuple[Literal["current", "block"], ...] = ("current", "block")


def run(console: Console, tiny: bool = False) -> dict[str, Any]:
    """Rates of steps in float8 of every recipe and in bf16; `ratio` is that of the first recipe.

    Raises:
      ValueError: the first device is no GPU of compute capability 9.0 (Hopper) or above, and the
        sizes are the released ones.
    """
    device = jax.devices()[0]
    capability = float(getattr(device, "compute_capability", None) or 0)
    if not tiny and (device.platform != "gpu" or capability < _HOPPER):
        raise ValueError(
            f"The fp8 benchmark needs a GPU of compute capability {_HOPPER} or above, such as an "
            f"H100; the first device here is {device.device_kind} ({device.platform})."
        )
    base: Any = TINY.model if tiny else PiConfig()
    base = base.recomputing("full")
    kinds: dict[str, Compute] = {recipe: Compute("bfloat16", fp8=recipe) for recipe in _RECIPES}
    kinds["bf16"] = Compute("bfloat16")
    models = {name: Pi(replace(base, compute=kind)) for name, kind in kinds.items()}
    rows = 2 if tiny else _ROWS
    batch, key = jax.device_put(random_batch(base, rows, _SAMPLES)), jax.random.key(1)
    params = jax.jit(models["bf16"].init)(key)
    steps = {
        name: jax.jit(jax.value_and_grad(partial(_scalar, model, key)))
        for name, model in models.items()
    }
    calls = {name: partial(step, params, batch) for name, step in steps.items()}
    ready: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        ready[name] = {"recipe": name, **attempt(partial(_loss, call))}
        tell(console, {"unit": "samples/s", "rows": list(ready.values())})
    console.print(f"Timing steps in turn: {', '.join(calls)}")
    able = {name: calls[name] for name, found in ready.items() if "error" not in found}
    took = alternate(able, 1 if tiny else _ROUNDS)
    samples = rows * _SAMPLES
    for name, times in took.items():
        ready[name] |= {"samples/s": samples / median(times)}
    rates = {name: found.get("samples/s", math.nan) for name, found in ready.items()}
    first = _RECIPES[0]
    return {
        "ratio": rates[first] / rates["bf16"],
        "ours": f"{rates[first]:.1f} samples/s in float8 ({first})",
        "other": f"{rates['bf16']:.1f} samples/s in bf16",
        "unit": "samples/s",
        "samples": samples,
        "rows": list(ready.values()),
    }


def _scalar(model: Pi, key: PRNGKeyArray, params: Any, batch: PackedBatch) -> Float[Array, ""]:
    return model.loss(params, batch, key)[0]


def _loss(step: Callable[[], Any]) -> dict[str, Any]:
    return {"loss": float(step()[0])}
