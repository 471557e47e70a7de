"""Parameters that are random everywhere: models begin with closed gates and empty rows, behind
which an error would not show. NumPy draws them: JAX would compile a program for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.model import Model


def random_parameters(model: Model, scale: float = 0.3, seed: int = 1) -> Any:
    """f32 arrays of the shapes that `model.init` gives, normal with that deviation."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(scale=scale, size=x.shape), jnp.float32), shapes
    )
