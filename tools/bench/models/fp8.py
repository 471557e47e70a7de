"""Loss and gradients of π0.5 at its released sizes on a Hopper GPU, in float8 against bf16.

Both programs share one set of f32 parameters and one batch, and alternate in one run, so a GPU that
warms slows both alike; the figure is the median. No optimizer runs: its 27 GB of moments would
change neither program's products.
"""

import time
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import jax
import numpy as np

from models import PackedBatch, Pi, PiConfig, Sample, pack
from models.layers.layers import Compute
from models.model import ModelConfig
from models.terminal import Console, track

_ROWS, _SAMPLES, _CAMERAS, _PROMPT, _ROUNDS = 8, 2, 2, 32, 20
_HOPPER = 9.0


def run(console: Console, recipe: Literal["current", "block"] = "current") -> dict[str, Any]:
    """Rate of the float8 step over the bf16 step.

    Raises:
      ValueError: the first device is no GPU of compute capability 9.0 (Hopper) or above.
    """
    device = jax.devices()[0]
    capability = float(getattr(device, "compute_capability", None) or 0)
    if device.platform != "gpu" or capability < _HOPPER:
        raise ValueError(
            f"The fp8 benchmark needs a GPU of compute capability {_HOPPER} or above, such as an "
            f"H100; the first device here is {device.device_kind} ({device.platform})."
        )
    base = PiConfig()
    stacks: dict[str, Any] = {
        name: replace(getattr(base, name), remat="full")
        for name in ("vision", "language", "expert")
    }
    kinds = {"fp8": Compute("bfloat16", fp8=recipe), "bf16": Compute("bfloat16")}
    models = {name: Pi(replace(base, compute=kind, **stacks)) for name, kind in kinds.items()}
    batch, key = jax.device_put(random_batch(base)), jax.random.key(1)
    params = jax.jit(models["bf16"].init)(key)
    steps = {
        name: jax.jit(jax.value_and_grad(lambda p, b, m=model: m.loss(p, b, key)[0]))
        for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in track(range(_ROUNDS + 1), "Alternating steps", console=console):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, batch))
            seconds[name].append(time.perf_counter() - start)
    rates = {name: _ROWS * _SAMPLES / median(times[1:]) for name, times in seconds.items()}
    return {
        "ratio": rates["fp8"] / rates["bf16"],
        "ours": f"{rates['fp8']:.1f} samples/s in float8 ({recipe})",
        "other": f"{rates['bf16']:.1f} samples/s in bf16",
        "unit": "samples/s",
        "samples": _ROWS * _SAMPLES,
    }


def random_batch(config: ModelConfig, rows: int = _ROWS, samples: int = _SAMPLES) -> PackedBatch:
    """Rows of two-camera samples with prompts of one length, all places filled."""
    rng = np.random.default_rng(0)
    picture, shape = (config.image_size,) * 2 + (3,), (config.horizon, config.action_dim)

    def sample(i: int) -> Sample:
        return Sample(
            images=tuple(rng.integers(0, 256, (_CAMERAS, *picture), dtype=np.uint8)),
            text=rng.integers(1, config.vocabulary, _PROMPT).astype(np.int32),
            state=rng.normal(size=config.state_dim).astype(np.float32),
            actions=rng.normal(size=shape).astype(np.float32),
            action_mask=np.ones(shape, bool),
            id=i,
        )

    tokens = _CAMERAS * config.tokens_per_image + _PROMPT + int(config.state_input == "token")
    layout = config.layout(
        prefix=samples * tokens,
        samples=samples,
        images=samples * _CAMERAS,
        text=samples * _PROMPT,
    )
    ids = np.arange(rows * samples).reshape(rows, samples)
    return pack([[sample(int(i)) for i in row] for row in ids], layout)
