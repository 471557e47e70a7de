"""A policy of random weights, whose answers cost what a trained one's would."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import Embodiment, Normalizer, Policy, Processor
from models.model import ModelConfig

_RUN_ONCE = {"xla_backend_optimization_level": 0}
"""Compiles the draws sooner."""


def random_policy(
    config: ModelConfig,
    words: Sequence[str],
    cameras: Sequence[str] = ("front",),
    state: int = 8,
    actions: int = 7,
    sizes: Sequence[int] = Policy.sizes,
) -> Policy:
    """A policy of a robot with these cameras and dims, its weights on the first device in the dtype
    that the model computes in."""
    robot = Embodiment(
        "bench", tuple(cameras), Normalizer.identity(state), Normalizer.identity(actions)
    )
    processor = Processor(
        image_size=config.image_size,
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        horizon=config.horizon,
        state_input=config.state_input,
        words=tuple(words),
        embodiments=(robot,),
        text_limit=64 if config.state_input == "text" else 32,
    )
    model, dtype = config.build(), jnp.dtype(config.compute.dtype)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def draw(key: jax.Array) -> list[jax.Array]:
        leaves = jax.tree.leaves(shapes)
        keys = jax.random.split(key, len(leaves))
        drawn = [0.05 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        return [
            x.astype(dtype if jnp.issubdtype(like.dtype, np.floating) else like.dtype)
            for x, like in zip(drawn, leaves, strict=True)
        ]

    weights = jax.jit(draw, compiler_options=_RUN_ONCE)(jax.random.key(0))
    params = jax.tree.unflatten(jax.tree.structure(shapes), weights)
    return Policy(model, params, processor, sizes=tuple(sizes))
