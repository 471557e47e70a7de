"""The arm against MuJoCo's and numpy's kinematics and MuJoCo's physics, and what its controls,
episodes, experts and cameras hold to."""

import math

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from sim.environments import arm_control, arm_model, arm_physics
from sim.environments.arm import Arm
from sim.environments.arm_model import HOME, LIMITS, SPEEDS, STEP
from sim.environments.arm_tasks import LIFTED
from sim.environments.bodies import COLOURS
from sim.environments.device_slots import DeviceSlots
from sim.protocol import EVAL_SEEDS, Start
from sim.suites import load_suite

pytestmark = pytest.mark.slow

LANES = 16
SEEDS = EVAL_SEEDS[:LANES]


@pytest.fixture(scope="module")
def arms() -> dict[str, Arm]:
    """One per task and control; all share one compiled physics."""
    return {
        "lift": Arm("lift", group_size=LANES, image_size=32),
        "joint": Arm("reach", group_size=LANES, image_size=32, control="joint"),
        "delta": Arm("reach", group_size=LANES, image_size=32, control="delta"),
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

    @jax.jit
    @jax.vmap
    def round_trips(action):
        pose, delta = arm_control.pose_of(action), 0.01 * action[::-1]
        there = arm_control.moved_by(pose, delta)
        return arm_control.action_of(pose), 100 * arm_control.delta_between(pose, there)[::-1]

    for back in round_trips(actions):
        np.testing.assert_allclose(back, actions, atol=1e-4)
    down = _matrix(arm_control.pose_of(jnp.zeros(6))[3:])
    np.testing.assert_allclose(down, np.diag((1, -1, -1)), atol=1e-6)


def _swung(start: np.ndarray, count: int, steps: int) -> np.ndarray:
    """Smooth joint targets [n, t, 8] above the table, the gripper opening and closing."""
    rng = np.random.default_rng(0)
    time = np.arange(steps)[:, None] * STEP
    rate, phase = rng.uniform(0.15, 0.6, (2, count, 1, 8))
    wave = np.sin(2 * math.pi * rate * time + phase) - np.sin(phase)
    wave[..., 1] = -np.abs(wave[..., 1])  # up
    wave[..., 3] = np.abs(wave[..., 3])
    return (start[:, None] + 0.35 * wave).astype(np.float32)


def _moved(env: Arm, state, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Targets of the servos and positions [t, n, …] after each step, no episode ending."""
    physics, setpoints, positions = state.physics, [], []
    for action in actions.swapaxes(0, 1):
        setpoints.append(env._command(physics.setpoint, action))
        physics = arm_physics.compiled_move()(physics, setpoints[-1])
        positions.append(physics.position)
    return np.asarray(setpoints), np.asarray(positions)


def test_joint_control_agrees_with_mujoco_over_two_hundred_steps(arms):
    env = arms["joint"]
    state = env.reset(SEEDS)
    actions = _swung(np.asarray(state.physics.setpoint), LANES, 200)
    setpoints, path = _moved(env, state, actions)
    assert np.ptp(path, axis=0)[:, :7].max(0).min() > 0.2, "every joint was moved"
    model, substeps = arm_model.model(), arm_model.SUBSTEPS
    for i in range(4):
        data = mujoco.MjData(model)
        data.qpos[:] = np.asarray(state.physics.position)[i]
        before = data.qpos[:9].copy()
        for setpoint, position in zip(setpoints[:, i], path[:, i], strict=True):
            after = np.append(setpoint[:7], [arm_model.OPEN * (1 - setpoint[7])] * 2)
            for k in range(substeps):
                data.ctrl[:] = before + (after - before) * ((k + 1) / substeps)
                mujoco.mj_step(model, data)
            before = after
            np.testing.assert_allclose(position[:7], data.qpos[:7], atol=2e-5)  # radians
            np.testing.assert_allclose(position[7:9], data.qpos[7:9], atol=1e-6)  # metres
            np.testing.assert_allclose(position[9:], data.qpos[9:], atol=5e-4)  # at rest


def test_whatever_joints_are_told_the_arm_keeps_its_limits_and_speeds(arms):
    env = arms["joint"]
    state = env.reset(SEEDS)
    wild = np.random.default_rng(0).uniform(-9, 9, (LANES, 3, 8)).repeat(20, 1)
    wild[..., 1] = -9  # up, off the table
    setpoints, path = _moved(env, state, wild.astype(np.float32))
    joints, (low, high) = path[..., :7], LIMITS.T
    targets = setpoints[..., :7]
    assert np.all((targets > low - 1e-6) & (targets < high + 1e-6))
    assert np.all((joints > low - 0.01) & (joints < high + 0.01))
    assert np.abs(np.diff(targets, axis=0) / STEP / SPEEDS).max() < 1.0001
    assert np.abs(np.diff(joints, axis=0) / STEP / SPEEDS).max() < 1.1
    assert np.all((setpoints[..., 7] >= 0) & (setpoints[..., 7] <= 1))


def test_poses_are_those_of_mujoco(arms):
    state = arms["joint"].reset(SEEDS)
    model = arm_model.model()
    position = np.array(state.physics.position)
    position[:, 7:9] = 0.013, 0.027
    found = np.asarray(jax.jit(jax.vmap(arm_physics.poses))(position))
    named = ("left", "right", *COLOURS)
    geoms = [g for g in range(1, model.ngeom) if not model.geom(g).name]
    geoms += [model.geom(name).id for name in named]
    for i in range(4):
        data = mujoco.MjData(model)
        data.qpos[:] = position[i]
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(found[i, :, :3], data.geom_xpos[geoms], atol=1e-5)
        turns = np.stack([_matrix(q) for q in found[i, :, 3:]])
        np.testing.assert_allclose(turns, data.geom_xmat[geoms].reshape(-1, 3, 3), atol=1e-5)


@pytest.mark.parametrize("name", ["lift", "joint"])
def test_experts_reach_the_goal_and_its_step_reports_it(arms, name):
    env = arms[name]
    state = env.reset(SEEDS)
    low, high = np.array(env.action_range).T
    over, success = np.zeros((2, LANES), bool)
    for _ in range(env.max_steps):
        action, goal = np.asarray(env.expert(state)), np.asarray(env.goal(state))
        assert np.all((action >= low - 1e-5) & (action <= high + 1e-5))
        state, happened = env.step_chunk(state, action[:, None])
        done, out = np.asarray(happened.terminated)[:, 0], np.asarray(happened.truncated)[:, 0]
        assert np.array_equal(np.asarray(happened.achieved)[np.arange(LANES), 0, goal], done)
        assert np.array_equal(np.asarray(happened.reward)[:, 0], done)
        assert not np.any(done & out)
        if env.kind == "lift":
            heights = np.asarray(happened.scene)[np.arange(LANES), 0, -3 + goal, 2]
            assert np.array_equal(heights > LIFTED, done), "terminal scene, before the new start"
        assert np.all(np.asarray(state.step)[done | out] == 0), "a fresh episode"
        success |= done & ~over
        over |= done | out
        if over.all():
            break
    assert success.mean() >= 0.97


def test_slots_of_an_arm_are_demonstrated_in_by_its_expert(arms):
    env = arms["delta"]
    slots = DeviceSlots(env, LANES, Arm.expert)
    for slot in range(LANES):
        slots.begin(slot, Start("arm-reach-delta", SEEDS[slot]))
    assert [outcome.observation.images.shape for outcome in slots.poll()] == [
        (2, 32, 32, 3)
    ] * LANES
    for slot in range(LANES):
        slots.demonstrate(slot, env.max_steps)
    outcomes = slots.poll()
    assert np.mean([outcome.success for outcome in outcomes]) >= 0.97
    assert all(outcome.actions.shape == (len(outcome.reward), 7) for outcome in outcomes)


def test_suites_name_every_task_and_control():
    assert load_suite("arm").tasks == ("arm-reach", "arm-lift")
    assert load_suite("arm-lift-joint").tasks == ("arm-lift-joint",)
    with pytest.raises(ValueError, match=r"Unknown suite 'arm-fly'; choose one of \['arm', "):
        load_suite("arm-fly")


def test_running_out_of_time_truncates_and_starts_afresh(arms):
    env = arms["joint"]
    start = env.reset(SEEDS)
    late = start._replace(step=np.full(LANES, env.max_steps - 1, np.int32))
    hold = np.asarray(start.physics.setpoint)[:, None]
    state, happened = env.step_chunk(late, hold)
    assert np.all(happened.truncated)
    assert not np.any(happened.terminated)
    assert np.array_equal(state.episode, np.ones(LANES))
    assert np.array_equal(state.seed, start.seed)
    before, after = np.asarray(start.physics.position), np.asarray(state.physics.position)
    assert np.abs(after - before)[:, 9:].max(1).min() > 1e-3, "another draw"


def test_an_episode_is_the_same_in_any_batch(arms):
    env = arms["lift"]
    rng = np.random.default_rng(0)
    low, high = (0.3, -0.2, 0.1, 0, 0, -1, 0), (0.6, 0.2, 0.4, 0, 0, 1, 1)
    actions = rng.uniform(low, high, (LANES + 3, 3, 7)).astype(np.float32)
    seeds = np.arange(LANES + 3)
    together = env.step_chunk(env.reset(seeds), actions)
    seen = env.observe(together[0])
    for i in (0, LANES + 2):
        alone = env.step_chunk(env.reset(seeds[i : i + 1]), actions[i : i + 1])
        assert _equal(alone, jax.tree.map(lambda x, i=i: x[i : i + 1], together))
        assert _equal(env.observe(alone[0]), jax.tree.map(lambda x, i=i: x[i : i + 1], seen))
    assert len(np.unique(np.asarray(env.reset(seeds).physics.position), axis=0)) == len(seeds)


def test_a_traced_program_acts_and_sees_as_the_protocol_does(arms, monkeypatch):
    def teleported(physics, setpoint):
        arm = setpoint[:7], physics.position[7:]
        return physics._replace(position=jnp.concatenate(arm), setpoint=setpoint)

    monkeypatch.setattr(arm_physics, "moved", teleported)
    monkeypatch.setattr(arm_physics, "compiled_move", lambda: jax.jit(jax.vmap(teleported)))
    env = arms["lift"]
    state = env.reset(SEEDS)
    late = state._replace(step=np.full(LANES, env.max_steps - 2, np.int32))
    actions = np.repeat(np.asarray(env.expert(state))[:, None], 4, 1)
    both = jax.jit(env.pure_step)(late, actions), env.step_chunk(late, actions)
    for traced, called in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(traced, called, atol=1e-5)
    assert np.array_equal(np.asarray(both[0][1].truncated).sum(1), np.ones(LANES))
    assert _equal(jax.jit(env.pure_reset)(np.asarray(SEEDS, np.uint32)), state)
    assert _equal(jax.jit(env.pure_observe)(state).images, env.observe(state).images)


def test_both_cameras_show_every_block_somewhere_and_the_wrist_moves_with_the_hand(arms):
    env = arms["lift"]
    state = env.reset(SEEDS)
    seen = np.asarray(env.observe(state).images)
    assert seen.shape == (LANES, 2, 32, 32, 3)
    for block in range(3):
        position = np.array(state.physics.position)
        position[:, 11 + 7 * block] = -1.0  # under the table
        moved = state._replace(physics=state.physics._replace(position=position))
        changed = np.any(np.asarray(env.observe(moved).images) != seen, axis=(2, 3, 4))
        assert changed[:, 0].all(), "the front camera sees each block"
        assert changed[:, 1].any()
    fingers = seen[:, 1, -4:].astype(int).sum(-1) < 160
    assert fingers.any((1, 2)).all(), "dark at the lower edge wherever the hand is"


def test_people_see_the_arm_move(arms):
    env = arms["lift"]
    scenes = np.asarray(env.scene(env.reset(SEEDS[:2]))).reshape(2, 1, 16, 7)
    film = env.render(scenes, 24)
    assert film.shape == (2, 1, 24, 24, 3)
    assert film.dtype == np.uint8
    assert np.any(film[0] != film[1])


def test_bad_tasks_controls_seeds_and_actions_are_named(arms):
    with pytest.raises(ValueError, match="no arm task 'fly'"):
        Arm("fly")
    with pytest.raises(ValueError, match="no arm control 'torque'"):
        Arm("lift", control="torque")
    env = arms["lift"]
    with pytest.raises(ValueError, match="arm-lift: seeds must lie in"):
        env.reset(np.array([-1]))
    actions = np.zeros((LANES, 2, 7))
    actions[3, 1, 2] = np.nan
    with pytest.raises(ValueError, match="action 'z' of environment 3 at step 1"):
        env.step_chunk(env.reset(SEEDS), actions)
    with pytest.raises(ValueError, match=rf"shape \[{LANES}, steps, 7\], got \({LANES}, 2, 8\)"):
        env.step_chunk(env.reset(SEEDS), np.zeros((LANES, 2, 8)))
