"""Environments of any number of episodes on compiled programs that advance groups of a fixed size:
chunks, and restarts of finished episodes.

One program then serves recording, evaluation and learning, and an episode is the same in any batch.
Groups run on threads, as a compiled step keeps only one CPU core busy; an accelerator runs all
environments at once.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from sim.protocol import Observation, Scene, State, Transition

Step = Callable[[State, Any], tuple[State, Transition]]
"""(state, actions [n a]) -> the result of one control step."""
Moved = Any
"""Physics state of N environments that is carried from step to step."""

_CORES = os.cpu_count() or 1
_SLOTS = BoundedSemaphore(max(1, min(_CORES, int(os.environ.get("NPROC", _CORES)) // 2)))
"""Limit on compiled loops that run at once. Each loop holds a thread of XLA's pool, whose size
NPROC sets, and waits for another thread, so as many loops as threads would deadlock."""


def in_groups(function: Callable[..., Any], size: int, *trees: Any) -> Any:
    """Applies a compiled function of `size` environments to any number of them, along the leading
    axis of every leaf; on an accelerator the function gets all of them at once."""
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
    """Key from which all of an episode's draws derive."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), episode)


def scanned(step: Step, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
    """A chunk of control steps, to trace."""
    state, steps = jax.lax.scan(step, state, jnp.swapaxes(actions, 0, 1))
    return state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)


def restarted(over: Bool[Array, " n"], fresh: State, after: State) -> State:
    """The new state for every environment whose episode is over, `after` for the others; to
    trace."""

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(over.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(chosen, fresh, after)


class GroupedEnv(ABC):
    """`sim.protocol.Environment` built from definitions of physics, goals and pictures. A state has
    `seed`, `episode` (the number of episodes that this environment has finished, from which the
    next start derives), `step`, `goal` and `physics`, each [N].

    `pure_reset`, `pure_step`, `pure_observe` and `pure_pictures` are functions to trace, also
    inside a larger jitted program. The protocol's methods check their arguments and run these
    functions: on an accelerator as one program for all environments and steps; on CPUs step by
    step, in groups of `group_size` on threads. There, a loop around one compiled step costs nothing
    and serves chunks of any length.
    """

    name: str
    group_size: int
    """Number of environments that one compiled step advances on CPUs."""
    action_names: tuple[str, ...]
    max_steps: int

    def __init__(self) -> None:
        self._reset = jax.jit(self.pure_reset)
        self._step = jax.jit(self.pure_step)
        self._finish = jax.jit(self._judged)
        self._see = jax.jit(self.pure_pictures)

    @abstractmethod
    def init_episode(self, seed: UInt32[Array, ""], episode: Int[Array, ""]) -> State:
        """Initial state of one episode, to trace."""

    @abstractmethod
    def pure_physics_step(self, now: Moved, actions: Float[Array, "n a"]) -> Moved:
        """A control step, to trace."""

    @abstractmethod
    def physics_step(self, now: Moved, actions: Float[Array, "n a"]) -> Moved:
        """`pure_physics_step`, compiled."""

    @abstractmethod
    def achieved(self, state: State) -> Bool[Array, "n g"]:
        """Goals achieved, to trace."""

    @abstractmethod
    def pure_proprioception(self, now: Moved) -> Float[Array, "n s"]:
        """Proprioception, to trace."""

    @abstractmethod
    def pure_scene(self, state: State) -> Scene:
        """Scene for rendering the state, to trace."""

    @abstractmethod
    def pure_pictures(self, scene: Scene) -> UInt8[Array, "n c h w 3"]:
        """`pictures`, to trace."""

    def pure_reset(self, seeds: UInt32[Array, " n"]) -> State:
        """`reset`, to trace."""
        return jax.vmap(self.init_episode)(seeds, jnp.zeros(len(seeds), jnp.int32))

    def pure_observe(self, state: State) -> Observation:
        """`observe`, to trace."""
        return Observation(
            self.pure_pictures(self.pure_scene(state)), self.pure_proprioception(state.physics)
        )

    def pure_step(self, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
        """`step_chunk`, to trace: a scan over the chunk."""
        return scanned(
            lambda s, a: self._judged(s, self.pure_physics_step(s.physics, a)), state, actions
        )

    def reset(self, seeds: Int[np.ndarray, " n"] | Sequence[int]) -> State:
        """New episodes; the same seed gives the same episode.

        Raises:
          ValueError: a seed is negative or has more than 32 bits.
        """
        seeds = np.asarray(seeds, np.int64)
        if seeds.size and not 0 <= seeds.min() <= seeds.max() < 2**32:
            raise ValueError(
                f"{self.name}: seeds must lie in 0 … 2**32 - 1, "
                f"got {seeds.min()} … {seeds.max()}; choose smaller ones."
            )
        return in_groups(self._reset, self.group_size, seeds.astype(np.uint32))

    def goal(self, state: State) -> Int[Array, " n"]:
        """Index into `goals` of each running episode."""
        return state.goal

    def scene(self, state: State) -> Scene:
        """Scene for rendering the state."""
        return in_groups(self.pure_scene, self.group_size, state)

    def observe(self, state: State) -> Observation:
        """Pictures [N, cameras, image_size, image_size, 3] and proprioception [N, S]."""
        felt = in_groups(self.pure_proprioception, self.group_size, state.physics)
        return Observation(self.pictures(self.scene(state)), jnp.asarray(felt))

    def pictures(self, scene: Scene) -> UInt8[Array, "n c h w 3"]:
        """Camera images of each scene, as in `observe`."""
        return jnp.asarray(in_groups(self._see, self.group_size, scene))

    def step_chunk(self, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
        """Acts T steps; an episode that ends restarts from a new random state.

        Raises:
          ValueError: the actions have another shape, or one is not finite.
        """
        chunk, names, n = np.asarray(actions, np.float32), self.action_names, len(state.seed)
        if chunk.ndim != 3 or chunk.shape[::2] != (n, len(names)):
            raise ValueError(
                f"{self.name}: expected actions of shape [{n}, steps, {len(names)}], "
                f"got {chunk.shape}."
            )
        if not np.isfinite(chunk).all():
            i, t, a = np.argwhere(~np.isfinite(chunk))[0]
            raise ValueError(
                f"{self.name}: action '{names[a]}' of environment {i} at step {t} of "
                f"the chunk is {chunk[i, t, a]}, expected a finite number."
            )
        function = self._loop if jax.default_backend() == "cpu" else self._step
        return in_groups(function, self.group_size, state, chunk)

    def _loop(
        self, state: State, actions: Float[np.ndarray, "group t a"]
    ) -> tuple[State, Transition]:
        """`pure_step`, one compiled step at a time."""
        steps = []
        for action in actions.swapaxes(0, 1):
            state, transition = self._finish(state, self.physics_step(state.physics, action))
            steps.append(transition)
        return state, jax.tree.map(lambda *parts: np.stack(parts, 1), *steps)

    def _judged(self, before: State, moved: Moved) -> tuple[State, Transition]:
        """The states to continue from and the transition, after the bodies have moved."""
        after = before._replace(step=before.step + 1, physics=moved)
        achieved = self.achieved(after)
        terminated = jnp.take_along_axis(achieved, before.goal[:, None], 1)[:, 0]
        truncated = ~terminated & (after.step >= self.max_steps)
        fresh = jax.vmap(self.init_episode)(before.seed, before.episode + 1)
        return restarted(terminated | truncated, fresh, after), Transition(
            reward=terminated.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            achieved=achieved,
            state=self.pure_proprioception(moved),
            scene=self.pure_scene(after),
        )
