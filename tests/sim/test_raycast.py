"""The ray caster against MuJoCo's rays, and the light on its pictures."""

from functools import partial

import jax
import mujoco
import numpy as np
import pytest

from sim import physics
from sim.raycast import Camera, Frames, Look, depths, geoms_of, pictures, segmentation, views
from sim.tabletop import COLOURS, FRONT

NAMES = ("palm", "left", "right", *physics.COLOURS, "table")


@pytest.fixture(scope="module")
def position() -> np.ndarray:
    """Two blocks on the table and one tilted in the air, under a half-closed gripper."""
    tilt = np.array((0.8, 0.3, -0.4, 0.33))
    rest = (np.cos(0.3), 0, 0, np.sin(0.3))
    blocks = ((-0.1, 0.0, 0.02, *rest), (0.02, -0.03, 0.1, *tilt / np.linalg.norm(tilt)))
    return np.concatenate(
        ((0.0, 0.05, 0.05, 0.03, 0.02), *blocks, (0.1, 0.06, 0.02, 1, 0, 0, 0))
    ).astype(np.float32)


def test_rays_meet_what_mujoco_says_at_its_distance(position):
    model = physics.model()
    data = mujoco.MjData(model)
    data.qpos[:] = position
    mujoco.mj_forward(model, data)
    geoms, frames, _ = _tabletop(position)
    seen = views([FRONT])
    body = np.asarray(jax.jit(partial(segmentation, geoms, size=48))(frames, seen)).ravel()
    distance = np.asarray(jax.jit(partial(depths, geoms, size=48))(frames, seen)).ravel()
    right, up, back = np.asarray(seen.frames.rotation[0], np.float64).T
    at = ((np.arange(48) + 0.5) / 24 - 1) * np.tan(np.radians(FRONT.fovy) / 2)
    rays = (at[:, None] * right - at[:, None, None] * up - back).reshape(-1, 3)
    hit = np.zeros(1, np.int32)
    expected = []
    for ray in rays:
        far = mujoco.mj_ray(model, data, np.array(FRONT.position), ray, None, 1, -1, hit, None)
        expected.append((far, [model.geom(n).id for n in NAMES].index(hit[0])))
    far, meant = np.array(expected).T
    same = body == meant
    assert set(meant) == set(range(7)), "the scene shows everything"
    assert same.mean() > 0.998
    np.testing.assert_allclose(distance[same], far[same], rtol=2e-5)


def test_faces_are_lit_by_their_direction(position):
    from_above = Camera((0.1, 0.0599, 0.6), (0.1, 0.06, 0.0), 4.0)
    seen = np.asarray(_draw(position, from_above))[0]
    top = COLOURS[5] * 255
    np.testing.assert_allclose(seen / top, (0.45 + 0.55 * 0.79), atol=0.03)
    from_front = Camera((0.1, -0.3, 0.2), (0.1, 0.04, 0.02), 1.0)
    np.testing.assert_allclose(np.asarray(_draw(position, from_front))[0] / top, 0.725, atol=0.03)


def test_more_rays_a_pixel_soften_edges_and_keep_surfaces(position):
    coarse, fine = (np.asarray(_draw(position, FRONT, samples=s))[0] for s in (1, 3))
    assert len(np.unique(fine.reshape(-1, 3), axis=0)) > len(
        np.unique(coarse.reshape(-1, 3), axis=0)
    )
    assert (np.abs(coarse.astype(int) - fine).max(-1) <= 1).mean() > 0.8


def _tabletop(position: np.ndarray):
    model = physics.model()
    geoms = geoms_of(model, tuple(model.geom(name).id for name in NAMES))
    table = np.array((0, 0, 0, 1, 0, 0, 0), np.float32)
    frames = Frames.of(np.concatenate((physics.poses(position), table[None])))
    return geoms, frames, Look(COLOURS)


def _draw(position: np.ndarray, camera: Camera, samples: int = 1):
    geoms, frames, look = _tabletop(position)
    return pictures(geoms, frames, views([camera]), look, 24, samples)[:, 0]
