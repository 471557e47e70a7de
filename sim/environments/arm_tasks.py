"""The arm's tasks, to reach or lift a block of one colour, and scripted experts for them.

An expert is a pure function of the present state with no memory, so it recovers from the effects of
noise or of another policy. It plans goals for the tip that stay constant until the next phase;
other controls get these goals translated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sim.environments import arm_control, tasks
from sim.environments.arm_physics import ArmPhysics, Control, blocks_of, commanded
from sim.environments.tasks import HOVER, shuffled

LIFTED = 0.08
"""Height of a block's centre at which it counts as lifted, metres."""

_TRAVEL, _CARRY, _GRASP = 0.11, 0.20, 0.02
"""Heights of the tip, metres: to pass over blocks, to hold one up, to grip one on the table."""


@dataclass(frozen=True)
class ArmTask:
    """`achieved(physics)` [goals] is true for achieved goals; `expert(physics, goal)` gives the
    tip's position and rotation vector and the gripper, as control "pose" takes them."""

    goals: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    paraphrases: tuple[tuple[str, ...], ...]
    """Wordings of each goal that no recording has, to judge policies by."""
    max_steps: int
    achieved: Callable[[ArmPhysics], Bool[Array, " g"]]
    expert: Callable[[ArmPhysics, Int[Array, ""]], Float[Array, "7"]]


def in_columns(draws: Float[Array, "7"]) -> Float[Array, "3 2"]:
    """Positions (x, y) of the blocks, from draws in [0, 1): side by side, so that the fingers,
    which close along y if the gripper is not turned, have room."""
    y = shuffled((-0.14, 0.0, 0.14), draws[0]) + 0.04 * (draws[1:4] - 0.5)
    return jnp.stack((0.38 + 0.2 * draws[4:], y), 1)


def translated(
    setpoint: Float[Array, "8"], action: Float[Array, "7"], control: Control
) -> Float[Array, " a"]:
    """The action in `control` for the motion that `action` would make in this step under "pose"."""
    if control == "pose":
        return action
    if control == "joint":
        return jnp.append(commanded(setpoint, action, "pose")[:7], action[6])
    here, goal = arm_control.tip(setpoint[:7]), arm_control.pose_of(action[:6])
    return jnp.append(arm_control.delta_between(here, goal), action[6])


def _reached(physics: ArmPhysics) -> Bool[Array, "3"]:
    """The tip has come to rest within 3 cm of the point above the block, not just passed it."""
    joints, turning = physics.position[:7], physics.velocity[:7]
    speed = jnp.linalg.norm(arm_control.jacobian(joints)[:3] @ turning)
    above = blocks_of(physics.position)[:, :3] + jnp.array((0.0, 0.0, HOVER))
    away = jnp.linalg.norm(arm_control.tip(joints)[:3] - above, axis=-1)
    return (speed < 0.15) & (away < 0.03)


def _lifted(physics: ArmPhysics) -> Bool[Array, "3"]:
    return blocks_of(physics.position)[:, 2] > LIFTED


def _reach(physics: ArmPhysics, goal: Int[Array, ""]) -> Float[Array, "7"]:
    block = blocks_of(physics.position)[goal]
    yaw, _ = _aligned(arm_control.tip(physics.position[:7]), block)
    return _action(block[:2], block[2] + HOVER, yaw, 0.0)


def _lift(physics: ArmPhysics, goal: Int[Array, ""]) -> Float[Array, "7"]:
    block = blocks_of(physics.position)[goal]
    tip, closed = arm_control.tip(physics.position[:7]), physics.setpoint[7]
    yaw, astray = _aligned(tip, block)
    away, above = jnp.linalg.norm(tip[:2] - block[:2]), tip[2] - block[2]
    over = (away < 0.012) & (astray < 0.1) & (closed < 0.3)
    here = over | ((away < 0.025) & (astray < 0.3) & (above < 0.03))
    around = here & (above < 0.01)
    held = around & (closed > 0.75)
    z = jnp.where(held, _CARRY, jnp.where(here, _GRASP, _TRAVEL))
    return _action(block[:2], z, yaw, jnp.where(around, 1.0, 0.0))


def _aligned(
    tip: Float[Array, "7"], block: Float[Array, "7"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The nearest yaw at which the fingers meet the block's faces squarely while pointing straight
    down, and how far the tip is turned from that, radians."""
    now = arm_control.action_of(tip)[5]
    apart = 2 * jnp.arctan2(block[6], block[3]) - now
    quarter = jnp.pi / 2
    yaw = now + apart - quarter * jnp.round(apart / quarter)
    goal = arm_control.pose_of(jnp.zeros(6).at[5].set(yaw))
    return yaw, jnp.linalg.norm(arm_control.turn_between(tip[3:], goal[3:]))


def _action(
    place: Float[Array, "2"],
    z: Float[Array, ""],
    yaw: Float[Array, ""],
    gripper: Float[Array, ""] | float,
) -> Float[Array, "7"]:
    return jnp.stack((*place, z, jnp.float32(0), jnp.float32(0), yaw, jnp.float32(gripper)))


def _task(name: str, max_steps: int, achieved, expert) -> ArmTask:  # type: ignore[no-untyped-def]
    same = tasks.TASKS[name]
    return ArmTask(same.goals, same.prompts, same.paraphrases, max_steps, achieved, expert)


TASKS = {"reach": _task("reach", 40, _reached, _reach), "lift": _task("lift", 80, _lifted, _lift)}
"""The arm's tasks; goals have the same wordings as the tabletop's."""
