"""Images of the tabletop's cameras, and variation between episodes where it is asked for."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sim.environments.bodies import BLOCK, DISTRACTOR, Bodies
from sim.environments.grouped import episode_key
from sim.environments.scenery import (
    CAMERAS,
    VARIED,
    Randomisation,
    Scene,
    _colours,
    _look,
)
from sim.environments.tabletop import Tabletop
from sim.environments.tasks import TASKS

SEEDS = np.arange(6)


@cache
def _env(random: Randomisation) -> Tabletop:
    return Tabletop("lift", 24, tuple(CAMERAS), random, group_size=8)


def pictures(random: Randomisation, scene: Scene, **changes) -> np.ndarray:
    return np.int32(_env(random).pictures(scene._replace(**changes)))


@pytest.fixture(scope="module")
def scene() -> Scene:
    env = Tabletop("lift", group_size=8)
    return env.scene(env.reset(SEEDS))


def test_without_randomisation_a_picture_is_its_bodies_whatever_the_episode(scene):
    usual = pictures(Randomisation(), scene)
    assert usual.shape == (6, 2, 24, 24, 3)
    assert np.array_equal(usual, pictures(Randomisation(), scene, seed=scene.seed + 9))


@pytest.mark.parametrize(
    "random",
    [
        Randomisation(colours=0.2),
        Randomisation(camera=0.05),
        Randomisation(light=0.4),
        Randomisation(shadows=True),
        Randomisation(texture=0.3),
    ],
    ids=("colours", "camera", "light", "shadows", "texture"),
)
def test_each_randomisation_changes_every_camera_and_nothing_but_an_episode_decides_it(
    scene, random
):
    usual, seen = pictures(Randomisation(), scene), pictures(random, scene)
    assert np.all(np.any(seen != usual, axis=(2, 3, 4)))
    assert np.array_equal(seen, pictures(random, scene))
    alone = Scene(*(x[4:5] for x in scene))
    assert np.array_equal(seen[4:5], pictures(random, alone))
    for changes in ({"seed": scene.seed + 9}, {"episode": scene.episode + 1}):
        differs = np.any(pictures(random, scene, **changes) != seen, axis=(1, 2, 3, 4))
        assert np.all(differs != random.shadows)


def test_the_wrists_camera_moves_with_the_gripper_and_the_fronts_stays(scene):
    poses = np.array(scene.poses)
    poses[..., :2] += (0.03, -0.02)
    before, after = pictures(Randomisation(), scene), pictures(Randomisation(), scene, poses=poses)
    off = np.abs(after - before).mean((2, 3, 4))
    assert off[:, 1].max() < 0.5, "all moved alike, on a table without end"
    assert off[:, 0].min() > 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_distractors_lie_in_view_and_touch_nothing(task):
    env = Tabletop(task, random=Randomisation(distractors=3), group_size=64)
    poses = np.asarray(env.scene(env.reset(np.arange(64))).poses)
    others, things = poses[:, -3:, :2], poses[:, -6:-3, :2]
    apart = np.linalg.norm(others[:, :, None] - things[:, None], axis=-1)
    assert apart.min() > np.sqrt(2) * (BLOCK + DISTRACTOR)
    among = np.linalg.norm(others - np.roll(others, 1, 1), axis=-1)
    assert among.min() > 2 * np.sqrt(2) * DISTRACTOR
    usual = replace(env.task.bodies, distractors=0)
    assert env.bodies.nq == usual.nq + 21
    without = np.asarray(Tabletop(task, group_size=64).reset(np.arange(64)).physics.position)
    together = np.asarray(env.reset(np.arange(64)).physics.position)[:, : usual.nq]
    assert np.array_equal(together, without), "the task itself is the same"
    assert np.abs(others).max() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("drawers", [False, True])
def test_more_distractors_change_no_colour_of_varied_starts(drawers):
    """Plain varied starts look as they always have."""
    for seed in range(1_000_000_000, 1_000_000_004):
        key = episode_key(jnp.uint32(seed), jnp.int32(0))

        def painted(count, key=key):
            bodies = Bodies(distractors=count, drawers=drawers)
            random = replace(VARIED, distractors=count)
            return _colours(bodies), np.asarray(_look(key, _colours(bodies), random).colours)

        plain, found = painted(2)
        draws = jax.random.uniform(jax.random.fold_in(key, 5), plain.shape)
        np.testing.assert_array_equal(found, jnp.clip(plain + 0.1 * (2 * draws - 1), 0, 1))
        for count in (0, 1, 3):
            other = painted(count)[1]
            things = len(plain) - 3 + min(count, 2)
            np.testing.assert_array_equal(other[:things], found[:things])
            np.testing.assert_array_equal(other[-1], found[-1])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"distractors": 4}, r"distractors is 4, expected 0 … 3"),
        ({"colours": -0.1}, r"colours is -0.1, expected 0 … 0.3"),
        ({"light": 0.9}, r"light is 0.9, expected 0 … 0.5"),
        ({"texture": 0.5}, r"texture is 0.5, expected 0 … 0.4"),
    ],
)
def test_randomisation_out_of_range_is_named(bad, says):
    with pytest.raises(ValueError, match=says):
        Randomisation(**bad)


def test_a_camera_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"'top'.*observation.images.wrist"):
        Tabletop(cameras=("top",))
