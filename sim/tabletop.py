"""A gripper over a table with a red, a green and a blue block, simulated by MJX and seen by one
ray-cast camera.

Environments run in groups of a fixed number of lanes, so that recording, evaluation and learning
share one compiled program whatever their batch and chunk, and an episode is the same in any batch.
Groups run on threads, as a compiled step keeps only one CPU core busy.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import BoundedSemaphore
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from sim import physics
from sim.physics import SIZES, Physics
from sim.protocol import Observation, Transition
from sim.raycast import Camera, Frames, Geom, Look, pictures, views
from sim.tasks import TASKS

TRAIN_SEEDS = range(0, 1_000_000_000)
"""Seeds of episodes to learn from."""
EVAL_SEEDS = range(1_000_000_000, 2_000_000_000)
"""Seeds of episodes to be judged by; no demonstration starts from one."""

FRONT = Camera(position=(0.0, -0.42, 0.62), target=(0.0, 0.06, 0.02), fovy=32.0)
COLOURS = np.array(
    (
        (0.30, 0.30, 0.33),
        (0.16, 0.16, 0.18),
        (0.16, 0.16, 0.18),
        (0.90, 0.16, 0.12),
        (0.12, 0.72, 0.20),
        (0.13, 0.28, 0.95),
        (0.80, 0.77, 0.72),
    ),
    np.float32,
)
"""Of the boxes of `sim.physics.SIZES` and the table, 0 to 1."""

_GEOMS = (*(Geom("box", size) for size in SIZES), Geom("plane", (0.0, 0.0)))

_CORES = os.cpu_count() or 1
_SLOTS = BoundedSemaphore(max(1, min(_CORES, int(os.environ.get("NPROC", _CORES)) // 2)))
"""Compiled loops that may run at once: each holds a thread of XLA's pool, whose size NPROC sets,
and waits for another, so that as many loops as threads would wait for ever."""


class TabletopState(NamedTuple):
    """N running episodes, the bodies as MJX left them."""

    seed: UInt32[Array, "n"]
    episode: Int[Array, "n"]
    """How many episodes this lane has finished; the next one's start derives from it."""
    step: Int[Array, "n"]
    goal: Int[Array, "n"]
    physics: Physics
    start: Float[Array, "n 3 2"]
    """Where the blocks lay at first."""


