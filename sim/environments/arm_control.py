"""Kinematics of the arm's tip: forward along the DH chain, and differential inverse kinematics by
damped least squares (Nakamura and Hanafusa 1986), where the redundant seventh direction is used to
return to the home posture.

Everything is a pure function of one arm, to be mapped over many by `jax.vmap` inside a compiled
step. A pose is a position in metres and a unit quaternion (w, x, y, z), in the frame of the base.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sim.environments.arm_model import DH, FLANGE, HAND_YAW, HOME, LIMITS, SPEEDS, STEP, TIP

TIP_SPEED, TURN_SPEED = 0.5, 2.5
"""Limits of a commanded tip, metres and radians a second; the manual allows 1.7 and 2.5."""

_ITERATIONS = 3
_DAMPING = 1e-4
_POSTURE = 0.05
"""Fraction of the way home that an iteration moves in directions that do not affect the tip."""
_DOWN = jnp.array((0.0, 1.0, 0.0, 0.0))
"""Rotation of the hand that points straight down, with its x axis away from the base."""

Joints = Float[Array, "7"]
Pose = Float[Array, "7"]


def links(joints: Joints) -> Float[Array, "7 7"]:
    """Poses of the frames that turn with each joint, z along its axis."""

    def next_link(pose: Pose, row: tuple[Float[Array, ""], ...]) -> tuple[Pose, Pose]:
        joint, a, alpha, d = row
        turn = multiply(pose[3:], _about(0, alpha))
        place = pose[:3] + rotate(turn, jnp.stack((a, jnp.zeros(()), d)))
        pose = jnp.concatenate((place, multiply(turn, _about(2, joint))))
        return pose, pose

    base = jnp.array((0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    return jax.lax.scan(next_link, base, (joints, *jnp.array(DH).T))[1]


def tip(joints: Joints) -> Pose:
    """Pose of the middle between the finger pads, with z along the fingers and y along their
    motion."""
    return _tip(links(joints)[-1])


def jacobian(joints: Joints) -> Float[Array, "6 7"]:
    """Velocity of the tip (linear, then angular, base frame) per joint velocity."""
    frames = links(joints)
    axes = rotate(frames[:, 3:], jnp.array((0.0, 0.0, 1.0)))
    arms = _tip(frames[-1])[:3] - frames[:, :3]
    return jnp.concatenate((jnp.cross(axes, arms), axes), 1).T


def solve(joints: Joints, goal: Pose, iterations: int = _ITERATIONS) -> Joints:
    """Joints within their limits that bring the tip nearer to the goal, starting from `joints`. A
    joint that reaches its limit stays there, and the others compensate."""

    def nearer(_: int, held: tuple[Joints, Joints]) -> tuple[Joints, Joints]:
        q, free = held
        here, along = tip(q), jacobian(q) * free
        error = jnp.concatenate((goal[:3] - here[:3], turn_between(here[3:], goal[3:])))
        inverse = jnp.linalg.inv(along @ along.T + _DAMPING * jnp.eye(6))
        home = _POSTURE * free * (HOME - q)
        wanted = q + home + along.T @ (inverse @ (error - along @ home))
        inside = _within(wanted)
        return inside, free * (wanted == inside)

    return jax.lax.fori_loop(0, iterations, nearer, (joints, jnp.ones(7)))[0]


def toward(joints: Joints, goal: Pose) -> Joints:
    """The joint targets one control step later, with the tip on a straight path to its goal, every
    joint within its limits and its speed, and the tip within `TIP_SPEED` and `TURN_SPEED`."""
    here = tip(joints)
    change = solve(joints, moved_by(here, delta_between(here, goal))) - joints
    excess = jnp.max(jnp.abs(change) / (SPEEDS * STEP))
    return _within(joints + change / jnp.maximum(1.0, excess))


def joints_toward(joints: Joints, goal: Joints) -> Joints:
    """The joint targets one control step later on the way to `goal`, each joint within its limits
    and its speed."""
    return joints + jnp.clip(_within(goal) - joints, -SPEEDS * STEP, SPEEDS * STEP)


def pose_of(action: Float[Array, "6"]) -> Pose:
    """The pose given by a position and a rotation vector (radians, base frame) relative to pointing
    straight down: (0, 0, yaw) keeps pointing down."""
    return jnp.concatenate((action[:3], multiply(turned(action[3:]), _DOWN)))


def action_of(pose: Pose) -> Float[Array, "6"]:
    """Inverse of `pose_of`, with a rotation of at most π."""
    return jnp.concatenate((pose[:3], turn_between(_DOWN, pose[3:])))


def moved_by(pose: Pose, delta: Float[Array, "6"]) -> Pose:
    """A pose moved by metres and turned by a rotation vector, both in the base frame."""
    return jnp.concatenate((pose[:3] + delta[:3], multiply(turned(delta[3:]), pose[3:])))


def delta_between(here: Pose, goal: Pose) -> Float[Array, "6"]:
    """Argument of `moved_by` that leads from one pose towards another, within the tip's limits for
    one control step."""
    turn = turn_between(here[3:], goal[3:])
    return jnp.concatenate(
        (_at_most(goal[:3] - here[:3], TIP_SPEED * STEP), _at_most(turn, TURN_SPEED * STEP))
    )


def turned(vector: Float[Array, "3"]) -> Float[Array, "4"]:
    """The quaternion of a rotation vector, radians."""
    half = jnp.sqrt(jnp.maximum(jnp.sum(vector**2), 1e-20)) / 2
    return jnp.concatenate((jnp.cos(half)[None], vector * (jnp.sin(half) / (2 * half))))


def turn_between(one: Float[Array, "4"], other: Float[Array, "4"]) -> Float[Array, "3"]:
    """The shortest rotation vector that leads from one rotation to the other, radians."""
    turn = multiply(other, one * jnp.array((1.0, -1.0, -1.0, -1.0)))
    vector = turn[1:] * jnp.where(turn[0] < 0, -1.0, 1.0)
    sine = jnp.sqrt(jnp.maximum(jnp.sum(vector**2), 1e-20))
    return vector * (2 * jnp.arctan2(sine, jnp.abs(turn[0])) / sine)


def multiply(one: Float[Array, "*n 4"], other: Float[Array, "*n 4"]) -> Float[Array, "*n 4"]:
    """Composition of two rotations: the product of their quaternions."""
    a, b, c, d = jnp.moveaxis(one, -1, 0)
    w, x, y, z = jnp.moveaxis(other, -1, 0)
    return jnp.stack(
        (
            a * w - b * x - c * y - d * z,
            a * x + b * w + c * z - d * y,
            a * y - b * z + c * w + d * x,
            a * z + b * y - c * x + d * w,
        ),
        -1,
    )


def rotate(turn: Float[Array, "*#n 4"], vector: Float[Array, "*#n 3"]) -> Float[Array, "*n 3"]:
    """A vector rotated by a unit quaternion."""
    axis = turn[..., 1:]
    twice = 2 * jnp.cross(axis, vector)
    return vector + turn[..., :1] * twice + jnp.cross(axis, twice)


def _tip(last: Pose) -> Pose:
    place = last[:3] + (FLANGE + TIP) * rotate(last[3:], jnp.array((0.0, 0.0, 1.0)))
    return jnp.concatenate((place, multiply(last[3:], _about(2, jnp.asarray(HAND_YAW)))))


def _about(axis: int, angle: Float[Array, ""]) -> Float[Array, "4"]:
    vector = [jnp.zeros(())] * 3
    vector[axis] = jnp.sin(angle / 2)
    return jnp.stack((jnp.cos(angle / 2), *vector))


def _within(joints: Joints) -> Joints:
    return jnp.clip(joints, LIMITS[:, 0], LIMITS[:, 1])


def _at_most(vector: Float[Array, "3"], length: float) -> Float[Array, "3"]:
    return vector * jnp.minimum(1.0, length / (jnp.linalg.norm(vector) + 1e-9))
