"""A 7-joint arm over a red, a green and a blue block, simulated by MJX and seen by two ray-cast
cameras: one in front of it and one on its wrist.

The robot is `sim.arm_model`, its controls are `sim.arm_physics.commanded`, and what it can be told
is in `sim.arm_tasks`.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8, UInt32

from sim import arm_control, arm_physics
from sim.arm_model import BLOCK, FINGER, HAND, HOME, SHAPES, STEP
from sim.arm_physics import CONTROLS, ArmPhysics, Control, action_names, action_range
from sim.arm_tasks import TASKS, in_columns, translated
from sim.groups import (
    checked_actions,
    checked_seeds,
    episode_key,
    in_groups,
    looped,
    restarted,
    scanned,
)
from sim.protocol import Observation, Transition
from sim.raycast import Camera, Frames, Geom, Look, pictures, views

FRONT = Camera(position=(0.98, 0.0, 0.60), target=(0.43, 0.0, 0.11), fovy=44.0)
WRIST = Camera(
    position=(0.075, 0.0, -0.01),
    target=(0.03, 0.0, 0.12),
    fovy=70.0,
    on=SHAPES.index(HAND),
    up=(1.0, 0.0, 0.0),
)
"""On the hand, in front of it, looking at what is between the fingers."""
AUDIENCE = Camera(position=(1.25, -0.95, 0.85), target=(0.28, 0.0, 0.27), fovy=40.0)
"""Sees all of the arm."""

_LIGHT, _DARK, _PAD, _TABLE = (
    (0.86, 0.87, 0.89),
    (0.32, 0.33, 0.36),
    (0.16, 0.16, 0.18),
    (0.66, 0.62, 0.56),
)
_BLOCKS = ((0.90, 0.16, 0.12), (0.12, 0.72, 0.20), (0.13, 0.28, 0.95))
_SPREAD = (0.35, 0.15, 0.15, 0.15, 0.2, 0.15, 0.4)
"""How far each joint starts from home at most, radians."""


class ArmState(NamedTuple):
    """N running episodes, the bodies as MJX left them."""

    seed: UInt32[Array, "n"]
    episode: Int[Array, "n"]
    """How many episodes this lane has finished; the next one's start derives from it."""
    step: Int[Array, "n"]
    goal: Int[Array, "n"]
    physics: ArmPhysics


