"""Sizes of Diffusion Policy: each option makes a model that learns and acts, every parameter has a
sharding, and sizes that do not fit are refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.families.diffusion.model import DiffusionConfig
from models.families.diffusion.noise import NoiseConfig
from models.families.diffusion.presets import PRESETS
from models.families.diffusion.unet import UnetConfig
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.packed_batch import most_images, pack, pictures_by_sample
from models.layers.vision.resnet import ResnetConfig
from models.sharding import shardings
from parallel.mesh import MeshConfig, make_mesh

SMALL = partial(
    DiffusionConfig,
    resnet=ResnetConfig(norm="group", width=16),
    unet=UnetConfig((8, 16), norm_groups=4, time_width=8),
    noise=NoiseConfig(8),
    keypoints=3,
    image_size=(32, 40),
    state_dim=3,
    action_dim=2,
    horizon=8,
    action_steps=4,
    euler_steps=8,
)


def batch_of(config):
    """Two samples of a robot, the second of which begins an episode, in a row."""
    cameras = tuple(f"camera{i}" for i in range(config.cameras))
    robot = Embodiment("robot", cameras, Normalizer.identity(3), Normalizer.identity(2))
    processor, draw = config.processor([robot]), np.random.default_rng(0)
    shape = (config.cameras, config.observations, *config.pictures[0].shape, 3)
    samples = []
    for number in range(2):
        shown = draw.integers(0, 256, shape).astype(np.uint8)
        past = {name: list(x[1:]) for name, x in zip(cameras, shown, strict=True)}
        past["state"] = list(draw.normal(size=(config.observations - 1, 3)).astype(np.float32))
        if number:
            past = {name: [x[0]] * len(x[1:]) for name, x in zip(cameras, shown, strict=True)}
            past["state"] = [np.ones(3, np.float32)] * (config.observations - 1)
        now, state = [x[0] for x in shown], np.ones(3, np.float32)
        chunk = np.zeros((config.horizon, 2), np.float32)
        past = past if config.observations > 1 else {}
        samples.append(processor.sample(now, state, "", actions=chunk, past=past, id=number))
    empty = config.layout(prefix=0, samples=1, images=0)
    images = most_images(samples, empty) * 3
    return pack([samples], config.layout(prefix=12, samples=3, images=images))


OPTIONS = [
    {"observations": 1},
    {"observations": 3, "cameras": 2, "separate": False},
    {"cameras": 2, "resize": (24, 28), "crop_ratio": 0.9, "resnet": ResnetConfig(norm="running")},
    {"crop": (30, 31), "chunks": 3, "picture_scales": ()},
    {"resnet": ResnetConfig("resnet50", "running", 16), "environment": 2},
    {"noise": NoiseConfig(8, "sigmoid", sampler="ddim", predicts="sample", clip=0.0)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_each_option_makes_a_model_that_learns_and_acts(options):
    config = SMALL(**options)
    model, batch = config.build(), batch_of(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    total, count = jax.eval_shape(model.loss, params, batch, jax.random.key(1))
    assert total.shape == count.shape == ()
    noise = jax.ShapeDtypeStruct((1, 3, 8, 2), jnp.float32)
    assert jax.eval_shape(model.sample_actions, params, batch, noise).shape == noise.shape


def test_pictures_stand_by_sample_camera_and_time_the_oldest_first():
    config = SMALL(observations=3, cameras=2)
    batch = batch_of(config)
    pictures, present = pictures_by_sample(batch, 2)
    assert present[0, :2].all()
    assert not present[0, 2].any()
    shape = (2, 3, *config.pictures[0].shape, 3)
    first = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    np.testing.assert_array_equal(pictures[0, 0], first[:, ::-1])
    assert (np.asarray(pictures[0, 1]) == np.asarray(pictures[0, 1][:, :1])).all(), "repeated"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_of_a_preset_is_sharded_by_one_rule(preset):
    model, mesh = PRESETS[preset].model.build(), make_mesh(MeshConfig(fsdp=8), jax.devices()[:8])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    placed = jax.tree.leaves(shardings(shapes, model.sharding_rules, mesh))
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    kept = sum(n for n, x in zip(sizes, placed, strict=True) if x.is_fully_replicated)
    assert kept < 0.1 * sum(sizes) or preset != "diffusion"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"crop": (33, 40)}, r"crop \(33, 40\) for pictures of \(32, 40\)"),
        ({"crop": (30,)}, r"give heights and widths, or \(\), and a ratio up to 1"),
        ({"crop_ratio": 0.0}, "crop_ratio 0.0"),
        ({"environment": 4}, "model.environment is 4; expected a whole number from 0 to 3"),
        ({"cameras": 3, "picture_scales": (Normalizer.identity(3),) * 2}, "are 2 for 3 cameras"),
        ({"euler_steps": 9}, "model.euler_steps is 9; expected a whole number from 1 to 8"),
        ({"observations": 9}, "model.observations is 9; expected a whole number from 1 to 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, wrong):
    with pytest.raises(ValueError, match=wrong):
        SMALL(**options)


def test_widths_that_do_not_fit_are_refused():
    for sizes in ({"widths": (12, 16)}, {"kernel": 4}, {"time_width": 3}, {"widths": ()}):
        with pytest.raises(ValueError, match="give multiples of norm_groups"):
            UnetConfig(**sizes)


def test_a_robot_with_other_cameras_is_refused():
    config = SMALL(cameras=2)
    robot = Embodiment("arm", ("front",), Normalizer.identity(3), Normalizer.identity(2))
    with pytest.raises(ValueError, match=r"'arm' has cameras \['front'\].* --model.cameras 1"):
        config.check_processor(config.processor([robot]))
