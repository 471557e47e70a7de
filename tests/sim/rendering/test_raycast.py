"""The ray caster against MuJoCo's renderer, MuJoCo's rays and itself."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import mujoco
import numpy as np
import pytest

from sim.environments import physics
from sim.environments.bodies import Bodies
from sim.rendering.raycast import (
    Camera,
    Geom,
    Look,
    Poses,
    Views,
    depths,
    geoms_of,
    look_at,
    pictures,
    segmentation,
    views,
)

WITHOUT = (
    "MuJoCo renders neither with OSMesa nor with EGL here; on Debian: "
    "apt-get install libosmesa6 libegl1 libegl-mesa0 libgl1"
)
SOLIDS = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1"/>
    <geom name="shelf" type="plane" pos="-0.3 0.25 0.1" size="0.12 0.08 1" euler="15 20 0"/>
    <geom name="box" type="box" pos="0.05 0.2 0.1" size="0.06 0.04 0.08" euler="20 30 40"/>
    <geom name="sphere" type="sphere" pos="-0.02 -0.15 0.12" size="0.06"/>
    <geom name="capsule" type="capsule" pos="0.2 0.02 0.1" size="0.03 0.08" euler="40 -60 10"/>
    <geom name="standing" type="capsule" pos="-0.17 0.1 0.11" size="0.03 0.08"/>
    <geom name="cylinder" type="cylinder" pos="-0.15 -0.1 0.1" size="0.05 0.06" euler="-40 30 0"/>
    <geom name="rod" type="cylinder" pos="0.2 -0.15 0.05" size="0.02 0.09" euler="90 30 0"/>
    <geom name="ellipsoid" type="ellipsoid" pos="0.05 0 0.2" size="0.1 0.05 0.03" euler="10 20 70"/>
    <geom name="end" type="cylinder" pos="-0.02 0.04 0.03" size="0.05 0.02"/>
  </worldbody>
</mujoco>"""
ABOVE = Camera((0.15, -0.75, 0.75), (0.0, 0.03, 0.05), 38.0)
LOW = Camera((0.6, -0.6, 0.12), (0.0, 0.0, 0.12), 50.0)
"""Sees above the horizon."""
FRONT = Camera((0.0, -0.42, 0.62), (0.0, 0.06, 0.02), 32.0)
LIGHT = np.array((-0.35, -0.5, 0.79), np.float32) / np.linalg.norm((-0.35, -0.5, 0.79))
GREY = 0.5


@pytest.fixture(scope="module")
def solids() -> tuple[mujoco.MjModel, mujoco.MjData]:
    """Every primitive in the air, some above others."""
    model = mujoco.MjModel.from_xml_string(SOLIDS)
    return _at_rest(model, model.qpos0)


@pytest.fixture(scope="module")
def tabletop() -> tuple[mujoco.MjModel, mujoco.MjData]:
    """Two blocks on the table and one tilted in the air, under a half-closed gripper."""
    tilt = np.array((0.8, 0.3, -0.4, 0.33))
    rest = (np.cos(0.3), 0, 0, np.sin(0.3))
    blocks = ((-0.1, 0.0, 0.02, *rest), (0.02, -0.03, 0.1, *tilt / np.linalg.norm(tilt)))
    qpos = np.concatenate(((0.0, 0.05, 0.05, 0.03, 0.02), *blocks, (0.1, 0.06, 0.02, 1, 0, 0, 0)))
    model = physics.model(Bodies())
    return _at_rest(model, np.concatenate((qpos, model.qpos0[len(qpos) :])))


@pytest.fixture(scope="module")
def rendered(solids, tabletop, tmp_path_factory) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Geom ids and depths, [128, 128] each, that MuJoCo's renderer sees."""
    folder = tmp_path_factory.mktemp("scenes")
    shots = {
        "above": (*solids, ABOVE),
        "low": (*solids, LOW),
        "tabletop": (*tabletop, FRONT),
    }
    for name, (model, data, camera) in shots.items():
        away = np.subtract(camera.target, camera.position)
        distance = np.linalg.norm(away)
        free = {
            "lookat": list(camera.target),
            "distance": distance,
            "azimuth": np.degrees(np.arctan2(away[1], away[0])),
            "elevation": np.degrees(np.arcsin(away[2] / distance)),
        }
        mujoco.mj_saveModel(model, str(folder / f"{name}.mjb"), None)
        scene = {"qpos": data.qpos.tolist(), "camera": free, "fovy": camera.fovy}
        (folder / f"{name}.json").write_text(json.dumps(scene))
    script = Path(__file__).parent / "mujoco_renderer.py"
    for backend in ("osmesa", "egl"):
        done = subprocess.run(
            [sys.executable, str(script), str(folder), "128"],
            env=os.environ | {"MUJOCO_GL": backend},
            capture_output=True,
            text=True,
        )
        if done.returncode != 3:
            assert done.returncode == 0, done.stderr
            arrays = {name: np.load(folder / f"{name}.npz") for name in shots}
            return {name: (found["ids"], found["depths"]) for name, found in arrays.items()}
    pytest.skip(WITHOUT)


