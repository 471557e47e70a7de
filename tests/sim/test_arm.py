"""The arm against MuJoCo's and numpy's kinematics and MuJoCo's physics, and what its controls,
episodes, experts and cameras hold to."""

import math

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from sim import arm_control, arm_model, arm_physics
from sim.arm import Arm
from sim.arm_model import HOME, LIMITS, SPEEDS, STEP
from sim.tabletop import EVAL_SEEDS

LANES = 32
SEEDS = EVAL_SEEDS[:LANES]


@pytest.fixture(scope="module")
def arms() -> dict[str, Arm]:
    """One per task and control; all share one compiled physics."""
    return {
        "lift": Arm("lift", lanes=LANES, image_size=32),
        "reach": Arm("reach", lanes=LANES, image_size=32, control="joint"),
        "delta": Arm("reach", lanes=LANES, image_size=32, control="delta"),
    }


def _random_joints(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(*LIMITS.T, (count, 7))


def _equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _denavit_hartenberg(joints: np.ndarray) -> np.ndarray:
    """The tip's frame [4, 4], by the table alone."""

    def turn(axis: int, angle: float) -> np.ndarray:
        i, j = (axis + 1) % 3, (axis + 2) % 3
        matrix = np.eye(4)
        matrix[[i, j], [i, j]] = math.cos(angle)
        matrix[i, j], matrix[j, i] = -math.sin(angle), math.sin(angle)
        return matrix

    def shift(axis: int, by: float) -> np.ndarray:
        matrix = np.eye(4)
        matrix[axis, 3] = by
        return matrix

    rows = (
        (0, 0, 0.333),
        (0, -90, 0),
        (0, 90, 0.316),
        (0.0825, 90, 0),
        (-0.0825, -90, 0.384),
        (0, 90, 0),
        (0.088, 90, 0),
    )
    frame = np.eye(4)
    for (a, alpha, d), joint in zip(rows, joints, strict=True):
        frame = frame @ turn(0, math.radians(alpha)) @ shift(0, a) @ turn(2, joint) @ shift(2, d)
    return frame @ shift(2, 0.107 + 0.1034) @ turn(2, math.radians(-45))


def _matrix(quaternion: np.ndarray) -> np.ndarray:
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, np.asarray(quaternion, np.float64))
    return matrix.reshape(3, 3)


def test_the_tip_is_where_the_chain_of_the_manual_and_mujoco_have_it():
    joints = _random_joints(64)
    tips = np.asarray(jax.jit(jax.vmap(arm_control.tip))(joints))
    data = mujoco.MjData(arm_model.model())
    for q, pose in zip(joints, tips, strict=True):
        data.qpos[:7] = q
        mujoco.mj_kinematics(arm_model.model(), data)
        expected, site = _denavit_hartenberg(q), data.site("tip")
        np.testing.assert_allclose(site.xpos, expected[:3, 3], atol=1e-9)
        np.testing.assert_allclose(site.xmat.reshape(3, 3), expected[:3, :3], atol=1e-9)
        np.testing.assert_allclose(pose[:3], expected[:3, 3], atol=1e-6)
        np.testing.assert_allclose(_matrix(pose[3:]), expected[:3, :3], atol=3e-6)


def test_the_jacobian_is_mujocos():
    joints = _random_joints(16)
    model = arm_model.model()
    data, linear, angular = mujoco.MjData(model), *np.zeros((2, 3, model.nv))
    for q, found in zip(joints, jax.jit(jax.vmap(arm_control.jacobian))(joints), strict=True):
        data.qpos[:7] = q
        mujoco.mj_forward(model, data)
        mujoco.mj_jacSite(model, data, linear, angular, data.site("tip").id)
        np.testing.assert_allclose(found, np.concatenate((linear, angular))[:, :7], atol=1e-5)


