"""Float8 products against a plain reference that rounds with numpy, and what an H100 would run."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import pack
from models.attention.target import compiling_for
from models.families.pi.model import Pi, PiConfig
from models.layers.float8 import fp8
from models.layers.layers import Compute, Dense
from models.layers.quantized import quantize
from parallel.planning import deviceless
from tests.helpers.models.fp8_training import action_error, held_out_loss, train
from tests.helpers.models.pi_samples import CONFIG, KEY, samples
from tests.helpers.parallel.compiled import compile_for

STEPS, RATE = 200, 5e-4
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def operands(rows: int = 256, inner: int = 1024, outer: int = 512):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, inner)).astype(np.float32)
    kernel = (rng.normal(size=(inner, outer)) / inner**0.5).astype(np.float32)
    g = (1e-4 * rng.normal(size=(rows, outer))).astype(np.float32)
    return x, kernel, g


def rounded(x: np.ndarray, kind, block: tuple[int, int] | None = None) -> np.ndarray:
    """Quantised and dequantised, f64, under a power-of-two scale a tensor or block."""
    rows, columns = block or x.shape
    out = np.zeros(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns]
            amax = np.abs(tile).max()
            scale = 2.0 ** np.ceil(np.log2(amax / float(ml_dtypes.finfo(kind).max)))
            out[i : i + rows, j : j + columns] = (tile / scale).astype(kind).astype(float) * scale
    return out


@partial(jax.jit, static_argnames="recipe")
def gradients(x, kernel, g, recipe, history=None):
    y, back = jax.vjp(lambda *a: fp8.dot(*a[:2], recipe, *a[2:]), x, kernel, *history or ())
    return y, *back(g)


def relative_error(y, expected) -> float:
    return float(np.linalg.norm(np.asarray(y, float) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_is_that_of_three_mantissa_bits(recipe, dtype):
    x, kernel, _ = operands()
    error = relative_error(fp8.dot(jnp.asarray(x, dtype), kernel, recipe), x @ kernel)
    assert 0.036 < error < 0.039


def test_per_tensor_results_and_gradients_are_those_of_the_rounded_operands():
    x, kernel, g = operands()
    y, dx, dk = gradients(x, kernel, g, "current")
    qx, qk, qg = rounded(x, E4M3), rounded(kernel, E4M3), rounded(g, E5M2)
    assert relative_error(y, qx @ qk) < 1e-6
    assert relative_error(dx, qg @ qk.T) < 1e-6
    assert relative_error(dk, qx.T @ qg) < 1e-6


def test_block_results_and_gradients_are_those_of_blocks_along_each_contraction():
    x, kernel, g = operands(200, 320, 144)
    y, dx, dk = gradients(x, kernel, g, "block")
    qk = rounded(kernel, E4M3, (128, 128))
    assert relative_error(y, rounded(x, E4M3, (1, 128)) @ qk) < 1e-6
    assert relative_error(dx, rounded(g, E4M3, (1, 128)) @ qk.T) < 1e-6
    expected = rounded(x, E4M3, (128, 1)).T @ rounded(g, E4M3, (128, 1))
    assert relative_error(dk, expected) < 1e-6


def test_an_outlier_costs_a_whole_tensor_its_bits_but_only_one_block():
    x, kernel, _ = operands()
    x[:, 0], kernel[0] = 1e6, 0
    exact = x @ kernel
    assert relative_error(fp8.dot(x, kernel, "current"), exact) > 0.5
    assert relative_error(fp8.dot(x, kernel, "block"), exact) < 0.4


def test_results_have_the_activations_dtype_and_kernel_gradients_the_masters():
    x, kernel, g = operands(8, 32, 16)
    y, dx, dk = gradients(
        jnp.asarray(x, "bfloat16"), jnp.asarray(kernel), jnp.asarray(g, "bfloat16"), "current"
    )
    assert (y.dtype, dx.dtype, dk.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_delayed_scales_come_from_the_largest_of_the_history_and_clip_above_it():
    x, kernel, g = operands(16, 32, 16)
    history = np.zeros((3, fp8.HISTORY), np.float32)
    history[:, 5] = np.abs(x).max() / 4, np.abs(kernel).max(), np.abs(g).max()
    y, dx, dk, seen = gradients(x, kernel, g, "delayed", (history,))
    scale = 2.0 ** np.ceil(np.log2(history[0].max() / 448))
    qx = np.clip(x / scale, -448, 448).astype(E4M3).astype(float) * scale
    qk, qg = rounded(kernel, E4M3), rounded(g, E5M2)
    assert relative_error(y, qx @ qk) < 1e-6
    assert relative_error(dx, qg @ qk.T) < 1e-6
    assert relative_error(dk, qx.T @ qg) < 1e-6
    np.testing.assert_array_equal(seen[:, 0], [np.abs(a).max() for a in (x, kernel, g)])
    assert not seen[:, 1:].any()


def test_histories_advance_by_the_largest_magnitude_of_all_micro_batches():
    params = {"q": {"kernel": jnp.ones(2), "fp8_history": jnp.arange(6.0).reshape(3, 2)}}
    first, second = (
        {"q": {"kernel": jnp.ones(2), "fp8_history": jnp.array([[a, 0.0]] * 3)}} for a in (7, 9)
    )
    summed = fp8.add(first, second)
    np.testing.assert_array_equal(summed["q"]["kernel"], 2)
    updated = jax.tree.map(lambda p: p - 1, params)
    advanced = fp8.advance(updated, params, summed)["q"]
    np.testing.assert_array_equal(advanced["kernel"], 0)
    np.testing.assert_array_equal(advanced["fp8_history"], [[9, 0], [9, 2], [9, 4]])


def test_delayed_without_history_and_current_with_one_are_refused():
    x, kernel, _ = operands(2, 16, 16)
    with pytest.raises(ValueError, match="'delayed' was given no history"):
        fp8.dot(x, kernel, "delayed")
    with pytest.raises(ValueError, match="'current' was given a history"):
        fp8.dot(x, kernel, "current", jnp.zeros((3, 16)))


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_zeros_stay_zero_and_nothing_else_is_made_of_them(recipe):
    x, kernel, g = (np.zeros_like(a) for a in operands(4, 32, 16))
    history = (jnp.zeros((3, 16)),) if recipe == "delayed" else None
    for result in gradients(x, kernel, g, recipe, history):
        assert not np.asarray(result).any()


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_bad_number_shows_in_its_row_and_in_no_other(recipe, value):
    x, kernel, _ = operands(4, 32, 16)
    x[1, 3] = value
    y = fp8.dot(x, kernel, recipe, jnp.ones((3, 16)) if recipe == "delayed" else None)
    finite = np.isfinite(y).all(1)
    assert finite.tolist() == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_stacked_layers_under_scan_and_vmap_compute_what_single_ones_do(recipe):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 32)).astype(np.float32)
    kernels = rng.normal(size=(3, 32, 32)).astype(np.float32) / 6
    histories = np.ones((3, 3, 16), np.float32) if recipe == "delayed" else None

    def layer(x, stacked):
        return fp8.dot(x, stacked[0], recipe, stacked[1]), None

    def scanned(kernels):
        return jax.lax.scan(layer, x, (kernels, histories))[0].sum()

    def looped(kernels):
        y = x
        for i in range(3):
            y = layer(y, (kernels[i], None if histories is None else histories[i]))[0]
        return y.sum()

    one, other = (jax.jit(jax.grad(f))(kernels) for f in (scanned, looped))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    single = jax.jit(lambda *s: layer(x, s)[0])
    each = jax.jit(jax.vmap(single))(kernels, histories)
    for i in range(3):
        one = single(kernels[i], None if histories is None else histories[i])
        np.testing.assert_allclose(each[i], one, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_rows_spread_over_devices_share_one_scale(recipe):
    x, kernel, g = operands(256, 128, 128)
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    alone = gradients(x, kernel, g, recipe)
    x, g = jax.device_put((x, g), NamedSharding(mesh, PartitionSpec("rows")))
    for one, many in zip(alone, gradients(x, kernel, g, recipe), strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def test_adapters_and_bias_stay_outside_the_float8_product():
    dense = Dense(
        16, (2, 8), compute=Compute("float32", fp8="current"), rngs=nnx.Rngs(0), bias=True
    )
    dense.bias[...] = jnp.ones((2, 8))
    x = jnp.ones((3, 16))
    flat = fp8.dot(x, dense.kernel[...].reshape(16, 16), "current")
    np.testing.assert_array_equal(dense(x), flat.reshape(3, 2, 8) + 1)


BLOCK_PRODUCTS = (
    *(f"attention/{name}" for name in ("q", "k", "v", "out")),
    *(f"mlp/{name}" for name in ("gate", "up", "down")),
)
LANGUAGE = r"^language/layers/(attention|mlp)/"


def test_quantised_kernels_multiply_as_their_rounded_matrices():
    dense = Dense((4, 40), 200, compute=Compute("float32"), rngs=nnx.Rngs(0))
    kernel, x = dense.kernel[...], jax.random.normal(KEY, (3, 4, 40))
    stored = quantize({"out": {"kernel": kernel[None]}}, "out")["out"]["kernel"]
    assert (stored.q.dtype, stored.scale.shape) == (jnp.float8_e4m3fn, (1, 2, 2))
    dense.kernel.set_value(jax.tree.map(lambda leaf: leaf[0], stored))
    expected = np.asarray(x).reshape(3, 160) @ rounded(
        np.asarray(kernel).reshape(160, 200), E4M3, (128, 128)
    )
    assert relative_error(dense(x), expected) < 1e-6


@pytest.mark.slow
def test_quantising_the_language_model_leaves_every_other_leaf_alone():
    params = jax.jit(Pi(CONFIG).init)(KEY)
    served = jax.tree_util.tree_leaves_with_path(quantize(params, LANGUAGE))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in served}
    small = {name for name, leaf in named.items() if leaf.dtype == jnp.float8_e4m3fn}
    assert small == {f"language/layers/{name}/kernel/q" for name in BLOCK_PRODUCTS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert f"{name}/q" in small or named[name] is leaf


def test_at_the_released_sizes_a_quantised_language_model_takes_half_of_bf16():
    shapes = jax.eval_shape(Pi(PiConfig()).init, KEY)["language"]
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    served = jax.eval_shape(lambda p: quantize(p, r"^layers/"), half)
    before, after = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(t)) for t in (half, served)
    )
    assert (before, after) == (3_963_768_832, 1_982_444_032)


def test_with_all_towers_quantised_the_released_model_is_smaller_than_the_recipes_share():
    shapes = jax.eval_shape(Pi(PiConfig()).init, KEY)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    served = jax.eval_shape(lambda p: quantize(p, PiConfig.quantizable), half)
    before, after = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(t)) for t in (half, served)
    )
    assert (before, after) == (6_706_867_744, 4_003_222_528)
    assert 1 - after / before > 0.366


def test_a_pattern_that_matches_no_kernel_is_refused():
    with pytest.raises(ValueError, match="No kernel's path matches 'vlm'"):
        quantize({"language": {"kernel": jnp.ones((1, 2, 2))}}, "vlm")


SMALL = PiConfig(
    vision=dataclasses.replace(CONFIG.vision, width=32, hidden=64),
    language=dataclasses.replace(CONFIG.language, width=64, depth=2, hidden=128, head_dim=16),
    expert=dataclasses.replace(CONFIG.expert, width=32, depth=2, hidden=64, head_dim=16),
    image_size=8,
    vocabulary=260,
    state_dim=5,
    action_dim=6,
    horizon=4,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "call"),
    [
        ("current", "__cublas$lt$matmul$f8"),
        ("delayed", "__cublas$lt$matmul$f8"),
        ("block", "__gpu$xla.gpu.triton"),
    ],
)
def test_every_block_product_of_a_training_step_is_a_float8_call_on_an_h100(recipe, call):
    """q, k, v, out and the feed-forward of every block, each forward and for both gradients; the
    last language layer has only k and v. The pass that joins products is off, to count them."""
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    model = Pi(_with(SMALL, recipe, "bfloat16"))
    layout = SMALL.layout(prefix=64, samples=5, images=8)
    with compiling_for("gpu", 9.0):
        compiled = compile_for(
            deviceless.devices()[0],
            jax.value_and_grad(lambda p, b: model.loss(p, b, KEY)[0]),
            jax.eval_shape(model.init, KEY),
            pack([samples(1)], layout),
            options={"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "dot-merger"},
        )
    vision = 6 * SMALL.vision.depth
    language = 7 * (SMALL.language.depth - 1) + 2
    expert = 7 * SMALL.expert.depth
    found = compiled.as_text().count(f'custom_call_target="{call}"')
    assert found == 3 * (vision + language + expert)


def _with(config: PiConfig, recipe, dtype: str) -> PiConfig:
    return dataclasses.replace(config, compute=Compute(dtype, "dense", recipe))


@pytest.fixture(scope="module")
def in_bf16():
    return train("none", STEPS, RATE)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.drill), "delayed"])
def test_the_tiny_preset_learns_to_within_a_percent_of_its_bf16_loss(recipe, in_bf16):
    params = train(recipe, STEPS, RATE)
    expected = held_out_loss(in_bf16, "none")
    assert expected < 1
    assert abs(held_out_loss(params, recipe) - expected) < 0.01 * expected
    leaves = jax.tree_util.tree_leaves_with_path(params)
    histories = [leaf for path, leaf in leaves if fp8.is_history(path)]
    assert len(histories) == (20 if recipe == "delayed" else 0)
    assert all((h[0] > 0).all() for h in histories)


@pytest.mark.slow
def test_a_trained_policy_with_a_quantised_language_model_acts_almost_alike(in_bf16):
    assert 0 < action_error(in_bf16, quantize(in_bf16, LANGUAGE)) < 0.05
