"""A ResNet has torchvision's tensors, each once, and pictures scaled by their own camera."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from models.checkpoints.layout import their_arrays
from models.checkpoints.rename import Table
from models.checkpoints.torch_rules import SEQUENTIAL, resnet
from models.inputs.embodiment import Normalizer
from models.layers.functional import Functional
from models.layers.vision.resnet import Resnet, ResnetConfig, standardised

COUNTS = {
    "resnet18": (20, 2),
    "resnet34": (36, 2),
    "resnet50": (53, 3),
    "resnet101": (104, 3),
    "resnet152": (155, 3),
}
"""Convolutions of torchvision's models, and how many a block has."""


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("norm", "leaves"), [("frozen", 5), ("running", 6), ("group", 3)])
def test_each_parameter_has_one_of_torchvisions_tensors(name, norm, leaves):
    config = ResnetConfig(name, norm, 16)
    made = Functional(lambda rngs: Resnet(config, "float32", rngs))
    flat = flatten_dict({"tower": jax.eval_shape(made.init, jax.random.key(0))}, sep="/")
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    rules = Table(resnet(config, "tower", "model.", SEQUENTIAL, counted=True))
    theirs = their_arrays(rules, shapes, "A ResNet")
    assert len(theirs) == COUNTS[name][0] * leaves
    assert theirs["model.0.weight"].shape == (16, 3, 7, 7)
    last = theirs[f"model.7.1.conv{COUNTS[name][1]}.weight"].shape
    assert last[0] == config.channels
    assert ("model.1.num_batches_tracked" in theirs) == (norm == "running")


@pytest.mark.parametrize("size", [(64, 96), (33, 65), (31, 32)])
def test_a_picture_has_a_place_for_each_32_pixels_begun(size):
    config = ResnetConfig("resnet18", "group", 16)
    made = Functional(lambda rngs: Resnet(config, "float32", rngs))
    params = jax.eval_shape(made.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, *size, 3), jnp.float32)
    there = jax.ShapeDtypeStruct((2,), bool)
    given = jax.eval_shape(lambda p, *x: made.bind(p)(*x), params, images, there)
    assert given.shape == (2, *config.places(*size), config.channels)


def test_each_picture_is_scaled_as_its_cameras():
    images = np.full((2, 1, 1, 3), (0, 51, 255), np.uint8)
    scales = Normalizer((0.0,) * 3, (0.5,) * 3), Normalizer((0.2,) * 3, (0.1,) * 3)
    scaled = standardised(images, jnp.asarray([1, 0]), scales)[:, 0, 0]
    np.testing.assert_allclose(scaled, [[-2, 0, 8], [0, 0.4, 2]], atol=1e-6)
    np.testing.assert_allclose(standardised(images, jnp.zeros(2, int), ())[0, 0, 0], [0, 0.2, 1])