class Tabletop:
    """`sim.protocol.Environment` for `task` "reach", "lift" or "push".

    Actions are absolute: where the tip should be (x to the right, y away from the camera, z up,
    metres) and how far the gripper should close (0 open, 1 closed); the controller moves there at
    most 2.5 cm an axis and half the gripper's way a step. A scene is the boxes' poses [*b, 6, 7].

    Args:
      image_size: pixels along the edge of an observed picture.
      yaw: blocks start turned by up to so much to either side, radians; π/4 is any orientation.
      lanes: how many environments one compiled step advances.

    Raises:
      ValueError: there is no such task.
    """

    cameras: tuple[str, ...] = ("observation.images.front",)
    state_names: tuple[str, ...] = ("z_setpoint", "z_error", "left_finger", "right_finger")
    action_names: tuple[str, ...] = ("x", "y", "z", "gripper")
    action_range = tuple(zip((*physics.LOW, 0.0), (*physics.HIGH, 1.0), strict=True))
    fps = round(1 / (physics.TIMESTEP * physics.SUBSTEPS))

    def __init__(
        self, task: str = "lift", image_size: int = 48, yaw: float = math.pi / 4, lanes: int = 128
    ) -> None:
        if task not in TASKS:
            raise ValueError(f"There is no tabletop task '{task}', expected one of {list(TASKS)}.")
        self.task = TASKS[task]
        self.name = f"tabletop-{task}"
        self.kind = task
        self.image_size = image_size
        self.yaw = yaw
        self.lanes = lanes
        self.goals = self.task.goals
        self.prompts = self.task.prompts
        self.max_steps = self.task.max_steps
        self._reset = jax.jit(jax.vmap(self._fresh))
        self._finish = jax.jit(jax.vmap(self._judged))
        self._see = partial(_pictures, size=image_size, samples=2)

    def reset(self, seeds: Int[np.ndarray, "n"]) -> TabletopState:
        """Fresh episodes; the same seed gives the same episode.

        Raises:
          ValueError: a seed is negative or has more than 32 bits.
        """
        seeds = np.asarray(seeds, np.int64)
        if seeds.size and not 0 <= seeds.min() <= seeds.max() < 2**32:
            raise ValueError(
                f"{self.name}: seeds must lie in 0 … 2**32 - 1, "
                f"got {seeds.min()} … {seeds.max()}; choose smaller ones."
            )
        return self._in_lanes(
            lambda s: self._reset(s, np.zeros(len(s), np.int32)), seeds.astype(np.uint32)
        )

    def goal(self, state: TabletopState) -> Int[Array, "n"]:
        """Index into `goals` of each running episode."""
        return state.goal

    def observe(self, state: TabletopState) -> Observation:
        """Pictures [N, 1, image_size, image_size, 3] and proprioception [N, 4] (metres), in which
        x and y are missing: a policy that knew them would copy them and not look."""
        images = self.pictures(physics.poses(state.physics.position))
        return Observation(images, proprioception(state.physics))

    def pictures(self, scene: Float[np.ndarray | Array, "n 6 7"]) -> UInt8[Array, "n 1 h w 3"]:
        """What the camera sees of each scene, as in `observe`."""
        return jnp.asarray(self._in_lanes(self._see, scene))[:, None]

    def step_chunk(
        self, state: TabletopState, actions: Float[Array, "n t 4"]
    ) -> tuple[TabletopState, Transition]:
        """Acts T steps; an episode that ends starts anew from a fresh random state.

        Raises:
          ValueError: the actions have another shape, or one is not finite.
        """
        chunk = np.asarray(actions, np.float32)
        n = len(state.seed)
        if chunk.ndim != 3 or chunk.shape[::2] != (n, 4):
            raise ValueError(
                f"{self.name}: expected actions of shape [{n}, steps, 4], got {chunk.shape}."
            )
        if not np.isfinite(chunk).all():
            i, t, a = np.argwhere(~np.isfinite(chunk))[0]
            raise ValueError(
                f"{self.name}: action '{self.action_names[a]}' of environment {i} at step {t} of "
                f"the chunk is {chunk[i, t, a]}, expected a finite number."
            )
        return self._in_lanes(self._advance, state, chunk)

    def render(self, scene: Float[Array, "*b 6 7"], size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people, of scenes with any leading axes."""
        scene = jnp.asarray(scene)
        images = _pictures(scene.reshape(-1, *scene.shape[-2:]), size=size, samples=3)
        return np.asarray(images).reshape(*scene.shape[:-2], size, size, 3)

    def _in_lanes(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Applies a compiled function of `lanes` environments to any number of them."""

        def run(group: tuple[Any, ...]) -> Any:
            with _SLOTS:
                return jax.block_until_ready(function(*group))

        n = len(jax.tree.leaves(trees)[0])
        if n == self.lanes:
            return run(trees)
        host = jax.tree.map(np.asarray, trees)
        groups = [
            jax.tree.map(lambda x, at=at: x[np.minimum(at, n - 1)], host)
            for at in np.arange(-(-n // self.lanes) * self.lanes).reshape(-1, self.lanes)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(run, groups))
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *results)

    def _advance(
        self, state: TabletopState, actions: Float[np.ndarray, "lanes t 4"]
    ) -> tuple[TabletopState, Transition]:
        step = physics.compiled_step()
        steps = []
        for action in actions.swapaxes(0, 1):
            state, transition = self._finish(state, step(state.physics, action))
            steps.append(transition)
        return state, jax.tree.map(lambda *parts: np.stack(parts, 1), *steps)

    def _fresh(self, seed: UInt32[Array, ""], episode: Int[Array, ""]) -> TabletopState:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), episode)
        draws = jax.random.uniform(key, (14,))
        start = self.task.place(draws[:7])
        yaw = self.yaw * (2 * draws[7:10, None] - 1)
        low, high = jnp.array((-0.12, -0.10, 0.12)), jnp.array((0.12, 0.14, 0.20))
        tip = low + (high - low) * draws[10:13]
        return TabletopState(
            seed=seed,
            episode=episode,
            step=jnp.int32(0),
            goal=jnp.int32(draws[13] * len(self.goals)),
            physics=physics.at_rest(tip, jnp.concatenate((start, yaw), 1)),
            start=start,
        )

    def _judged(self, before: TabletopState, moved: Physics) -> tuple[TabletopState, Transition]:
        """The state to go on from and what happened, once the bodies have moved."""
        achieved = self.task.achieved(moved, before.start)
        terminated = achieved[before.goal]
        truncated = ~terminated & (before.step + 1 >= self.max_steps)
        after = before._replace(step=before.step + 1, physics=moved)
        fresh = self._fresh(before.seed, before.episode + 1)
        over: Bool[Array, ""] = terminated | truncated
        return jax.tree.map(partial(jnp.where, over), fresh, after), Transition(
            reward=terminated.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            achieved=achieved,
            state=proprioception(moved),
            scene=physics.poses(moved.position),
        )


def proprioception(moved: Physics) -> Float[Array, "*n 4"]:
    """What the robot feels: `Tabletop.state_names`, metres."""
    z = moved.setpoint[..., 2]
    fingers = moved.position[..., 3], moved.position[..., 4]
    return jnp.stack((z, z - moved.position[..., 2], *fingers), -1)


@partial(jax.jit, static_argnames=("size", "samples"))
def _pictures(
    scenes: Float[Array, "n 6 7"], *, size: int, samples: int
) -> UInt8[Array, "n size size 3"]:
    frames = Frames.of(scenes).join(Frames.of(np.array([(0, 0, 0, 1.0, 0, 0, 0)])))
    return pictures(_GEOMS, frames, views([FRONT]), Look(COLOURS), size, samples)[:, 0]
