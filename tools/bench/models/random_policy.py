"""A policy of random weights, whose answers cost what a trained one's would."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models import Embodiment, Normalizer, Policy
from models.inputs.tokenizer import Tokenizer
from models.model import ModelConfig


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
    limit = 200 if config.state_input == "text" else 32
    processor = config.processor([robot], Tokenizer(tuple(words))).with_limit(limit)
    model, dtype = config.build(), jnp.dtype(config.compute.dtype)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [
        _drawn(key, x.shape, dtype if jnp.issubdtype(x.dtype, np.floating) else x.dtype)
        for key, x in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(tree, weights)
    return Policy(model, params, processor, sizes=tuple(sizes))


@partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """One leaf, because all leaves at once do not fit beside the policy."""
    return (0.05 * jax.random.normal(key, shape)).astype(dtype)