@pytest.mark.parametrize("shot", ["above", "low", "tabletop"])
def test_every_geom_is_where_mujocos_renderer_shows_it(shot, rendered, request):
    scene = request.getfixturevalue("tabletop" if shot == "tabletop" else "solids")
    camera = {"above": ABOVE, "low": LOW, "tabletop": FRONT}[shot]
    ids, far = rendered[shot]
    seen, distance = _cast(*scene, camera, 128)
    geoms = [geom for geom in np.unique(ids) if (ids == geom).sum() > 30]
    assert len(geoms) > 5
    for geom in geoms:
        ours, theirs = seen == geom, ids == geom
        iou = (ours & theirs).sum() / (ours | theirs).sum()
        assert iou >= 0.95, f"{shot}: geom {geom} '{scene[0].geom(geom).name}' has IoU {iou:.3f}"
    inside = (seen == ids) & (ids >= 0) & (far < 3)
    off = np.abs(distance[inside] / far[inside] - 1)
    assert np.quantile(off, 0.95) < 2e-3
    assert np.median(off) < 2e-4


def test_rays_meet_what_mujocos_rays_meet(solids, tabletop):
    for (model, data), camera in ((solids, ABOVE), (solids, LOW), (tabletop, FRONT)):
        seen, distance = _cast(model, data, camera, 48)
        geom, far, _ = _rays(model, data, camera, 48)
        same = seen == geom
        assert same.mean() > 0.997
        assert set(geom.ravel()) >= set(range(model.ngeom))
        met = same & (geom >= 0)
        np.testing.assert_allclose(distance[met], far[met], rtol=3e-5)


@pytest.mark.slow
def test_light_falls_as_mujocos_normals_say_and_shadows_where_its_rays_are_blocked(solids):
    model, data = solids
    _, far, normals = _rays(model, data, ABOVE, 48)
    lit, dark = (
        _grey(model, data, ABOVE, 48, samples=1, shadows=shadows).astype(int)
        for shadows in (False, True)
    )
    facing = np.maximum(normals @ LIGHT, 0)
    off = np.abs(lit - 255 * GREY * (0.45 + 0.55 * facing))
    assert (off < 1).mean() > 0.995
    points = np.array(ABOVE.position) + far[..., None] * _directions(ABOVE, 48)
    hit = np.zeros(1, np.int32)
    planes = [i for i, kind in enumerate(model.geom_type) if kind == mujoco.mjtGeom.mjGEOM_PLANE]
    checked = blocked = 0
    for at in np.argwhere((facing > 0.1) & (off < 1)):
        start = points[tuple(at)] + 1e-3 * normals[tuple(at)]
        mujoco.mj_ray(model, data, start, LIGHT.astype(float), None, 1, -1, hit, None)
        shadow = hit[0] >= 0 and hit[0] not in planes
        expected = round(255 * GREY * 0.45) if shadow else lit[tuple(at)]
        checked += abs(dark[tuple(at)] - expected) <= 1
        blocked += shadow
    count = ((facing > 0.1) & (off < 1)).sum()
    assert blocked > 100
    assert checked / count > 0.99


def test_a_box_in_the_air_darkens_the_floor_where_the_light_comes_from_behind_it():
    geoms = (Geom("box", (0.05, 0.05, 0.01)), Geom("plane", (0.0, 0.0)))
    frames = Poses.of(np.array(((0, 0, 0.2, 1, 0, 0, 0), (0, 0, 0, 1, 0, 0, 0)), np.float32))
    under = -0.2 * LIGHT / LIGHT[2]
    cameras = [
        Camera((x + 0.2, y - 0.3, 0.1), (x, y, 0.0), 2.0) for x, y in (under[:2], under[:2] + 0.12)
    ]
    look = Look(np.ones((2, 3), np.float32), LIGHT)
    shaded, sunny = np.asarray(_draw(geoms, frames, views(cameras), look, size=4, shadows=True))[0]
    assert (shaded == round(255 * 0.45)).all()
    np.testing.assert_allclose(sunny, 255 * (0.45 + 0.55 * LIGHT[2]), atol=1)


