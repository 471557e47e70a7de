"""A gripper over a table with a red, a green and a blue block or drawer, simulated by MJX and
rendered by ray-cast cameras.

Environments run in groups of a fixed size (`sim.environments.grouped`), so that recording,
evaluation and learning share one compiled program for any batch and chunk size.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from sim.environments import physics
from sim.environments.bodies import SUBSTEPS, TIMESTEP
from sim.environments.grouped import GroupedEnv, episode_key
from sim.environments.physics import Implementation, Physics
from sim.environments.scenery import CAMERAS, Randomisation, Scene, draw
from sim.environments.tasks import TASKS

_USUAL = Randomisation()


class TabletopState(NamedTuple):
    """N running episodes, with the state of the bodies in MJX."""

    seed: UInt32[Array, " n"]
    episode: Int[Array, " n"]
    step: Int[Array, " n"]
    goal: Int[Array, " n"]
    physics: Physics
    start: Float[Array, "n 3 2"]
    """Initial positions of the blocks, or x and initial opening of the drawers."""


class Tabletop(GroupedEnv):
    """`sim.protocol.Environment` for `task` "reach", "lift", "push", "stack" or "drawer".

    Actions are absolute: the target of the tip (x to the right, y away from the camera, z up,
    metres) and of the gripper (0 open, 1 closed). The controller moves there by at most 2.5 cm per
    axis and half the gripper's travel per step.

    Proprioception lacks the tip's x and y: a policy that knew them would copy them and ignore the
    images.

    Args:
      image_size: pixels along the edge of an observed picture.
      cameras: cameras that are observed, keys of `sim.environments.scenery.CAMERAS`.
      random: variation between episodes besides the task itself.
      yaw: largest initial rotation of a block to either side, radians; π/4 allows any orientation.
      group_size: number of environments that one compiled step advances on CPUs.
      impl: implementation of MJX; "auto" is Warp's on an NVIDIA GPU if it is installed.

    Raises:
      ValueError: there is no such task or camera, or Warp is requested but not installed.
    """

    state_names: tuple[str, ...] = ("z_setpoint", "z_error", "left_finger", "right_finger")
    action_names: tuple[str, ...] = ("x", "y", "z", "gripper")
    action_range = physics.ACTION_RANGE
    fps = round(1 / (TIMESTEP * SUBSTEPS))

    def __init__(
        self,
        task: str = "lift",
        image_size: int = 48,
        cameras: tuple[str, ...] = ("observation.images.front",),
        random: Randomisation = _USUAL,
        yaw: float = math.pi / 4,
        group_size: int = 128,
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
        self.group_size = group_size
        self.impl: Implementation = physics.implementation(impl)
        self.bodies = replace(self.task.bodies, distractors=random.distractors)
        self.goals = self.task.goals
        self.prompts = self.task.prompts
        self.max_steps = self.task.max_steps
        self._show = jax.jit(self._shown, static_argnames="size")
        super().__init__()

    def render(self, scene: Scene, size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people from the front, of scenes with any leading axes."""
        lead = np.shape(scene.seed)
        flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[len(lead) :]), scene)
        return np.asarray(self._show(flat, size=size)).reshape(*lead, size, size, 3)

    def pure_physics_step(self, now: Physics, actions: Float[Array, "n 4"]) -> Physics:
        return physics.step(self.bodies, self.impl, now, actions)

    def physics_step(self, now: Physics, actions: Float[Array, "n 4"]) -> Physics:
        return physics.compiled_step(self.bodies, self.impl)(now, actions)

    def init_episode(self, seed: UInt32[Array, ""], episode: Int[Array, ""]) -> TabletopState:
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

    def achieved(self, state: TabletopState) -> Bool[Array, "n g"]:
        return jax.vmap(self.task.achieved)(state.physics, state.start)

    def pure_proprioception(self, now: Physics) -> Float[Array, "n 4"]:
        """`state_names`, metres, to trace."""
        z, fingers = now.setpoint[:, 2], now.position[:, 3:5]
        return jnp.stack((z, z - now.position[:, 2], *fingers.T), -1)

    def pure_scene(self, state: TabletopState) -> Scene:
        poses = self.bodies.poses(state.physics.position, state.start)
        return Scene(poses, state.seed, state.episode)

    def pure_pictures(self, scene: Scene) -> UInt8[Array, "n c h w 3"]:
        return draw(scene, self.bodies, self.cameras, self.random, self.image_size, 2)

    def _shown(self, scene: Scene, size: int) -> UInt8[Array, "n 1 h w 3"]:
        return draw(scene, self.bodies, tuple(CAMERAS)[:1], self.random, size, 3)
