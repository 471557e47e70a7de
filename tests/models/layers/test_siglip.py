"""The vision tower's stem: smaller patches through which a patch is read."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.layers.layers import Compute
from models.layers.siglip import Siglip, SiglipConfig
from models.sharding import shardings
from parallel.mesh import MeshConfig, make_mesh
from tools.recipes.presets import GROOT_TINY, METAWORLD

CONFIG = SiglipConfig(width=16, depth=1, hidden=24, heads=2, patch=6)
SIZE, STEM = 12, 2


def tower(config: SiglipConfig) -> Siglip:
    return Siglip(config, SIZE, 8, film_width=None, compute=Compute("float32"), rngs=nnx.Rngs(0))


def test_a_stem_that_changes_nothing_gives_the_tokens_of_a_plain_tower():
    plain, read = tower(CONFIG), tower(replace(CONFIG, stem=STEM))
    pixels, small = 3 * STEM**2, CONFIG.patch // STEM
    read.small.kernel[...] = np.eye(pixels)
    read.small.bias[...] = np.ones(pixels)  # no pixel is below -1, so nothing is cut off
    kernel = np.asarray(read.embed.kernel[...])
    by_rows = kernel.reshape(small, small, STEM, STEM, 3, -1).transpose(0, 2, 1, 3, 4, 5)
    plain.embed.kernel[...] = by_rows.reshape(kernel.shape)
    plain.embed.bias[...] = read.embed.bias[...] + kernel.sum(0)
    for name in ("position", "blocks", "norm", "head"):
        setattr(plain, name, getattr(read, name))
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    np.testing.assert_allclose(read(images), plain(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stem", [4, -2])
def test_a_stem_that_does_not_divide_the_patches_is_refused(stem):
    with pytest.raises(ValueError, match=rf"vision.stem is {stem}, which does not divide patches"):
        replace(CONFIG, stem=stem)


@pytest.mark.parametrize("preset", [METAWORLD, GROOT_TINY], ids=["pi", "groot"])
def test_every_parameter_of_a_stem_has_a_sharding(preset):
    vision = replace(preset.model.vision, stem=4)
    model = preset.model.changed(vision=vision).build()
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    placed = shardings(shapes, model.sharding_rules, make_mesh(MeshConfig()))
    assert placed["vision"]["small"]["kernel"].spec == PartitionSpec()