class Arm:
    """`sim.protocol.Environment` for `task` "reach" or "lift".

    Actions are what `sim.arm_physics.commanded` takes. A scene is the poses [*b, 16, 7] that
    `sim.arm_physics.poses` gives.

    `pure_reset`, `pure_step`, `pure_observe` and `pure_pictures` are functions to trace, inside a
    larger jitted program too. The protocol's methods check what they are given and run them: on an
    accelerator as one program for all environments and steps, on CPUs in groups of lanes on threads
    and step by step, where a loop around one compiled step costs nothing and does for chunks of any
    length.

    Args:
      control: "pose" (absolute) or "delta" of the tip, or "joint" targets.
      image_size: pixels along the edge of an observed picture.
      yaw: blocks start turned by up to so much to either side, radians; π/4 is any orientation.
      lanes: how many environments one compiled step advances on CPUs.
      shadows: whether observed pictures have them, which takes 1.5 times as long.

    Raises:
      ValueError: there is no such task or control.
    """

    cameras: tuple[str, ...] = ("observation.images.front", "observation.images.wrist")
    state_names: tuple[str, ...] = (
        *(f"joint_{i + 1}" for i in range(7)),
        *("left_finger", "right_finger"),
        *("x", "y", "z", "rx", "ry", "rz"),
    )
    fps = round(1 / STEP)

    def __init__(
        self,
        task: str = "lift",
        image_size: int = 64,
        yaw: float = math.pi / 4,
        lanes: int = 128,
        control: Control = "pose",
        shadows: bool = False,
    ) -> None:
        if task not in TASKS:
            raise ValueError(f"There is no arm task '{task}', expected one of {list(TASKS)}.")
        if control not in CONTROLS:
            raise ValueError(
                f"There is no arm control '{control}', expected one of {list(CONTROLS)}."
            )
        self.task = TASKS[task]
        self.name = named(task, control)
        self.kind = task
        self.control: Control = control
        self.image_size = image_size
        self.yaw = yaw
        self.lanes = lanes
        self.shadows = shadows
        self.action_names = action_names(control)
        self.action_range = action_range(control)
        self.goals = self.task.goals
        self.prompts = self.task.prompts
        self.max_steps = self.task.max_steps
        self._reset = jax.jit(self.pure_reset)
        self._step = jax.jit(self.pure_step)
        self._command = jax.jit(self._commanded)
        self._finish = jax.jit(self._judged)
        self._see = jax.jit(self.pure_pictures)
        self._act = jax.jit(jax.vmap(self._wanted))

    def pure_reset(self, seeds: UInt32[Array, "n"]) -> ArmState:
        """`reset`, to trace."""
        return jax.vmap(self._fresh)(seeds, jnp.zeros(len(seeds), jnp.int32))

    def pure_observe(self, state: ArmState) -> Observation:
        """`observe`, to trace."""
        return Observation(
            self.pure_pictures(_placed(state.physics.position)), proprioception(state.physics)
        )

    def pure_pictures(self, scene: Float[Array, "n 16 7"]) -> UInt8[Array, "n 2 h w 3"]:
        """`pictures`, to trace."""
        return _pictures(scene, (FRONT, WRIST), self.image_size, 2, self.shadows)

    def pure_step(
        self, state: ArmState, actions: Float[Array, "n t a"]
    ) -> tuple[ArmState, Transition]:
        """`step_chunk`, to trace: a scan over the chunk."""

        def one(state: ArmState, action: Float[Array, "n a"]) -> tuple[ArmState, Transition]:
            setpoint = self._commanded(state.physics.setpoint, action)
            return self._judged(state, jax.vmap(arm_physics.moved)(state.physics, setpoint))

        return scanned(one, state, actions)

    def reset(self, seeds: Int[np.ndarray, "n"]) -> ArmState:
        """Fresh episodes; the same seed gives the same episode.

        Raises:
          ValueError: a seed is negative or has more than 32 bits.
        """
        return in_groups(self._reset, self.lanes, checked_seeds(self.name, seeds))

    def goal(self, state: ArmState) -> Int[Array, "n"]:
        """Index into `goals` of each running episode."""
        return state.goal

    def scene(self, state: ArmState) -> Float[Array, "n 16 7"]:
        """What pictures of the state show."""
        return in_groups(_placed, self.lanes, state.physics.position)

    def observe(self, state: ArmState) -> Observation:
        """Pictures [N, 2, image_size, image_size, 3] of front and wrist, and proprioception
        [N, 15]: joints (radians), fingers (metres from the middle), tip (metres, and rotation
        vector from pointing straight down)."""
        return Observation(self.pictures(self.scene(state)), self.proprioception(state))

    def proprioception(self, state: ArmState) -> Float[Array, "n 15"]:
        """`observe` without pictures."""
        return jnp.asarray(in_groups(_felt, self.lanes, state.physics))

    def pictures(self, scene: Float[np.ndarray | Array, "n 16 7"]) -> UInt8[Array, "n 2 h w 3"]:
        """What the cameras see of each scene, as in `observe`."""
        return jnp.asarray(in_groups(self._see, self.lanes, scene))

    def step_chunk(
        self, state: ArmState, actions: Float[Array, "n t a"]
    ) -> tuple[ArmState, Transition]:
        """Acts T steps; an episode that ends starts anew from a fresh random state.

        Raises:
          ValueError: the actions have another shape, or one is not finite.
        """
        chunk = checked_actions(self.name, actions, len(state.seed), self.action_names)
        function = self._loop if jax.default_backend() == "cpu" else self._step
        return in_groups(function, self.lanes, state, chunk)

    def expert(self, state: ArmState) -> Float[Array, "n a"]:
        """The next action of the task's scripted expert, in terms of the control."""
        return in_groups(self._act, self.lanes, state)

    def render(self, scene: Float[Array, "*b 16 7"], size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people, of all of the arm, of scenes with any leading axes."""
        scene = jnp.asarray(scene)
        flat = scene.reshape(-1, *scene.shape[-2:])
        images = _pictures(flat, (AUDIENCE,), size, samples=3, shadows=True)
        return np.asarray(images).reshape(*scene.shape[:-2], size, size, 3)

    def _loop(
        self, state: ArmState, actions: Float[np.ndarray, "lanes t a"]
    ) -> tuple[ArmState, Transition]:
        """`pure_step`, a compiled step at a time."""
        move = arm_physics.compiled_move()

        def one(state: ArmState, action: Float[np.ndarray, "n a"]) -> tuple[ArmState, Transition]:
            setpoint = self._command(state.physics.setpoint, action)
            return self._finish(state, move(state.physics, setpoint))

        return looped(one, state, actions)

    def _commanded(
        self, setpoint: Float[Array, "n 8"], action: Float[Array, "n a"]
    ) -> Float[Array, "n 8"]:
        return jax.vmap(partial(arm_physics.commanded, control=self.control))(setpoint, action)

    def _wanted(self, state: ArmState) -> Float[Array, "a"]:
        action = self.task.expert(state.physics, state.goal)
        return translated(state.physics.setpoint, action, self.control)

    def _fresh(self, seed: UInt32[Array, ""], episode: Int[Array, ""]) -> ArmState:
        key = episode_key(seed, episode)
        draws = jax.random.uniform(key, (18,))
        joints = jnp.array(HOME) + jnp.array(_SPREAD) * (2 * draws[:7] - 1)
        yaw = self.yaw * (2 * draws[7:10, None] - 1)
        blocks = jnp.concatenate((in_columns(draws[10:17]), yaw), 1)
        return ArmState(
            seed=seed,
            episode=episode,
            step=jnp.int32(0),
            goal=jnp.int32(draws[17] * len(self.goals)),
            physics=arm_physics.at_rest(joints, blocks),
        )

    def _judged(self, before: ArmState, moved: ArmPhysics) -> tuple[ArmState, Transition]:
        """The states to go on from and what happened, once the bodies have moved."""
        achieved = jax.vmap(self.task.achieved)(moved)
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
            scene=_placed(moved.position),
        )


def named(task: str, control: Control = "pose") -> str:
    """The environment's name: "arm-lift", "arm-lift-delta", "arm-lift-joint"."""
    return f"arm-{task}" if control == "pose" else f"arm-{task}-{control}"


def proprioception(moved: ArmPhysics) -> Float[Array, "n 15"]:
    """What the robot feels: `Arm.state_names`, radians and metres."""
    tips = jax.vmap(lambda p: arm_control.action_of(arm_control.tip(p[:7])))(moved.position)
    return jnp.concatenate((moved.position[:, :9], tips), 1)


_felt = jax.jit(proprioception)
_placed = jax.jit(jax.vmap(arm_physics.poses))

_GEOMS = (
    *(Geom(shape.kind, shape.size) for shape in SHAPES),
    *[Geom("box", FINGER)] * 2,
    *[Geom("box", (BLOCK,) * 3)] * 3,
    Geom("plane", (0.0, 0.0)),
)
_LOOK = Look(
    colours=np.array(
        (*(_DARK if s.dark else _LIGHT for s in SHAPES), _PAD, _PAD, *_BLOCKS, _TABLE), np.float32
    ),
    light=np.array((0.45, -0.4, 0.8), np.float32) / np.float32(0.985),
)


@partial(jax.jit, static_argnames=("cameras", "size", "samples", "shadows"))
def _pictures(
    scenes: Float[Array, "n 16 7"],
    cameras: tuple[Camera, ...],
    size: int,
    samples: int,
    shadows: bool,
) -> UInt8[Array, "n c size size 3"]:
    bodies = Frames.of(scenes)
    everything = bodies.join(Frames.of(jnp.array(((0.0, 0, 0, 1, 0, 0, 0),))))
    return pictures(_GEOMS, everything, views(cameras, bodies), _LOOK, size, samples, shadows)
