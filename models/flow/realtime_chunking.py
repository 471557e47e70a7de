"""Real-time chunking: the next chunk is sampled while the robot still executes the last one, and
continues it.

Guided chunking (Black, Galliker and Levine 2025, arXiv 2506.07339) needs no training: what is left
of the previous chunk pulls the flow as in inpainting (ΠGDM, Song et al. 2023). In trained chunking
(Black et al. 2025, arXiv 2512.05964), the model has learnt to read the committed actions, which
stand in the chunk at flow time 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Chunking = Literal["none", "guided", "trained"]
"""Continuation of a chunk by the next, after the committed actions, which are executed in any case.
"none": no continuation. "guided": pulled towards what was planned. "trained": by a model that was
trained to read the committed actions."""

LIMIT = 5.0
"""The paper's bound on the guidance's weight, which is infinite at the first step of the flow."""

Velocity = Callable[..., Float[Array, "*b h a"]]
"""Function of a noised chunk [*b h a] and its flow time [], and of what was computed ahead for this
time, if anything was."""


class Guidance(NamedTuple):
    """Target that guides a chunk: actions in the model's units, the weight of each entry (0 not at
    all, 1 fully), and the bound on the correction."""

    actions: Float[Array, "*b h a"]
    weight: Float[Array, "*b h a"]
    limit: float = LIMIT


class Given(NamedTuple):
    """First steps of a chunk that are given to a model that was trained to continue them: actions
    in the model's units, and a mask of the given steps."""

    actions: Float[Array, "*b h a"]
    steps: Bool[Array, "*b h"]


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


class Left(NamedTuple):
    """Actions left of a robot's previous chunk when it observes, in the robot's units."""

    actions: Float[np.ndarray, "h a"]
    """Padded with zeros."""
    weight: Float[np.ndarray, " h"]
    """Above 0 where the answer depends on a remaining action."""
    committed: Float[np.ndarray, "_d a"]


def left_over(
    previous: Sequence[Float[np.ndarray, "_h _a"] | None] | None,
    committed: int | Sequence[int],
    shape: tuple[int, int, int],
    chunking: Chunking = "guided",
) -> list[Left | None]:
    """Actions that each of B robots has left, None where it has nothing.

    Args:
      previous: actions not yet acted when the robot observed, the next one first.
      committed: how many of them will be executed before an answer can arrive; ignored where there
        is no previous chunk.
      shape: (B, steps of a chunk, action dims).
      chunking: decides the weights: those of `soft_mask` for "guided", 1 for the committed actions
        alone for "trained", 0 for "none".

    Raises:
      ValueError: a previous chunk is too long, of other dims or not finite, or has fewer actions
        than are committed.
    """
    count, horizon, dims = shape
    given = [None] * count if previous is None else list(previous)
    counts = [committed] * count if isinstance(committed, int) else list(committed)
    if (len(given), len(counts)) != (count, count):
        raise ValueError(
            f"previous is for {len(given)} observations and committed for {len(counts)}, but there "
            f"are {count}."
        )
    return [_left(x, int(d), horizon, dims, chunking) for x, d in zip(given, counts, strict=True)]


def guided(velocity: Velocity, guidance: Guidance) -> Velocity:
    """The velocity of a flow whose end is pulled towards the guidance (equations 2 to 4).

    At (x, t) the flow is expected to end at x − t·v(x, t). The correction is the gradient, with
    respect to x, of half the weighted squared distance between that end and the guidance, times
    min(limit, (t² + (1 − t)²) / (t (1 − t))). It pulls without forcing: entries of weight 1 end
    near the guidance, not on it. Weights of 0 leave the velocity unchanged. If the velocity does
    not mix chunks, a chunk is pulled by its own guidance alone.
    """

    def corrected(
        x: Float[Array, "*b h a"], t: Float[Array, ""], *ahead: Any
    ) -> Float[Array, "*b h a"]:
        def end(x: Array) -> tuple[Array, Array]:
            v = velocity(x, t, *ahead)
            return x - t * v, v

        expected, pull, v = jax.vjp(end, x, has_aux=True)
        (gradient,) = pull((expected - guidance.actions) * guidance.weight)
        strength = (t**2 + (1 - t) ** 2) / (t * (1 - t))
        return v + jnp.minimum(strength, guidance.limit) * gradient

    return corrected


def _left(
    chunk: Float[np.ndarray, "_h _a"] | None, d: int, horizon: int, dims: int, chunking: Chunking
) -> Left | None:
    if chunk is None:
        return None
    actions = np.asarray(chunk, np.float32)
    if actions.ndim != 2 or actions.shape[1] != dims or len(actions) > horizon:
        raise ValueError(
            f"previous has shape {list(actions.shape)}; expected at most {horizon} steps of "
            f"{dims} dims."
        )
    if not np.isfinite(actions).all():
        raise ValueError("previous holds an action that is not finite.")
    if not 0 <= d <= len(actions):
        raise ValueError(f"committed is {d}, but previous has {len(actions)} actions.")
    whole = np.zeros((horizon, dims), np.float32)
    whole[: len(actions)] = actions
    overlap = {"none": 0, "guided": len(actions), "trained": d}[chunking]
    weight = soft_mask(horizon, np.asarray(min(d, overlap)), np.asarray(overlap))
    return Left(whole, weight, actions[:d])
