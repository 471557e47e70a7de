"""The tiny preset trained in bf16 and in float8 from the same seeds, on a task made up here.

    python -m tests.models.fp8_training 2000

prints the mean loss of the last tenth of the steps under each recipe. A sample is one picture whose
brightest quadrant decides its actions together with the state.
"""

import dataclasses
import itertools
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import PackedBatch, Pi, Sample, fp8, pack
from models.layers import Compute
from tools.presets import TINY

_BATCHES, _ROWS, _SAMPLES = 8, 2, 4
_FAST_COMPILE = {"xla_backend_optimization_level": 1}


def train(recipe: Any, steps: int) -> tuple[float, Any]:
    """Mean loss over the last tenth of `steps`, and the parameters."""
    stacks = {
        name: dataclasses.replace(getattr(TINY.model, name), remat="dots")
        for name in ("vision", "language", "expert")
    }
    config = dataclasses.replace(TINY.model, compute=Compute("bfloat16", "dense", recipe), **stacks)
    model = Pi(config)
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1.5e-3, steps // 10, steps, 1.5e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

    @partial(jax.jit, donate_argnums=(0, 1), compiler_options=_FAST_COMPILE)
    def step(params: Any, state: Any, batch: PackedBatch, i: Any) -> tuple[Any, Any, Any]:
        loss = partial(model.loss, batch=batch, key=jax.random.fold_in(jax.random.key(1), i))
        (total, count), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        mean = jax.tree.map(lambda g: g / count, fp8.without_history(gradients))
        updates, state = optimizer.update(mean, state, params)
        updated = optax.apply_updates(params, updates)
        return fp8.advance(updated, params, gradients), state, total / count

    batches = _batches()
    params = _same_start(model)
    state, losses = optimizer.init(params), []
    for i in range(steps):
        params, state, loss = step(params, state, batches[i % _BATCHES], i)
        losses.append(float(loss))
    return float(np.mean(losses[-(steps // 10) :])), params


def _same_start(model: Pi) -> Any:
    """The parameters a model without histories begins with, and empty histories."""
    compute = Compute("bfloat16", "dense")
    plain = Pi(dataclasses.replace(model.config, compute=compute)).init(jax.random.key(0))
    start = jax.tree_util.tree_leaves_with_path(plain)
    known = {jax.tree_util.keystr(path): leaf for path, leaf in start}
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(
        lambda path, s: known.get(jax.tree_util.keystr(path), jnp.zeros(s.shape)), shapes
    )


def _batches() -> list[PackedBatch]:
    config, rng = TINY.model, np.random.default_rng(0)
    half = config.image_size // 2
    directions = rng.normal(size=(4, config.action_dim))
    mix = rng.normal(size=(config.state_dim, config.action_dim)) / config.state_dim**0.5
    time = np.linspace(0, 1, config.horizon)[:, None]

    def sample(i: int) -> Sample:
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
    numbers = itertools.count()
    return [
        pack(
            [[sample(next(numbers)) for _ in range(_SAMPLES)] for _ in range(_ROWS)],
            layout,
        )
        for _ in range(_BATCHES)
    ]


if __name__ == "__main__":
    for name in ("none", "current", "delayed", "block"):
        print(f"{name:8} {train(name, int(sys.argv[1]))[0]:.5f}", flush=True)