def test_a_camera_on_a_body_sees_what_a_fixed_one_at_its_place_sees(solids):
    geoms, frames = _scene(*solids)
    mounted = Camera((0.3, -0.5, 0.4), (0.0, 0.0, 0.1), 40.0, on=2, up=(1, 0, 1))
    frame = Poses.of(np.array(((0.1, 0.2, 0.3, 0.9, 0.1, -0.2, 0.3),), np.float32))
    turn, place = np.asarray(frame.rotation[0]), np.asarray(frame.position[0])
    still = Camera(
        *(tuple(place + turn @ np.array(x)) for x in (mounted.position, mounted.target)),
        40.0,
        up=tuple(turn @ np.array(mounted.up)),
    )
    bodies = Poses(frames.position[:2], frames.rotation[:2]).join(frame)
    both = np.asarray(_label(geoms, frames, views([mounted, still], bodies), size=48))[0]
    assert len(np.unique(both[0])) > 4
    assert (both[0] == both[1]).mean() > 0.999


@pytest.mark.slow
def test_an_environment_looks_the_same_beside_any_others(solids):
    geoms, frames = _scene(*solids)
    rng = np.random.default_rng(0)
    n, c = 4, 2
    moved = Poses(
        frames.position + rng.uniform(-0.02, 0.02, (n, len(geoms), 3)).astype(np.float32),
        np.broadcast_to(frames.rotation, (n, len(geoms), 3, 3)),
    )
    places = rng.uniform((-0.3, -0.9, 0.5), (0.3, -0.7, 0.8), (n, c, 3))
    seen = Views(look_at(places, np.zeros(3)), np.full((n, c), 40.0, np.float32))
    suns = look_at(rng.uniform((-1, -1, 1), (1, 1, 2), (n, 3)), np.zeros(3)).rotation[..., 2]
    looks = Look(
        rng.uniform(size=(n, len(geoms), 3)).astype(np.float32),
        suns,
        rng.uniform(0.3, 0.6, n).astype(np.float32),
        rng.uniform(size=(n, 3)).astype(np.float32),
    )
    draw = partial(_draw, geoms, size=24, shadows=True)
    together = np.asarray(draw(moved, seen, looks))
    assert together.shape == (n, c, 24, 24, 3)
    assert len({picture.tobytes() for picture in together.reshape(n * c, -1)}) == n * c
    for i in range(n):
        order = np.roll(np.arange(n), i)
        others = np.asarray(draw(*jax.tree.map(lambda x, o=order: x[o], (moved, seen, looks))))
        np.testing.assert_array_equal(others, together[order])
    alone = np.asarray(draw(*jax.tree.map(lambda x: x[:1], (moved, seen, looks))))[0]
    assert (np.abs(alone.astype(int) - together[0]) <= 1).mean() > 0.999
    one = draw(*jax.tree.map(lambda x: x[0], (moved, seen, looks)))
    np.testing.assert_array_equal(np.asarray(one)[0], alone)


@pytest.mark.slow
def test_frames_drawn_at_once_as_on_a_gpu_look_as_those_drawn_one_by_one(solids, monkeypatch):
    seen = np.stack([_grey(*solids, camera, 24, shadows=True) for camera in (ABOVE, LOW)])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    geoms, frames = _scene(*solids)
    look = Look(np.full((len(geoms), 3), GREY, np.float32), LIGHT)
    draw = jax.jit(partial(pictures, geoms, size=24, shadows=True))
    at_once = np.asarray(draw(frames, views([ABOVE, LOW]), look))[0, ..., 0]
    assert (np.abs(at_once.astype(int) - seen) <= 1).mean() > 0.999


def test_more_rays_a_pixel_soften_edges_and_keep_surfaces(tabletop):
    coarse, fine = (_grey(*tabletop, FRONT, 24, samples=s).astype(int) for s in (1, 3))
    assert len(np.unique(fine)) > len(np.unique(coarse))
    assert (np.abs(coarse - fine) <= 1).mean() > 0.8


