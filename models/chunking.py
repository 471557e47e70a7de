"""Real-time chunking: the next chunk is sampled while the robot still acts the last, and fits it
(Black, Galliker and Levine 2025, arXiv 2506.07339).

What is left of the previous chunk guides the flow as in inpainting (ΠGDM, Song et al. 2023): fully
where its actions are committed, less and less over the rest. No training is needed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LIMIT = 5.0
"""The paper's bound on the guidance's weight, which is infinite at the first step of the flow."""

Velocity = Callable[[Float[Array, "*b h a"], Float[Array, ""]], Float[Array, "*b h a"]]


class Guidance(NamedTuple):
    """What a chunk shall come near: actions in the model's units, how much each entry matters (0
    not at all, 1 fully), and the bound on the correction."""

    actions: Float[Array, "*b h a"]
    weight: Float[Array, "*b h a"]
    limit: float = LIMIT


def soft_mask(
    horizon: int, committed: Int[np.ndarray, "*b"], overlap: Int[np.ndarray, "*b"]
) -> Float[np.ndarray, "*b h"]:
    """Weights of a chunk's steps (equation 5 of the paper): 1 for the first `committed`, 0 from
    `overlap` on, where the previous chunk has ended, and decaying exponentially between."""
    committed, overlap = np.asarray(committed)[..., None], np.asarray(overlap)[..., None]
    step = np.arange(horizon)
    left = (overlap - step) / np.maximum(overlap - committed + 1, 1)
    decayed = left * np.expm1(left) / np.expm1(1.0)
    return np.where(step < committed, 1, np.where(step < overlap, decayed, 0)).astype(np.float32)


def guided(velocity: Velocity, guidance: Guidance) -> Velocity:
    """The velocity of a flow whose end is drawn towards the guidance (equations 2 to 4).

    At (x, t) the flow is expected to end at x − t·v(x, t). The correction is the gradient by x of
    half the weighted squared distance between that and the guidance, times
    min(limit, (t² + (1 − t)²) / (t (1 − t))). It draws, it does not force: entries of weight 1 end
    near the guidance, not on it. Weights of 0 leave the velocity as it is, and a chunk is drawn by
    its own guidance alone where the velocity does not mix chunks.
    """

    def corrected(x: Float[Array, "*b h a"], t: Float[Array, ""]) -> Float[Array, "*b h a"]:
        def end(x: Array) -> tuple[Array, Array]:
            v = velocity(x, t)
            return x - t * v, v

        expected, pull, v = jax.vjp(end, x, has_aux=True)
        (gradient,) = pull((expected - guidance.actions) * guidance.weight)
        strength = (t**2 + (1 - t) ** 2) / (t * (1 - t))
        return v + jnp.minimum(strength, guidance.limit) * gradient

    return corrected
