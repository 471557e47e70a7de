"""The compiled physics against MuJoCo's own, on the same models, states and controls.

MJX has MuJoCo's algorithms but for one: where two turned boxes touch, it finds other points. So
what is free, rests on the table or is held by parallel faces agrees to rounding, and a block that
is grasped aslant to centimetres, as sure as in 64 bits.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from sim.environments import physics
from sim.environments.bodies import COLOURS, OPEN, SUBSTEPS, Bodies, blocks
from sim.environments.experts import expert
from sim.environments.tabletop import Tabletop, TabletopState

STEPS = 200 // SUBSTEPS


def mujocos(bodies: Bodies, start: physics.Physics, actions: np.ndarray) -> np.ndarray:
    """Positions [n, t, nq] under the same controller over `mj_step`, in 64 bits."""
    model, paths = physics.model(bodies), []
    for i in range(len(actions)):
        data, path = mujoco.MjData(model), []
        data.qpos[:], data.qvel[:] = start.position[i], start.velocity[i]
        data.qacc_warmstart[:] = start.acceleration[i]
        setpoint = np.array(start.setpoint[i], np.float64)
        for action in actions[i]:
            goal = np.clip(action, (*physics.LOW, 0), (*physics.HIGH, 1))
            setpoint += np.clip(goal - setpoint, -np.array(physics.SPEED), physics.SPEED)
            data.ctrl[:3], data.ctrl[3:] = setpoint[:3], OPEN * (1 - setpoint[3])
            for _ in range(SUBSTEPS):
                mujoco.mj_step(model, data)
            path.append(data.qpos.copy())
        paths.append(path)
    return np.array(paths)


def settled(env: Tabletop, seeds: np.ndarray) -> TabletopState:
    """Fresh episodes whose blocks have sunk into the table as far as they will."""
    state, step = env.reset(seeds), physics.compiled_step(env.bodies)
    moved = jax.tree.map(lambda x: jnp.asarray(x, float), state.physics)
    for _ in range(4):
        moved = step(moved, moved.setpoint)
    return state._replace(physics=moved)


def demonstrated(env: Tabletop, state: TabletopState) -> tuple[np.ndarray, np.ndarray]:
    """The expert's actions [n, t, 4] and where they lead [n, t, nq]; no episode ends."""
    actions, path = [], []
    for _ in range(STEPS):
        action = jnp.asarray(expert(env, state), float)
        state = state._replace(physics=physics.compiled_step(env.bodies)(state.physics, action))
        actions.append(np.asarray(action))
        path.append(np.asarray(state.physics.position))
    return np.stack(actions, 1), np.stack(path, 1)


