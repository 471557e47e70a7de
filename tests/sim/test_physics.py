"""The compiled physics against MuJoCo's own."""

import mujoco
import numpy as np

from sim import physics
from sim.bodies import COLOURS, OPEN, SUBSTEPS, Bodies
from sim.experts import expert

STEPS = 20


def _mujoco(position: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """The same controller over `mj_step` with a converged solver."""
    model = physics.model(Bodies())
    data = mujoco.MjData(model)
    model.opt.iterations, model.opt.ls_iterations = 20, 20
    data.qpos[:] = position
    setpoint, path = np.append(position[:3], 0.0), []
    for action in actions:
        goal = np.clip(action, (*physics.LOW, 0), (*physics.HIGH, 1))
        setpoint += np.clip(goal - setpoint, -np.array(physics.SPEED), physics.SPEED)
        data.ctrl[:3], data.ctrl[3:] = setpoint[:3], OPEN * (1 - setpoint[3])
        for _ in range(SUBSTEPS):
            mujoco.mj_step(model, data)
        path.append(data.qpos.copy())
    model.opt.iterations, model.opt.ls_iterations = 1, 5
    return np.stack(path)


def _mjx(env, state) -> tuple[np.ndarray, np.ndarray]:
    """The expert's actions and where they lead, without new episodes in between."""
    actions, path = [], []
    for _ in range(STEPS):
        actions.append(np.asarray(expert(env, state)))
        state = state._replace(physics=physics.compiled_step(Bodies())(state.physics, actions[-1]))
        path.append(np.asarray(state.physics.position))
    return np.stack(actions, 1), np.stack(path, 1)


def test_free_motion_agrees_with_mujoco_to_a_tenth_of_a_millimetre_after_its_start(envs):
    state = envs["reach"].reset(np.arange(16))
    actions, path = _mjx(envs["reach"], state)
    for i in range(4):
        expected = _mujoco(np.asarray(state.physics.position[i], np.float64), actions[i])
        np.testing.assert_allclose(path[i, 2:, :5], expected[2:, :5], atol=1e-4)
        np.testing.assert_allclose(path[i, :2, :5], expected[:2, :5], atol=1e-3)


def test_grasping_agrees_with_mujoco_to_a_centimetre_over_a_hundred_steps(envs):
    state = envs["lift"].reset(np.arange(16))
    actions, path = _mjx(envs["lift"], state)
    for i in range(16):
        expected = _mujoco(np.asarray(state.physics.position[i], np.float64), actions[i])
        np.testing.assert_allclose(path[i, :, :3], expected[:, :3], atol=0.006)
        places = [p[:, 5:].reshape(STEPS, 3, 7)[..., :3] for p in (path[i], expected)]
        np.testing.assert_allclose(*places, atol=0.01)
        lifted = [p[-1, :, 2].max() for p in places]
        assert min(lifted) > 0.1


def test_poses_are_those_of_mujoco(envs):
    state = envs["lift"].reset(np.arange(16))
    _, path = _mjx(envs["lift"], state)
    model = physics.model(Bodies())
    data = mujoco.MjData(model)
    data.qpos[:] = path[0, -1]
    mujoco.mj_kinematics(model, data)
    poses = np.asarray(Bodies().poses(path[0, -1], state.start[0]))
    geoms = [model.geom(name).id for name in ("palm", "left", "right", *COLOURS)]
    np.testing.assert_allclose(poses[:, :3], data.geom_xpos[geoms], atol=1e-5)
    np.testing.assert_allclose(Bodies().sizes, model.geom_size[geoms], atol=1e-9)


def test_resting_blocks_stay_where_they_are(envs):
    state = envs["lift"].reset(np.arange(16))
    hold = np.asarray(state.physics.setpoint)
    start = moved = state.physics
    for _ in range(STEPS):
        moved = physics.compiled_step(Bodies())(moved, hold)
    np.testing.assert_allclose(moved.position[:, 5:], start.position[:, 5:], atol=1e-3)
