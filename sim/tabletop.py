"""A gripper over a table with a red, a green and a blue block or drawer, simulated by MJX and seen
by ray-cast cameras.

Environments run in groups of a fixed number of lanes (`sim.groups`), so that recording, evaluation
and learning share one compiled program whatever their batch and chunk.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8, UInt32

from sim import physics
from sim.bodies import SUBSTEPS, TIMESTEP
from sim.groups import (
    checked_actions,
    checked_seeds,
    episode_key,
    in_groups,
    looped,
    restarted,
    scanned,
)
from sim.physics import Implementation, Physics
from sim.protocol import Observation, Transition
from sim.scenery import CAMERAS, Randomisation, Scene, draw
from sim.tasks import TASKS

TRAIN_SEEDS = range(0, 1_000_000_000)
"""Seeds of episodes to learn from."""
EVAL_SEEDS = range(1_000_000_000, 2_000_000_000)
"""Seeds of episodes to be judged by; no demonstration starts from one."""

_USUAL = Randomisation()


class TabletopState(NamedTuple):
    """N running episodes, the bodies as MJX left them."""

    seed: UInt32[Array, "n"]
    episode: Int[Array, "n"]
    """How many episodes this lane has finished; the next one's start derives from it."""
    step: Int[Array, "n"]
    goal: Int[Array, "n"]
    physics: Physics
    start: Float[Array, "n 3 2"]
    """Where the blocks lay at first, or the drawers' x and how far out they were."""


