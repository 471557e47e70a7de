"""Dropout with random draws of each sample's own: they depend on its key, the layer and the place
in the layer, not on what the sample is packed with.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

_STREAM = 2**32 - 2


def sample_keys(key: PRNGKeyArray, ids: Int[Array, "*b"]) -> UInt32[Array, "*b d"]:
    """Key data for each id, different from those of `flow.draw` and `models.inputs.augment`."""
    stream = jax.random.fold_in(key, _STREAM)
    fold = jax.vmap(lambda id: jax.random.key_data(jax.random.fold_in(stream, id)))
    keys = fold(ids.reshape(-1))
    return keys.reshape(*ids.shape, keys.shape[-1])


def folded(keys: UInt32[Array, "*b d"], number: Int[Array, "*b"]) -> UInt32[Array, "*b d"]:
    """Key data derived from each key and its number."""

    def one(data: Array, number: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), number))

    return jax.vmap(one)(keys.reshape(-1, keys.shape[-1]), number.reshape(-1)).reshape(keys.shape)


def drop(
    x: Float[Array, "..."], keys: UInt32[Array, "*b d"], site: int | Int[Array, ""], rate: float
) -> Float[Array, "..."]:
    """x [*b, ...] with a share `rate` of its numbers set to 0 and the others scaled up, so that the
    mean stays the same.

    Args:
      site: number of the site in the model; each site has draws of its own.
    """
    shape = x.shape[keys.ndim - 1 :]

    def one(data: Array) -> Array:
        own = jax.random.fold_in(jax.random.wrap_key_data(data), site)
        return jax.random.bernoulli(own, 1 - rate, shape)

    kept = jax.vmap(one)(keys.reshape(-1, keys.shape[-1])).reshape(x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
