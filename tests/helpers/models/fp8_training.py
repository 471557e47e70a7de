"""The tiny preset trained in bf16 and in float8 from the same seeds, on a task made up here.

    python -m tests.helpers.models.fp8_training 300 5e-4

prints held-out flow losses after so many steps at that rate. A sample is one picture whose
brightest quadrant decides its actions together with the state.
"""

import dataclasses
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import PackedBatch, Pi, Sample, pack
from models.layers.float8 import fp8
from models.layers.layers import Compute
from models.layers.quantized import quantize
from tools.recipes.presets import TINY

_TRAIN, _ROWS, _SAMPLES = 64, 2, 4
_FAST_COMPILE = {"xla_backend_optimization_level": 1}


def train(recipe: Any, steps: int, rate: float) -> Any:
    """Parameters after `steps` at a peak learning `rate`, averaged as the trainer does."""
    model = _model(recipe)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, rate / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

    @partial(jax.jit, donate_argnums=(0, 1, 2), compiler_options=_FAST_COMPILE)
    def step(params: Any, ema: Any, state: Any, batch: PackedBatch, i: Any) -> Any:
        loss = partial(model.loss, batch=batch, key=jax.random.fold_in(jax.random.key(1), i))
        (_, count), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        mean = jax.tree.map(lambda g: g / count, _without_history(gradients))
        updates, state = optimizer.update(mean, state, params)
        updated = fp8.advance(optax.apply_updates(params, updates), params, gradients)
        ema = jax.tree.map(lambda e, p: 0.98 * e + 0.02 * p, ema, updated)
        return updated, fp8.advance(ema, params, gradients), state

    params = _same_start(model)
    ema, state = jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params)
    batches = _batches(range(_TRAIN))
    for i in range(steps):
        params, ema, state = step(params, ema, state, batches[i % _TRAIN], i)
    return ema


def _without_history(gradients: Any) -> Any:
    """Gradients that an optimizer may see: zero where the leaf is a history."""
    return jax.tree_util.tree_map_with_path(
        lambda path, g: jnp.zeros_like(g) if fp8.is_history(path) else g, gradients
    )


def held_out_loss(params: Any, recipe: Any) -> float:
    """Mean flow loss on samples never trained on, over fixed draws of time and noise, computed
    under `recipe`."""
    loss = jax.jit(_model(recipe).loss, compiler_options=_FAST_COMPILE)
    draws = [
        loss(params, batch, jax.random.key(seed))
        for batch in _batches(range(_TRAIN, _TRAIN + 8))
        for seed in range(8)
    ]
    total, count = np.sum(np.asarray(draws), axis=0)
    return float(total / count)


def action_error(params: Any, other: Any) -> float:
    """Norm of the difference of the actions that both sample from the same noise on one batch,
    relative to the norm of the first's."""
    act = jax.jit(_model("none").sample_actions, compiler_options=_FAST_COMPILE)
    (batch,) = _batches([_TRAIN])
    noise = jax.random.normal(jax.random.key(2), batch.actions.shape)
    actions, others = (np.asarray(act(p, batch, noise)) for p in (params, other))
    return float(np.linalg.norm(others - actions) / np.linalg.norm(actions))


def _model(recipe: Any) -> Pi:
    stacks = {
        name: dataclasses.replace(getattr(TINY.model, name), remat="dots")
        for name in ("vision", "language", "expert")
    }
    compute = Compute("bfloat16", "dense", recipe)
    return Pi(dataclasses.replace(TINY.model, compute=compute, **stacks))


def _same_start(model: Pi) -> Any:
    """The parameters a model without histories begins with, and empty histories."""
    plain = jax.jit(_model("none").init)(jax.random.key(0))
    start = jax.tree_util.tree_leaves_with_path(plain)
    known = {jax.tree_util.keystr(path): leaf for path, leaf in start}
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(
        lambda path, s: known.get(jax.tree_util.keystr(path), jnp.zeros(s.shape)), shapes
    )


def _batches(numbers: Iterable[int]) -> list[PackedBatch]:
    config, rng = TINY.model, np.random.default_rng(0)
    half = config.image_size // 2
    directions = rng.normal(size=(4, config.action_dim))
    mix = rng.normal(size=(config.state_dim, config.action_dim)) / config.state_dim**0.5
    time = np.linspace(0, 1, config.horizon)[:, None]

    def sample(i: int) -> Sample:
        rng = np.random.default_rng(1 + i)
        quadrant = int(rng.integers(4))
        picture = rng.integers(0, 100, (config.image_size, config.image_size, 3), dtype=np.uint8)
        y, x = half * (quadrant // 2), half * (quadrant % 2)
        picture[y : y + half, x : x + half] += 150
        state = rng.normal(size=config.state_dim).astype(np.float32)
        actions = np.tanh(time * directions[quadrant] + (1 - time) * (state @ mix))
        return Sample(
            images=(picture,),
            text=np.arange(1, 9, dtype=np.int32),
            state=state,
            actions=actions.astype(np.float32),
            action_mask=np.ones(actions.shape, bool),
            id=i,
        )

    places = _SAMPLES * (config.vision.tokens(config.image_size) + 9)
    layout = config.layout(prefix=places, samples=_SAMPLES, images=_SAMPLES, text=8 * _SAMPLES)

    def batch(number: int) -> PackedBatch:
        ids = np.arange(_ROWS * _SAMPLES).reshape(_ROWS, _SAMPLES) + number * _ROWS * _SAMPLES
        return pack([[sample(int(i)) for i in row] for row in ids], layout)

    return [batch(number) for number in numbers]


if __name__ == "__main__":
    for name in ("none", "current", "delayed", "block"):
        trained = train(name, int(sys.argv[1]), float(sys.argv[2]))
        print(f"{name:8} held-out loss {held_out_loss(trained, name):.5f}", flush=True)
        if name == "none":
            served = quantize(trained, r"^language/layers/(attention|mlp)/")
            print(
                f"         quantised language model: {held_out_loss(served, name):.5f}, "
                f"actions differ by {action_error(trained, served):.4f}",
                flush=True,
            )
