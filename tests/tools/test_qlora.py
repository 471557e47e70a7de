"""Adapters on a base in few bits, by the commands: what it is loaded from, what is refused, and
what other codes are given of it."""

from dataclasses import replace
from functools import reduce
from operator import getitem

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_policy
from models.layers.adapters import merge
from models.layers.layers import Lora
from models.layers.quantized import dequantize, quantize
from models.load import begin_from, like_model
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD, observation
from tools.convert_checkpoint import convert
from tools.recipes.prepare import check_model
from tools.recipes.presets import GROOT_TINY, TINY, presets

pytestmark = pytest.mark.slow

LANGUAGE = r"^language/layers/(attention|mlp)/"
BASE = FIXTURES / "pi05"


@pytest.fixture(scope="module")
def released():
    return load_policy(BASE, **TOLD["pi05"])


def on_few_bits(config, kind="nf4"):
    lora = Lora(2, 2.0)
    config = replace(config, language=replace(config.language, attention_lora=lora, mlp_lora=lora))
    config = replace(config, vision=replace(config.vision, lora=lora))
    return config.computing(quantized=LANGUAGE, quantized_kind=kind).build()


def trained(policy, path=BASE):
    """The policy on NF4, its adapters no longer empty."""
    model = on_few_bits(policy.model.config)
    params = begin_from(path, model, like_model(model), 0)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.03 if "lora_b" in jax.tree_util.keystr(path) else x, params
    )
    return replace(policy, model=model, params=moved)


@pytest.mark.parametrize("source", ["openpi's", "ours"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_becomes_few_bits_as_it_is_loaded(source, kind, released, tmp_path):
    path = BASE
    if source == "ours":
        convert(released, tmp_path / "own", "chiliad")
        path = tmp_path / "own"
    model = released.model.config.computing(quantized=LANGUAGE, quantized_kind=kind).build()
    params = begin_from(path, model, like_model(model), 0)
    expected = jax.jit(lambda p: quantize(p, LANGUAGE, kind))(released.params)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_policy_on_few_bits_is_exported_with_its_adapters_folded_in(released, tmp_path):
    policy = trained(released)
    with np.load(BASE / "case.npz") as file:
        arrays = dict(file)
    seen, noise = observation(arrays), arrays["sample_noise"]
    acted = policy.infer(seen, noise)["actions"]
    convert(policy, tmp_path / "theirs", "openpi")
    again = load_policy(tmp_path / "theirs", **TOLD["pi05"], relative=())
    assert not again.model.config.adapted
    up, before = (p.params["vision"]["blocks"]["up"]["kernel"] for p in (again, released))
    assert np.abs(np.asarray(up) - before).max() > 1e-2
    np.testing.assert_allclose(again.infer(seen, noise)["actions"], acted, rtol=0, atol=1e-4)
    convert(policy, tmp_path / "ours", "chiliad")
    served = load_policy(tmp_path / "ours")
    assert served.model.config.compute.quantized_kind == "nf4"
    jax.tree.map(np.testing.assert_array_equal, served.params, policy.params)
    with pytest.raises(ValueError, match=r"has kernels .* in nf4, but f32 was asked for"):
        begin_from(tmp_path / "ours", released.model, like_model(released.model), 0)
    bare = replace(policy, model=released.model.config.computing(quantized=LANGUAGE).build())
    with pytest.raises(ValueError, match="quantised to float8, which format 'openpi' cannot"):
        convert(bare, tmp_path / "bare", "openpi")


def test_kernels_in_few_bits_that_would_move_are_refused():
    model = TINY.model.computing(quantized=LANGUAGE, quantized_kind="nf4")
    moving = replace(TINY, model=model)
    message = r"stores language/layers/attention/k/kernel in nf4, which cannot be trained"
    with pytest.raises(ValueError, match=message):
        check_model(moving)
    half = (("^vision", 0.0), (".", 1.0))
    with pytest.raises(ValueError, match=message):
        check_model(replace(moving, optimizer=replace(TINY.optimizer, rate_factors=half)))
    frozen = replace(TINY.optimizer, rate_factors=(("@language", 0.0), (".", 1.0)))
    check_model(replace(moving, optimizer=frozen))
    with pytest.raises(ValueError, match="No kernel's path matches 'vlm'"):
        check_model(replace(TINY, model=TINY.model.computing(quantized="vlm"), optimizer=frozen))
    alone = replace(TINY.optimizer, rate_factors=(("lora_[ab]$", 1.0), (".", 0.0)))
    with pytest.raises(ValueError, match=r"'lora_\[ab\]\$', but the model has no adapters"):
        check_model(replace(moving, optimizer=alone))
    float8 = replace(moving, model=model.computing(fp8="current"), optimizer=frozen)
    with pytest.raises(
        ValueError, match=r"model.compute.fp8 is 'current'.*set model.compute.fp8 to none"
    ):
        check_model(float8)


@pytest.mark.parametrize("name", ["pi05-qlora", "groot-qlora"])
def test_the_presets_freeze_what_they_keep_in_few_bits(name):
    check_model(presets()[name])


def test_groots_adapters_on_few_bits_fold_into_the_kernels_of_every_stack():
    tiny, lora = GROOT_TINY.model, Lora(2, 4.0)
    names = ("vision", "language", "adapter", "dit")
    stacks = {name: replace(getattr(tiny, name), lora=lora) for name in names}
    pattern = presets()["groot-qlora"].model.compute.quantized
    config = tiny.changed(**stacks).computing(quantized=pattern, quantized_kind="nf4")
    rng, key = np.random.default_rng(0), jax.random.key(0)
    whole = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype),
        jax.eval_shape(config.build().init, key),
    )
    params = jax.jit(lambda p: quantize(p, pattern, "nf4"))(whole)
    merged = merge(config, params)[0]
    folded = jax.jit(lambda p: merge(config, p)[1])(params)
    assert not merged.compute.quantized
    plain = jax.eval_shape(merged.build().init, key)
    assert jax.tree.map(jnp.shape, folded) == jax.tree.map(jnp.shape, plain)
    for path in (
        "vision/blocks/up", "language/layers/mlp/gate", "adapter/blocks/down",
        "dit/cross_blocks/up", "dit/self_blocks/down",
    ):  # fmt: skip
        before, after = (reduce(getitem, path.split("/"), tree) for tree in (params, folded))
        base = dequantize(f"{path}/kernel", before["kernel"])
        expected = base + 2 * before["lora_a"] @ before["lora_b"]
        np.testing.assert_allclose(after["kernel"], expected, rtol=1e-4, atol=1e-5)