def test_a_camera_sees_right_on_the_right_up_on_top_and_wide_where_pictures_are_wide():
    ball = Geom("sphere", (0.1,))
    camera = Camera((0, -2, 1), (0, 0, 1), 60.0)
    for place, (row, column) in (((0.8, 0, 1), (7.5, 15)), ((0, 0, 1.8), (2, 9.5))):
        frames = Poses.of(np.array(((*place, 1, 0, 0, 0),), np.float32))
        seen = np.asarray(segmentation((ball,), frames, views([camera]), (16, 20)))[0, 0]
        at = np.argwhere(seen == 0)
        assert seen.shape == (16, 20)
        assert np.abs(at.mean(0) - (row, column)).max() < 0.6
        assert (seen[seen != 0] == -1).all()


def test_a_geom_or_camera_that_cannot_be_cast_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="expected 3 positive numbers"):
        Geom("box", (0.1, 0.1))
    with pytest.raises(ValueError, match="'mesh' cannot be rendered; expected one of"):
        Geom("mesh", (0.1,))
    with pytest.raises(ValueError, match="along its up"):
        Camera((0, 0, 1), (0, 0, 0), 40.0)
    with pytest.raises(ValueError, match="body 1, but `views` was given 0 bodies"):
        views([Camera((0, 1, 1), (0, 0, 0), 40.0, on=1)])
    frames = Poses.of(np.array([(0, 0, 0, 1, 0, 0, 0)] * 2, float))
    with pytest.raises(ValueError, match="2 frames for 1 geoms"):
        segmentation((Geom("sphere", (0.1,)),), frames, views([FRONT]), 4)


def _at_rest(model: mujoco.MjModel, qpos: np.ndarray) -> tuple[mujoco.MjModel, mujoco.MjData]:
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    mujoco.mj_forward(model, data)
    return model, data


def _scene(model: mujoco.MjModel, data: mujoco.MjData) -> tuple[tuple[Geom, ...], Poses]:
    frames = Poses(
        data.geom_xpos.astype(np.float32), data.geom_xmat.reshape(-1, 3, 3).astype(np.float32)
    )
    return geoms_of(model), frames


_label, _measure = (
    jax.jit(function, static_argnames=("geoms", "size")) for function in (segmentation, depths)
)
_draw = jax.jit(pictures, static_argnames=("geoms", "size", "samples", "shadows"))


def _cast(
    model: mujoco.MjModel, data: mujoco.MjData, camera: Camera, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Our geom ids and depths, [size, size]."""
    geoms, frames = _scene(model, data)
    label, measure = (f(geoms, frames, views([camera]), size=size) for f in (_label, _measure))
    return np.asarray(label)[0, 0], np.asarray(measure)[0, 0]


def _grey(
    model: mujoco.MjModel, data: mujoco.MjData, camera: Camera, size: int, **how
) -> np.ndarray:
    """A picture [size, size] in which everything is of one grey."""
    geoms, frames = _scene(model, data)
    look = Look(np.full((len(geoms), 3), GREY, np.float32), LIGHT)
    return np.asarray(_draw(geoms, frames, views([camera]), look, size=size, **how))[0, 0, :, :, 0]


def _directions(camera: Camera, size: int) -> np.ndarray:
    """Rays through the pixels' middles, one metre along the camera's axis, [size, size, 3]."""
    forward = np.subtract(camera.target, camera.position)
    forward = forward / np.linalg.norm(forward)
    right = np.cross(forward, (0, 0, 1))
    right /= np.linalg.norm(right)
    at = ((np.arange(size) + 0.5) / size * 2 - 1) * np.tan(np.radians(camera.fovy) / 2)
    return forward + at[:, None] * right - at[:, None, None] * np.cross(right, forward)


def _rays(
    model: mujoco.MjModel, data: mujoco.MjData, camera: Camera, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Geom ids, depths and normals that MuJoCo's rays through the pixels' middles meet."""
    directions = _directions(camera, size)
    geom, normal = np.full(1, -1, np.int32), np.zeros(3)
    met = []
    for ray in directions.reshape(-1, 3):
        far = mujoco.mj_ray(model, data, np.array(camera.position), ray, None, 1, -1, geom, normal)
        met.append((geom[0], far, *normal))
    found = np.array(met).reshape(size, size, 5)
    return found[..., 0].astype(int), found[..., 1], found[..., 2:]
