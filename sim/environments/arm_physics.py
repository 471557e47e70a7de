"""Dynamics of the arm and the blocks: MJX under position servos, with targets from joint or
end-effector commands, and the resulting poses for a camera.

All arms of a process share the model and its compiled program. Between two control steps the
servos' targets move evenly, as interpolated by a robot's own controller.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sim.environments import arm_control
from sim.environments.arm_control import multiply, rotate
from sim.environments.arm_model import (
    BLOCK,
    FINGER,
    FINGER_HEIGHT,
    FINGER_SPEED,
    FLANGE,
    HAND_TURN,
    LIMITS,
    OPEN,
    SHAPES,
    STEP,
    SUBSTEPS,
    model,
)
from sim.environments.bodies import lying
from sim.environments.physics import mjx

Control = Literal["pose", "delta", "joint"]
CONTROLS: tuple[Control, ...] = get_args(Control)
LOW, HIGH = (0.2, -0.45, 0.012), (0.75, 0.45, 0.65)
"""Bounds of a commanded tip, metres in the frame of the base."""

TILT, YAW = math.pi / 4, 2.4
"""Largest commanded rotation of the tip from pointing straight down, about the base's x and y axes
and about its z axis, radians."""

_GRIPPER_SPEED = FINGER_SPEED / OPEN * STEP


class ArmPhysics(NamedTuple):
    """State that MJX carries from step to step, and the targets that the servos hold.

    `position` is the seven joints (radians), both fingers (metres from the middle), and each
    block's position and quaternion.
    """

    position: Float[Array, "*n 30"]
    velocity: Float[Array, "*n 27"]
    acceleration: Float[Array, "*n 27"]
    """The solver's starting point."""
    setpoint: Float[Array, "*n 8"]
    """Seven joints and the gripper, 0 open to 1 closed."""


def action_names(control: Control) -> tuple[str, ...]:
    """Names of an action's entries."""
    if control == "joint":
        return (*(f"joint_{i + 1}" for i in range(7)), "gripper")
    axes = ("x", "y", "z", "rx", "ry", "rz")
    return (*(axes if control == "pose" else (f"d{a}" for a in axes)), "gripper")


def action_range(control: Control) -> tuple[tuple[float, float], ...]:
    """Lowest and highest value of each entry of an action."""
    if control == "joint":
        return (*((float(low), float(high)) for low, high in LIMITS), (0.0, 1.0))
    if control == "pose":
        turns = (-TILT, TILT), (-TILT, TILT), (-YAW, YAW)
        return (*zip(LOW, HIGH, strict=True), *turns, (0.0, 1.0))
    step, turn = arm_control.TIP_SPEED * STEP, arm_control.TURN_SPEED * STEP
    return (*[(-step, step)] * 3, *[(-turn, turn)] * 3, (0.0, 1.0))


def at_rest(joints: Float[Array, "7"], blocks: Float[Array, "3 3"]) -> ArmPhysics:
    """An arm at rest with these joints and an open gripper, and a block at each (x, y, yaw in
    radians)."""
    position = jnp.concatenate((joints, jnp.full(2, OPEN), lying(blocks, BLOCK)))
    still = jnp.zeros(27)
    return ArmPhysics(position, still, still, jnp.append(joints, 0.0))


def blocks_of(position: Float[Array, "*n 30"]) -> Float[Array, "*n 3 7"]:
    """Position and quaternion of each block."""
    return position[..., 9:].reshape(*position.shape[:-1], 3, 7)


def commanded(
    setpoint: Float[Array, "8"], action: Float[Array, " a"], control: Control
) -> Float[Array, "8"]:
    """The servo targets one control step later, within all limits and speeds.

    "joint": the action is seven joints (radians) and the gripper (0 open to 1 closed). "pose": the
    tip's position (metres) and its rotation vector from pointing straight down (radians), both in
    the frame of the base, and the gripper. "delta": the translation (metres) and rotation (rotation
    vector, radians, about the base's axes) of the tip's target in this step, and the gripper.
    """
    joints, gripper = setpoint[:7], setpoint[7]
    command = action[:-1]
    if control == "joint":
        joints = arm_control.joints_toward(joints, command)
    else:
        if control == "pose":
            wanted = command
        else:
            moved = arm_control.moved_by(arm_control.tip(joints), command)
            wanted = arm_control.action_of(moved)
        low, high = jnp.array(action_range("pose")[:6]).T
        joints = arm_control.toward(joints, arm_control.pose_of(jnp.clip(wanted, low, high)))
    closing = jnp.clip(action[-1], 0.0, 1.0) - gripper
    return jnp.append(joints, gripper + jnp.clip(closing, -_GRIPPER_SPEED, _GRIPPER_SPEED))


def moved(physics: ArmPhysics, setpoint: Float[Array, "8"]) -> ArmPhysics:
    """State of one arm and its blocks one control step later, after the servos' targets have moved
    to `setpoint`; a pure function to trace under `jax.vmap`."""
    static, blank = _mjx()
    before, change = _targets(physics.setpoint), _targets(setpoint) - _targets(physics.setpoint)

    def substep(number: Array, data: mjx.Data) -> mjx.Data:
        ctrl = before + change * ((number + 1) / SUBSTEPS)
        return mjx.step(static, data.replace(ctrl=ctrl))

    data = blank.replace(
        qpos=physics.position, qvel=physics.velocity, qacc_warmstart=physics.acceleration
    )
    data = jax.lax.fori_loop(0, SUBSTEPS, substep, data)
    return ArmPhysics(data.qpos, data.qvel, data.qacc_warmstart, setpoint)


@cache
def compiled_move() -> Callable[[ArmPhysics, Float[Array, "n 8"]], ArmPhysics]:
    """`moved` of N arms, jitted: one program for all tasks and controls."""
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(jax.vmap(moved), compiler_options=options)


def poses(position: Float[Array, "30"]) -> Float[Array, "16 7"]:
    """Centre and quaternion of `sim.environments.arm_model.SHAPES`, left and right finger and the
    three blocks, of one arm."""
    links = arm_control.links(position[:7])
    base = jnp.array((0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    side = jnp.array((1.0, -1.0))
    middle = jnp.array((0.0, 0.0, FLANGE + FINGER_HEIGHT + FINGER[2]))
    across = jnp.stack((0 * side, side * (position[7:9] + FINGER[1]), 0 * side), -1)
    parents = jnp.concatenate((base[None], links))[jnp.array([*(s.link for s in SHAPES), 7, 7])]
    places = jnp.concatenate(
        (jnp.array([s.position for s in SHAPES]), middle + rotate(jnp.array(HAND_TURN), across))
    )
    turns = jnp.array([*(s.quaternion for s in SHAPES), HAND_TURN, HAND_TURN])
    centres = parents[:, :3] + rotate(parents[:, 3:], places)
    arm = jnp.concatenate((centres, multiply(parents[:, 3:], turns)), 1)
    return jnp.concatenate((arm, blocks_of(position)))


def _targets(setpoint: Float[Array, "8"]) -> Float[Array, "9"]:
    finger = OPEN * (1 - setpoint[7])
    return jnp.concatenate((setpoint[:7], jnp.stack((finger, finger))))


@cache
def _mjx() -> tuple[mjx.Model, mjx.Data]:
    with jax.ensure_compile_time_eval():
        static = mjx.put_model(model(), impl="jax")
        return static, mjx.make_data(static)