def test_200_steps_of_free_motion_and_resting_agree_with_mujoco_to_a_micrometre(envs):
    env, rng = envs["lift"], np.random.default_rng(0)
    state = settled(env, np.arange(16))
    places = rng.uniform((-0.15, -0.1, 0.08, 0), (0.15, 0.15, 0.2, 1), (16, STEPS // 8, 4))
    actions = np.repeat(places, 8, 1).astype(np.float32)
    moved, path = state.physics, []
    for action in actions.swapaxes(0, 1):
        moved = physics.compiled_step(env.bodies)(moved, action)
        path.append(np.asarray(moved.position))
    path = np.stack(path, 1)
    assert np.ptp(path[..., :3], axis=1).min() > 0.02, "the gripper moves"
    np.testing.assert_allclose(path, mujocos(env.bodies, state.physics, actions), atol=1e-6)


@pytest.mark.slow
def test_200_steps_of_pulling_drawers_agree_with_mujoco_to_five_micrometres(envs):
    env = envs["drawer"]
    state = settled(env, np.arange(16))
    actions, path = demonstrated(env, state)
    assert np.abs(path[:, -1, 5:] - path[:, 0, 5:]).max(1).min() > 0.02, "a drawer moves"
    np.testing.assert_allclose(path, mujocos(env.bodies, state.physics, actions), atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lift", "stack"])
def test_200_steps_of_grasping_turned_blocks_agree_with_mujoco_to_two_centimetres(envs, task):
    env = envs[task]
    state = settled(env, np.arange(16))
    actions, path = demonstrated(env, state)
    expected = mujocos(env.bodies, state.physics, actions)
    np.testing.assert_allclose(path[..., :3], expected[..., :3], atol=0.02)
    places = [np.asarray(blocks(p))[..., :3] for p in (path, expected)]
    np.testing.assert_allclose(*places, atol=0.02)
    assert min(p[..., 2].max((1, 2)).min() for p in places) > 0.06, "all are lifted in both"


@pytest.mark.slow
def test_in_64_bits_pulling_drawers_agrees_with_mujoco_to_a_tenth_of_a_micrometre():
    lines = (
        "import numpy as np",
        "from sim.environments.tabletop import Tabletop",
        "from tests.sim.environments.test_physics import demonstrated, mujocos, settled",
        "env = Tabletop('drawer', group_size=16)",
        "state = settled(env, np.arange(16))",
        "actions, path = demonstrated(env, state)",
        "assert path.dtype == np.float64",
        "off = np.abs(path - mujocos(env.bodies, state.physics, actions)).max((1, 2))",
        "print(np.median(off), off.max())",
    )
    child = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    median, worst = map(float, child.stdout.split()[-2:])
    assert median < 1e-12
    assert worst < 1e-7


@pytest.mark.gpu
def test_warp_on_the_gpu_agrees_with_xla_to_two_centimetres_while_lifting():
    pytest.importorskip("warp", reason="pip install 'mujoco-mjx[warp]'")
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU here")
    one, other = (Tabletop("lift", group_size=16, impl=impl) for impl in ("jax", "warp"))
    assert Tabletop().impl == "warp"
    state = one.reset(np.arange(16))
    same = other.reset(np.arange(16))
    for step in range(12):
        action = np.asarray(expert(one, state))[:, None]
        state, same = one.step_chunk(state, action)[0], other.step_chunk(same, action)[0]
        gap = np.abs(np.asarray(state.physics.position) - np.asarray(same.physics.position))
        assert gap[:, :5].max() < (2e-3 if step < 4 else 2e-2)
        assert np.asarray(blocks(gap))[..., :3].max() < 2e-2


def test_poses_are_those_of_mujoco(envs):
    for task, names in (
        ("lift", COLOURS),
        ("drawer", ("cabinet", *(f"{part}{i}" for part in ("drawer", "handle") for i in range(3)))),
    ):
        env = envs[task]
        state = env.reset(np.arange(16))
        state = state._replace(physics=state.physics._replace(position=_shaken(state)))
        model = physics.model(env.bodies)
        data = mujoco.MjData(model)
        data.qpos[:] = state.physics.position[0]
        mujoco.mj_kinematics(model, data)
        poses = np.array(env.scene(state).poses[0])
        if task == "drawer":  # poses are by colour, bodies from left to right
            order = np.argsort(np.asarray(state.start[0])[:, 0])
            poses[4:] = poses[4:].reshape(3, 3, 7)[:, order].reshape(9, 7)
        geoms = [model.geom(name).id for name in ("palm", "left", "right", *names)]
        np.testing.assert_allclose(poses[: len(geoms), :3], data.geom_xpos[geoms], atol=1e-5)
        np.testing.assert_allclose(
            env.bodies.sizes[: len(geoms)], model.geom_size[geoms], atol=1e-7
        )


def _shaken(state: TabletopState) -> np.ndarray:
    position = np.asarray(state.physics.position).copy()
    position[:, 3:5] -= (0.01, 0.02)
    return position


def test_resting_blocks_stay_where_they_are(envs):
    state = envs["lift"].reset(np.arange(16))
    hold = np.asarray(state.physics.setpoint)
    start = moved = state.physics
    for _ in range(STEPS):
        moved = physics.compiled_step(Bodies())(moved, hold)
    np.testing.assert_allclose(moved.position[:, 5:], start.position[:, 5:], atol=1e-3)


def test_warp_names_its_package_where_it_is_absent(monkeypatch):
    monkeypatch.setattr(physics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'mujoco-mjx\[warp\]'"):
        Tabletop(impl="warp")
    assert Tabletop().impl == "jax"
