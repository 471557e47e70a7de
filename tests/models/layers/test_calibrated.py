"""Calibrated rounding: GPTQ as its paper writes it, and what kernels are seen to multiply."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import calibrated
from models.layers.calibrated import calibrated_kernel, watched
from models.layers.layers import Compute, Dense
from models.layers.quantized import CODES, Kind, dequantize, quantize_kernel, scales_of
from models.layers.stack import scan_layers

KINDS = get_args(Kind)


def correlated(seed: int, inner: int, count: int = 600) -> np.ndarray:
    """Inputs of which a few directions carry most, [count, inner]."""
    rng = np.random.default_rng(seed)
    few = rng.normal(size=(count, 8)) @ rng.normal(size=(8, inner))
    return (few + 0.3 * rng.normal(size=(count, inner))).astype(np.float32)


def moments_of(x: np.ndarray, group: int) -> np.ndarray:
    """One layer's, [1, g, k, k]."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % group)))
    parts = padded.reshape(len(x), -1, group)
    return np.einsum("ngi,ngj->gij", parts, parts)[None]


def row_by_row(w: np.ndarray, moments: np.ndarray, scales: np.ndarray, kind: Kind) -> np.ndarray:
    """Algorithm 1 of the paper without its blocks, in f64: the inverse of what is left is found
    anew for every row."""
    w, codes = w.astype(np.float64).copy(), CODES[kind]
    h = moments.astype(np.float64) + np.eye(len(w)) * calibrated._DAMPING * np.diag(moments).mean()
    for i in range(len(w)):
        share = jnp.asarray(w[i] / scales[i], jnp.float32)
        rounded = np.asarray(codes.number(codes.code(share)), np.float64) * scales[i]
        inverse = np.linalg.inv(h[i:, i:])
        w[i + 1 :] -= np.outer(inverse[1:, 0] / inverse[0, 0], w[i] - rounded)
        w[i] = rounded
    return w


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_make_up_for_each_other_as_the_paper_says(kind):
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(1, 128, 24)).astype(np.float32)
    moments = moments_of(correlated(2, 128), 128)
    found = calibrated_kernel({"up/kernel": moments}, "up/kernel", jnp.asarray(kernel), kind)
    made = jax.tree.map(lambda x: x[0], quantize_kernel("up/kernel", jnp.asarray(kernel), kind))
    expected = row_by_row(kernel[0], moments[0, 0], np.asarray(scales_of(made, 128)), kind)
    ours = np.asarray(dequantize("up/kernel", found)[0])
    # f32 may round a number the other way where it lies between two; what follows makes up for it
    assert np.mean(~np.isclose(ours, expected, rtol=1e-5, atol=1e-6)) < 0.01


def test_rows_that_fill_up_a_group_do_not_weaken_its_damping():
    x = correlated(10, 129)
    kernel = jnp.asarray(np.random.default_rng(11).normal(size=(1, 129, 24)), jnp.float32)
    found = calibrated_kernel({"up/kernel": moments_of(x, 256)}, "up/kernel", kernel, "int8")
    scales = np.asarray(scales_of(jax.tree.map(lambda a: a[0], found), 129))
    expected = row_by_row(np.asarray(kernel[0]), moments_of(x, 129)[0, 0], scales, "int8")
    ours = np.asarray(dequantize("up/kernel", found)[0])
    assert np.mean(~np.isclose(ours, expected, rtol=1e-5, atol=1e-6)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_err_less_than_with_each_number_rounded_by_itself(kind, monkeypatch):
    """In two groups, the second of them short."""
    monkeypatch.setattr(calibrated, "GROUP", 256)
    x, held_out = np.split(correlated(3, 320, 900), [600])
    kernel = jnp.asarray(np.random.default_rng(4).normal(size=(2, 320, 48)), jnp.float32)
    moments = np.concatenate([moments_of(x, 256)] * 2)
    assert moments.shape == (2, 2, 256, 256)
    seen = calibrated_kernel({"up/kernel": moments}, "up/kernel", kernel, kind)
    by_itself = quantize_kernel("up/kernel", kernel, kind)

    def error(kept):
        return np.linalg.norm(held_out @ np.asarray(dequantize("up/kernel", kept) - kernel))

    assert error(seen) < 0.3 * error(by_itself)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), kept) for kept in (seen, by_itself)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_inputs_that_do_not_go_together_change_nothing(kind):
    kernel = jnp.asarray(np.random.default_rng(5).normal(size=(1, 96, 32)), jnp.float32)
    moments = {"up/kernel": np.diag(np.linspace(0.5, 2, 128)).astype(np.float32)[None, None]}
    jax.tree.map(
        np.testing.assert_array_equal,
        calibrated_kernel(moments, "up/kernel", kernel, kind),
        quantize_kernel("up/kernel", kernel, kind),
    )


def test_what_stacked_kernels_multiply_is_seen_layer_by_layer_and_changes_nothing():
    kernels = jnp.asarray(np.random.default_rng(7).normal(size=(3, 12, 3, 4)), jnp.float32)
    x = jnp.asarray(correlated(6, 12, 10)).reshape(2, 5, 12)

    def layer(x, weights):
        dense = Dense(12, (3, 4), compute=Compute(dtype="float32"), rngs=nnx.Rngs(0))
        dense.kernel = nnx.Param(weights["q"]["kernel"])
        return x + jnp.tanh(dense(x).reshape(x.shape)), x

    params = {"q": {"kernel": kernels}}
    plain, inputs = jax.jit(lambda params: scan_layers(layer, x, params))(params)
    seen, moments = watched(params, "^q/kernel$")
    also, _ = jax.jit(lambda params: scan_layers(layer, x, params))(seen)
    jax.effects_barrier()
    np.testing.assert_array_equal(plain, also)
    for own, given in zip(moments["q/kernel"], np.asarray(inputs), strict=True):
        flat = given.reshape(10, 12)
        np.testing.assert_allclose(own[0, :12, :12], flat.T @ flat, rtol=1e-5)
        assert not own[0, 12:].any()


def test_a_layer_that_multiplied_nothing_is_rounded_by_itself_and_nan_is_refused_by_name():
    kernel = jnp.asarray(np.random.default_rng(8).normal(size=(2, 128, 8)), jnp.float32)
    moments = np.concatenate([moments_of(correlated(9, 128), 128), np.zeros((1, 1, 128, 128))])
    found = calibrated_kernel({"up/kernel": moments}, "up/kernel", kernel, "int8")
    by_itself = quantize_kernel("up/kernel", kernel, "int8")
    assert (np.asarray(found.q) != by_itself.q).any((1, 2)).tolist() == [True, False]
    moments[1, 0, 3, 4] = np.nan
    with pytest.raises(ValueError, match="up/kernel: inputs are not finite"):
        calibrated_kernel({"up/kernel": moments}, "up/kernel", kernel, "int8")
