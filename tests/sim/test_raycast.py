"""The ray caster against MuJoCo's rays, and the light on its pictures."""

import jax
import mujoco
import numpy as np
import pytest

from sim import physics
from sim.raycast import Camera, cast, pictures
from sim.tabletop import COLOURS, FRONT

SIZES = np.asarray(physics.SIZES, np.float32)


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
    rays = FRONT.rays(48)[0]
    origin = np.array(FRONT.position)
    distance, face = jax.jit(lambda p: cast(p, SIZES, origin.astype(np.float32), rays))(
        physics.poses(position)
    )
    geoms = [model.geom(n).id for n in ("palm", "left", "right", *physics.COLOURS, "table")]
    hit = np.zeros(1, np.int32)
    expected = []
    for ray in rays.astype(np.float64):
        far = mujoco.mj_ray(model, data, origin, ray, None, 1, -1, hit, None)
        expected.append((far, geoms.index(hit[0])))
    far, body = np.array(expected).T
    same = np.asarray(face) // 6 == body
    assert set(body) == set(range(7)), "the scene shows everything"
    assert same.mean() > 0.998
    np.testing.assert_allclose(np.asarray(distance)[same], far[same], rtol=2e-5)


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


def test_a_camera_sees_right_on_the_right_and_far_on_top():
    rays = FRONT.rays(4)[0].reshape(4, 4, 3)
    assert np.all(np.diff(rays[..., 0], axis=1) > 0)
    assert np.all(np.diff(rays[..., 2], axis=0) < 0)
    np.testing.assert_allclose(np.linalg.norm(rays, axis=-1), 1, atol=1e-6)


def _draw(position: np.ndarray, camera: Camera, samples: int = 1):
    return pictures(physics.poses(position)[None], SIZES, COLOURS, camera, 24, samples)
