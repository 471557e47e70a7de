"""A 7-joint arm over a red, a green and a blue block, simulated by MJX and rendered by two ray-cast
cameras: one in front of it and one on its wrist.

The robot is `sim.environments.arm_model`, its controls are
`sim.environments.arm_physics.commanded`, and its tasks are in `sim.environments.arm_tasks`.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from sim.environments import arm_control, arm_physics
from sim.environments.arm_model import BLOCK, FINGER, HAND, HOME, SHAPES, STEP
from sim.environments.arm_physics import CONTROLS, ArmPhysics, Control, action_names, action_range
from sim.environments.arm_tasks import TASKS, in_columns, translated
from sim.environments.grouped import GroupedEnv, episode_key, in_groups
from sim.rendering.raycast import Camera, Geom, Look, Poses, pictures, views

FRONT = Camera(position=(0.98, 0.0, 0.60), target=(0.43, 0.0, 0.11), fovy=44.0)
WRIST = Camera(
    position=(0.075, 0.0, -0.01),
    target=(0.03, 0.0, 0.12),
    fovy=70.0,
    on=SHAPES.index(HAND),
    up=(1.0, 0.0, 0.0),
)
"""Camera on the hand, in front of it, looking at the space between the fingers."""
AUDIENCE = Camera(position=(1.25, -0.95, 0.85), target=(0.28, 0.0, 0.27), fovy=40.0)
"""Camera that sees the whole arm."""

_LIGHT, _DARK, _PAD, _TABLE = (
    (0.86, 0.87, 0.89),
    (0.32, 0.33, 0.36),
    (0.16, 0.16, 0.18),
    (0.66, 0.62, 0.56),
)
_BLOCKS = ((0.90, 0.16, 0.12), (0.12, 0.72, 0.20), (0.13, 0.28, 0.95))
_SPREAD = (0.35, 0.15, 0.15, 0.15, 0.2, 0.15, 0.4)
"""Largest distance of each joint from home at the start, radians."""


class ArmState(NamedTuple):
    """N running episodes, with the state of the bodies in MJX."""

    seed: UInt32[Array, " n"]
    episode: Int[Array, " n"]
    step: Int[Array, " n"]
    goal: Int[Array, " n"]
    physics: ArmPhysics


class Arm(GroupedEnv):
    """`sim.protocol.Environment` for `task` "reach" or "lift".

    Actions are what `sim.environments.arm_physics.commanded` takes. A scene is the poses [*b, 16,
    7] that `sim.environments.arm_physics.poses` gives.

    Args:
      control: "pose" (absolute) or "delta" of the tip, or "joint" targets.
      image_size: pixels along the edge of an observed picture.
      yaw: largest initial rotation of a block to either side, radians; π/4 allows any orientation.
      group_size: number of environments that one compiled step advances on CPUs.
      shadows: whether observed pictures have shadows, which takes 1.5 times as long.

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
        group_size: int = 128,
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
        self.group_size = group_size
        self.shadows = shadows
        self.action_names = action_names(control)
        self.action_range = action_range(control)
        self.goals = self.task.goals
        self.prompts = self.task.prompts
        self.max_steps = self.task.max_steps
        self._command = jax.jit(self._commanded)
        self._act = jax.jit(jax.vmap(self._wanted))
        super().__init__()

    def expert(self, state: ArmState) -> Float[Array, "n a"]:
        """The next action of the task's scripted expert, in terms of the control."""
        return in_groups(self._act, self.group_size, state)

    def render(self, scene: Float[Array, "*b 16 7"], size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people that show the whole arm, of scenes with any leading axes."""
        scene = jnp.asarray(scene)
        flat = scene.reshape(-1, *scene.shape[-2:])
        images = _pictures(flat, (AUDIENCE,), size, samples=3, shadows=True)
        return np.asarray(images).reshape(*scene.shape[:-2], size, size, 3)

    def pure_physics_step(self, now: ArmPhysics, actions: Float[Array, "n a"]) -> ArmPhysics:
        return jax.vmap(arm_physics.moved)(now, self._commanded(now.setpoint, actions))

    def physics_step(self, now: ArmPhysics, actions: Float[Array, "n a"]) -> ArmPhysics:
        return arm_physics.compiled_move()(now, self._command(now.setpoint, actions))

    def init_episode(self, seed: UInt32[Array, ""], episode: Int[Array, ""]) -> ArmState:
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

    def achieved(self, state: ArmState) -> Bool[Array, "n g"]:
        return jax.vmap(self.task.achieved)(state.physics)

    def pure_proprioception(self, now: ArmPhysics) -> Float[Array, "n 15"]:
        """`state_names`: joints (radians), fingers (metres from the middle), tip (metres, and
        rotation vector from pointing straight down); to trace."""
        return _felt(now)

    def pure_scene(self, state: ArmState) -> Float[Array, "n 16 7"]:
        """Poses of the geoms for rendering, to trace."""
        return _placed(state.physics.position)

    def pure_pictures(self, scene: Float[Array, "n 16 7"]) -> UInt8[Array, "n 2 h w 3"]:
        return _pictures(scene, (FRONT, WRIST), self.image_size, 2, self.shadows)

    def _commanded(
        self, setpoint: Float[Array, "n 8"], action: Float[Array, "n a"]
    ) -> Float[Array, "n 8"]:
        return jax.vmap(partial(arm_physics.commanded, control=self.control))(setpoint, action)

    def _wanted(self, state: ArmState) -> Float[Array, " a"]:
        action = self.task.expert(state.physics, state.goal)
        return translated(state.physics.setpoint, action, self.control)


def named(task: str, control: Control = "pose") -> str:
    """The environment's name: "arm-lift", "arm-lift-delta", "arm-lift-joint"."""
    return f"arm-{task}" if control == "pose" else f"arm-{task}-{control}"


@jax.jit
def _felt(moved: ArmPhysics) -> Float[Array, "n 15"]:
    tips = jax.vmap(lambda p: arm_control.action_of(arm_control.tip(p[:7])))(moved.position)
    return jnp.concatenate((moved.position[:, :9], tips), 1)


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
    bodies = Poses.of(scenes)
    everything = bodies.join(Poses.of(jnp.array(((0.0, 0, 0, 1, 0, 0, 0),))))
    return pictures(_GEOMS, everything, views(cameras, bodies), _LOOK, size, samples, shadows)