class Tabletop:
    """`sim.protocol.Environment` for `task` "reach", "lift", "push", "stack" or "drawer".

    Actions are absolute: where the tip should be (x to the right, y away from the camera, z up,
    metres) and how far the gripper should close (0 open, 1 closed); the controller moves there at
    most 2.5 cm an axis and half the gripper's way a step.

    `pure_reset`, `pure_step`, `pure_observe` and `pure_pictures` are functions to trace, inside a
    larger jitted program too. The protocol's methods check what they are given and run them: on an
    accelerator as one program for all environments and steps, on CPUs in groups of lanes on threads
    and step by step, where a loop around one compiled step costs nothing and does for chunks of any
    length.

    Args:
      image_size: pixels along the edge of an observed picture.
      cameras: whose pictures are observed, keys of `sim.scenery.CAMERAS`.
      random: what differs from episode to episode besides the task itself.
      yaw: blocks start turned by up to so much to either side, radians; π/4 is any orientation.
      lanes: how many environments one compiled step advances on CPUs.
      impl: which implementation of MJX; "auto" is Warp's on an NVIDIA GPU that has it.

    Raises:
      ValueError: there is no such task or camera, or Warp is asked for and is not installed.
    """

    state_names: tuple[str, ...] = ("z_setpoint", "z_error", "left_finger", "right_finger")
    action_names: tuple[str, ...] = ("x", "y", "z", "gripper")
    action_range = tuple(zip((*physics.LOW, 0.0), (*physics.HIGH, 1.0), strict=True))
    fps = round(1 / (TIMESTEP * SUBSTEPS))

    def __init__(
        self,
        task: str = "lift",
        image_size: int = 48,
        cameras: tuple[str, ...] = ("observation.images.front",),
        random: Randomisation = _USUAL,
        yaw: float = math.pi / 4,
        lanes: int = 128,
        impl: Literal["auto", "jax", "warp"] = "auto",
    ) -> None:
        if task not in TASKS:
            raise ValueError(f"There is no tabletop task '{task}', expected one of {list(TASKS)}.")
        if not cameras or not set(cameras) <= set(CAMERAS):
            raise ValueError(f"cameras is {cameras}, expected some of {tuple(CAMERAS)}.")
        self.task = TASKS[task]
        self.name = f"tabletop-{task}"
        self.kind = task
        self.image_size = image_size
        self.cameras = cameras
        self.random = random
        self.yaw = yaw
        self.lanes = lanes
        self.impl: Implementation = physics.implementation(impl)
        self.bodies = replace(self.task.bodies, distractors=random.distractors)
        self.goals = self.task.goals
        self.prompts = self.task.prompts
        self.max_steps = self.task.max_steps
        self._reset = jax.jit(self.pure_reset)
        self._step = jax.jit(self.pure_step)
        self._finish = jax.jit(self._judged)
        self._see = jax.jit(self.pure_pictures)
        self._show = jax.jit(self._shown, static_argnames="size")

    def pure_reset(self, seeds: UInt32[Array, "n"]) -> TabletopState:
        """`reset`, to trace."""
        return jax.vmap(self._fresh)(seeds, jnp.zeros(len(seeds), jnp.int32))

    def pure_observe(self, state: TabletopState) -> Observation:
        """`observe`, to trace."""
        return Observation(self.pure_pictures(self.scene(state)), proprioception(state.physics))

    def pure_pictures(self, scene: Scene) -> UInt8[Array, "n c h w 3"]:
        """`pictures`, to trace."""
        return draw(scene, self.bodies, self.cameras, self.random, self.image_size, 2)

    def pure_step(
        self, state: TabletopState, actions: Float[Array, "n t 4"]
    ) -> tuple[TabletopState, Transition]:
        """`step_chunk`, to trace: a scan over the chunk."""
        step = physics.step(self.bodies, self.impl)

        def one(
            state: TabletopState, action: Float[Array, "n 4"]
        ) -> tuple[TabletopState, Transition]:
            return self._judged(state, step(state.physics, action))

        return scanned(one, state, actions)

    def reset(self, seeds: Int[np.ndarray, "n"]) -> TabletopState:
        """Fresh episodes; the same seed gives the same episode.

        Raises:
          ValueError: a seed is negative or has more than 32 bits.
        """
        return in_groups(self._reset, self.lanes, checked_seeds(self.name, seeds))

    def goal(self, state: TabletopState) -> Int[Array, "n"]:
        """Index into `goals` of each running episode."""
        return state.goal

    def scene(self, state: TabletopState) -> Scene:
        """What pictures of the state show."""
        poses = self.bodies.poses(state.physics.position, state.start)
        return Scene(poses, state.seed, state.episode)

    def observe(self, state: TabletopState) -> Observation:
        """Pictures [N, cameras, image_size, image_size, 3] and proprioception [N, 4] (metres), in
        which x and y are missing: a policy that knew them would copy them and not look."""
        return Observation(self.pictures(self.scene(state)), proprioception(state.physics))

    def pictures(self, scene: Scene) -> UInt8[Array, "n c h w 3"]:
        """What the cameras see of each scene, as in `observe`."""
        return jnp.asarray(in_groups(self._see, self.lanes, scene))

    def step_chunk(
        self, state: TabletopState, actions: Float[Array, "n t 4"]
    ) -> tuple[TabletopState, Transition]:
        """Acts T steps; an episode that ends starts anew from a fresh random state.

        Raises:
          ValueError: the actions have another shape, or one is not finite.
        """
        chunk = checked_actions(self.name, actions, len(state.seed), self.action_names)
        step = self._loop if jax.default_backend() == "cpu" else self._step
        return in_groups(step, self.lanes, state, chunk)

    def render(self, scene: Scene, size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people from the front, of scenes with any leading axes."""
        lead = np.shape(scene.seed)
        flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[len(lead) :]), scene)
        return np.asarray(self._show(flat, size=size)).reshape(*lead, size, size, 3)

    def _loop(
        self, state: TabletopState, actions: Float[np.ndarray, "lanes t 4"]
    ) -> tuple[TabletopState, Transition]:
        """`pure_step`, a compiled step at a time."""
        step = physics.compiled_step(self.bodies, self.impl)
        return looped(lambda s, action: self._finish(s, step(s.physics, action)), state, actions)

    def _fresh(self, seed: UInt32[Array, ""], episode: Int[Array, ""]) -> TabletopState:
        key = episode_key(seed, episode)
        draws = jax.random.uniform(key, (14,))
        start = self.task.place(draws[:7])
        yaw = self.yaw * (2 * draws[7:10] - 1)
        low, high = jnp.array((-0.12, -0.10, 0.12)), jnp.array((0.12, 0.14, 0.20))
        tip = low + (high - low) * draws[10:13]
        aside = self.task.aside(start, jax.random.uniform(jax.random.fold_in(key, 1), (3, 3)))
        position = self.bodies.position(tip, start, yaw, aside[: self.bodies.distractors])
        return TabletopState(
            seed=seed,
            episode=episode,
            step=jnp.int32(0),
            goal=jnp.int32(draws[13] * len(self.goals)),
            physics=physics.at_rest(self.bodies, position),
            start=start,
        )

    def _judged(self, before: TabletopState, moved: Physics) -> tuple[TabletopState, Transition]:
        """The states to go on from and what happened, once the bodies have moved."""
        achieved = jax.vmap(self.task.achieved)(moved, before.start)
        terminated = jnp.take_along_axis(achieved, before.goal[:, None], 1)[:, 0]
        truncated = ~terminated & (before.step + 1 >= self.max_steps)
        after = before._replace(step=before.step + 1, physics=moved)
        fresh = jax.vmap(self._fresh)(before.seed, before.episode + 1)
        return restarted(terminated | truncated, fresh, after), Transition(
            reward=terminated.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            achieved=achieved,
            state=proprioception(moved),
            scene=self.scene(after),
        )

    def _shown(self, scene: Scene, size: int) -> UInt8[Array, "n 1 h w 3"]:
        return draw(scene, self.bodies, tuple(CAMERAS)[:1], self.random, size, 3)


def proprioception(moved: Physics) -> Float[Array, "*n 4"]:
    """What the robot feels: `Tabletop.state_names`, metres."""
    z = moved.setpoint[..., 2]
    fingers = moved.position[..., 3], moved.position[..., 4]
    return jnp.stack((z, z - moved.position[..., 2], *fingers), -1)
