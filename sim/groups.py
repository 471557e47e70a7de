"""How environments that a compiled program advances in fixed groups take any number of episodes.

One program then serves recording, evaluation and learning, and an episode is the same in any batch.
Groups run on threads, as a compiled step keeps only one CPU core busy; an accelerator takes all at
once. Stepping a chunk and starting an episode anew are the same in all of them.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from sim.protocol import State, Transition

Step = Callable[[State, Any], tuple[State, Transition]]
"""(state, actions [n a]) -> what one control step makes of it."""

_CORES = os.cpu_count() or 1
_SLOTS = BoundedSemaphore(max(1, min(_CORES, int(os.environ.get("NPROC", _CORES)) // 2)))
"""Compiled loops that may run at once: each holds a thread of XLA's pool, whose size NPROC sets,
and waits for another, so that as many loops as threads would wait for ever."""


def in_groups(function: Callable[..., Any], size: int, *trees: Any) -> Any:
    """Applies a compiled function of `size` environments to any number of them, the leading axis of
    every leaf; on an accelerator it is given all of them at once."""
    n = len(jax.tree.leaves(trees)[0])
    if jax.default_backend() != "cpu":
        return function(*trees)

    def run(group: tuple[Any, ...]) -> Any:
        with _SLOTS:
            return jax.block_until_ready(function(*group))

    if n == size:
        return run(trees)
    host = jax.tree.map(np.asarray, trees)
    groups = [
        jax.tree.map(lambda x, at=at: x[np.minimum(at, n - 1)], host)
        for at in np.arange(-(-n // size) * size).reshape(-1, size)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, groups))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *results)


def episode_key(seed: UInt32[Array, ""], episode: Int[Array, ""]) -> Array:
    """What all of an episode's draws derive from."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), episode)


def scanned(step: Step, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
    """A chunk of control steps, to trace."""
    state, steps = jax.lax.scan(step, state, jnp.swapaxes(actions, 0, 1))
    return state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)


def looped(
    step: Step, state: State, actions: Float[np.ndarray, "n t a"]
) -> tuple[State, Transition]:
    """The same, a compiled step at a time."""
    steps = []
    for action in actions.swapaxes(0, 1):
        state, transition = step(state, action)
        steps.append(transition)
    return state, jax.tree.map(lambda *parts: np.stack(parts, 1), *steps)


def restarted(over: Bool[Array, "n"], fresh: State, after: State) -> State:
    """The fresh state of every environment whose episode is over, the others' own; to trace."""

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(over.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(chosen, fresh, after)


def checked_seeds(name: str, seeds: Int[np.ndarray, "n"]) -> UInt32[np.ndarray, "n"]:
    """The seeds as a compiled program takes them.

    Raises:
      ValueError: a seed is negative or has more than 32 bits.
    """
    seeds = np.asarray(seeds, np.int64)
    if seeds.size and not 0 <= seeds.min() <= seeds.max() < 2**32:
        raise ValueError(
            f"{name}: seeds must lie in 0 … 2**32 - 1, "
            f"got {seeds.min()} … {seeds.max()}; choose smaller ones."
        )
    return seeds.astype(np.uint32)


def checked_actions(
    name: str, actions: Float[Array | np.ndarray, "n t a"], n: int, action_names: Sequence[str]
) -> Float[np.ndarray, "n t a"]:
    """The actions of N environments as a compiled program takes them.

    Raises:
      ValueError: they have another shape, or one is not finite.
    """
    chunk = np.asarray(actions, np.float32)
    if chunk.ndim != 3 or chunk.shape[::2] != (n, len(action_names)):
        raise ValueError(
            f"{name}: expected actions of shape [{n}, steps, {len(action_names)}], "
            f"got {chunk.shape}."
        )
    if not np.isfinite(chunk).all():
        i, t, a = np.argwhere(~np.isfinite(chunk))[0]
        raise ValueError(
            f"{name}: action '{action_names[a]}' of environment {i} at step {t} of "
            f"the chunk is {chunk[i, t, a]}, expected a finite number."
        )
    return chunk