def test_commands_reach_random_poses_within_two_millimetres_inside_limits_and_speeds():
    near = HOME + np.random.default_rng(0).uniform(-0.6, 0.6, (256, 7))
    goals = jax.jit(jax.vmap(arm_control.tip))(np.clip(near, *LIMITS.T))

    @jax.jit
    @jax.vmap
    def paths(goal):
        def step(joints, _):
            joints = arm_control.toward(joints, goal)
            return joints, joints

        return jax.lax.scan(step, jnp.array(HOME), None, 100)[1]

    path = np.asarray(paths(goals))
    tips = np.asarray(jax.jit(jax.vmap(arm_control.tip))(path[:, -1]))
    assert np.linalg.norm(tips[:, :3] - goals[:, :3], axis=1).max() < 0.002
    assert np.abs(np.sum(tips[:, 3:] * goals[:, 3:], 1)).min() > math.cos(0.005)
    assert np.all((path >= LIMITS[:, 0] - 1e-6) & (path <= LIMITS[:, 1] + 1e-6))
    speeds = np.abs(np.diff(path, axis=1, prepend=np.tile(HOME, (256, 1, 1)))) / STEP
    assert np.all(speeds < SPEEDS * 1.0001)


def test_poses_rotations_and_their_vectors_are_inverse_to_each_other():
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (64, 6)).astype(np.float32)
    poses = jax.vmap(arm_control.pose_of)(actions)
    np.testing.assert_allclose(jax.vmap(arm_control.action_of)(poses), actions, atol=1e-5)
    moved = jax.vmap(arm_control.moved_by)(poses, actions[::-1] * 0.01)
    back = jax.vmap(arm_control.delta_between)(poses, moved)
    np.testing.assert_allclose(back, actions[::-1] * 0.01, atol=1e-5)
    down = _matrix(arm_control.pose_of(jnp.zeros(6))[3:])
    np.testing.assert_allclose(down, np.diag((1, -1, -1)), atol=1e-6)


def _swung(start: np.ndarray, count: int, steps: int) -> np.ndarray:
    """Smooth joint targets [n, t, 8] within limits, the gripper opening and closing."""
    rng = np.random.default_rng(0)
    time = np.arange(steps)[:, None] * STEP
    rate, phase = rng.uniform(0.3, 1.2, (2, count, 1, 8))
    wave = np.sin(2 * math.pi * rate * time * 0.5 + phase) - np.sin(phase)
    wave[..., 1] = -np.abs(wave[..., 1])  # up, off the table
    wave[..., 3] = np.abs(wave[..., 3])
    return (start[:, None] + 0.35 * wave).astype(np.float32)


def test_joint_control_agrees_with_mujoco_to_two_milliradians_over_two_hundred_steps(arms):
    env = arms["reach"]
    state = env.reset(SEEDS)
    physics = state.physics
    actions = _swung(np.asarray(physics.setpoint), LANES, 200)
    setpoints = []
    path = []
    for t in range(200):
        setpoint = env._command(physics.setpoint, actions[:, t])
        physics = arm_physics.compiled_move()(physics, setpoint)
        setpoints.append(np.asarray(setpoint))
        path.append(np.asarray(physics.position))
    model = arm_model.model()
    for i in range(4):
        data = mujoco.MjData(model)
        data.qpos[:] = np.asarray(state.physics.position)[i]
        before = np.append(data.qpos[:7], [arm_model.OPEN] * 2)
        for t in range(200):
            finger = arm_model.OPEN * (1 - setpoints[t][i, 7])
            after = np.append(setpoints[t][i, :7], (finger, finger))
            for k in range(arm_model.SUBSTEPS):
                data.ctrl[:] = before + (after - before) * ((k + 1) / arm_model.SUBSTEPS)
                mujoco.mj_step(model, data)
            before = after
            np.testing.assert_allclose(path[t][i, :7], data.qpos[:7], atol=2e-3)
            np.testing.assert_allclose(path[t][i, 7:9], data.qpos[7:9], atol=1e-4)
            np.testing.assert_allclose(path[t][i, 9:], data.qpos[9:], atol=2e-3)
    moved = np.ptp(path, axis=0)[:, :7]
    assert moved.max(0).min() > 0.2, "every joint was moved"
