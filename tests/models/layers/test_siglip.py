"""The vision tower's stem, smaller patches through which a patch is read; and the layout of its
tokens on a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.attention.target import compiling_for
from models.layers.functional import Functional
from models.layers.layers import Compute
from models.layers.siglip import Siglip, SiglipConfig
from models.sharding import shardings
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.parallel.compiled import compile_for
from tools.recipes.presets import GROOT_TINY, METAWORLD

CONFIG = SiglipConfig(width=16, depth=1, hidden=24, heads=2, patch=6)
SIZE, STEM = 12, 2


def tower(config: SiglipConfig) -> Siglip:
    return Siglip(config, SIZE, 8, film_width=None, compute=Compute("float32"), rngs=nnx.Rngs(0))


@pytest.mark.slow
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
    with pytest.raises(ValueError, match=rf"vision.stem is {stem}, which does not divide"):
        replace(CONFIG, stem=stem)


@pytest.mark.parametrize("preset", [METAWORLD, GROOT_TINY], ids=["pi", "groot"])
def test_every_parameter_of_a_stem_has_a_sharding(preset):
    vision = replace(preset.model.vision, stem=4)
    model = preset.model.changed(vision=vision).build()
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    placed = shardings(shapes, model.sharding_rules, make_mesh(MeshConfig()))
    assert placed["vision"]["small"]["kernel"].spec == PartitionSpec()


@pytest.mark.slow
def test_pictures_are_not_laid_innermost_for_an_h100_where_layers_stand_one_after_the_other():
    """Each norm would then turn what it reads, in memory, in backward."""
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    deviceless = pytest.importorskip("parallel.planning.deviceless")
    config, size = SiglipConfig(depth=2, remat="dots"), 224
    shape = (64, config.tokens(size), config.width)
    make = partial(Siglip, config, size, 2048, film_width=None, compute=Compute(unroll=True))
    model = Functional(lambda rngs: make(rngs=rngs))

    def gradient(params, images, d_tokens):
        return jax.vjp(lambda p: model.bind(p)(images), params)[1](d_tokens)

    with compiling_for("gpu", 9.0):
        compiled = compile_for(
            deviceless.devices()[0],
            gradient,
            jax.eval_shape(model.init, jax.random.key(0)),
            jax.ShapeDtypeStruct((64, size, size, 3), jnp.uint8),
            jax.ShapeDtypeStruct((*shape[:2], 2048), jnp.bfloat16),
        )
    text, tokens = compiled.as_text(), ",".join(map(str, shape))
    assert f"[{tokens}]{{2,1,0}}" in text
    assert f"[{tokens}]{{0,2,1}}" not in text
