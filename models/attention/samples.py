"""Samples of packed rows as runs of places, as kernels of variable lengths take them.

The queries of a sample stand end to end, and its keys, of which there are fewer, are first brought
together. cuDNN's kernels work on such runs, whether XLA or Transformer Engine calls them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_TINY = 1e-30


class RowSamples:
    """Runs of the samples 1 to `m` of each row.

    `here` [b, m] says which samples have both queries and keys, `q_length` and `k_length` [b, m]
    how many (0 for the others), and `q_start` and `k_start` [b, m] the first place of a run, that
    of keys after `together`. `seen_q` [b, q] and `seen_k` [b, k] are the places within runs.
    """

    def __init__(self, samples: int, q_segment: Int[Array, "b q"], kv_segment: Int[Array, "b k"]):
        ids = jnp.arange(1, samples + 1)
        order = jnp.where(kv_segment == 0, samples + 1, kv_segment)
        self._order = jnp.argsort(order, stable=True)
        mine, theirs = (s[:, None] == ids[:, None] for s in (q_segment, kv_segment))
        queries, keys = (x.sum(-1, dtype=jnp.int32) for x in (mine, theirs))
        self.here: Bool[Array, "b m"] = (queries > 0) & (keys > 0)
        self.q_length, self.k_length = (jnp.where(self.here, x, 0) for x in (queries, keys))
        self.q_start, self.k_start = jnp.argmax(mine, -1), jnp.cumsum(keys, -1) - keys
        self.seen_q = (mine & self.here[..., None]).any(1)
        self.seen_k = (theirs & self.here[..., None]).any(1)

    def together(self, x: Float[Array, "b k g d"]) -> Float[Array, "b k g d"]:
        """Keys or values, those of each sample end to end."""
        return jnp.take_along_axis(x, self._order[..., None, None], 1)

    def apart(self, x: Float[Array, "b k g d"]) -> Float[Array, "b k g d"]:
        """Gradients of `together`'s result as gradients of its argument, 0 outside of runs."""
        back = jnp.argsort(self._order)[..., None, None]
        return zero_outside(self.seen_k, jnp.take_along_axis(x, back, 1))


def zero_outside(seen: Bool[Array, "b t"], x: Float[Array, "b t n d"]) -> Float[Array, "b t n d"]:
    """`x`, and 0 where a kernel writes nothing."""
    return jnp.where(seen[..., None, None], x, 0)


def output_of(
    d_out: Float[Array, "b q n d"], shift: Float[Array, "b q n"]
) -> Float[Array, "b q n d"]:
    """An output, along `d_out`, with rowsum(d_out · output) = `shift`.

    A backward pass that uses its output only for this sum subtracts `shift`, so it takes the
    gradient of the log-sum-exp too (see `partial.differentiable`). NaN where `d_out` is 0 and
    `shift` is not."""
    dtype, d_out = d_out.dtype, d_out.astype(jnp.float32)
    top = jnp.abs(d_out).max(-1, keepdims=True)
    unit, shift = d_out / jnp.maximum(top, _TINY), shift[..., None]
    along = unit * (shift / jnp.maximum(top, _TINY)) / jnp.square(unit).sum(-1, keepdims=True)
    empty = jnp.where(jnp.abs(shift) > _TINY, jnp.nan, 0)
    return jnp.where(top > _TINY, along, empty).astype(dtype)
