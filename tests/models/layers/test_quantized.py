"""Kernels in few bits: NF4 as bitsandbytes computes it, errors of a round trip, and products that
keep nothing else for backward."""

import dataclasses
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.layers import Compute, Dense
from models.layers.quantized import (
    QUANTILES,
    Kind,
    Nf4,
    Quantized,
    dequantize,
    dot,
    matrix,
    quantize,
    quantize_kernel,
)

FIXTURE = Path(__file__).parents[2] / "fixtures" / "bitsandbytes" / "nf4.npz"
KINDS = get_args(Kind)
KEY = jax.random.key(0)


def error(found, expected) -> float:
    return float(np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected))


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(FIXTURE) as file:
        return dict(file)


def test_every_code_of_nf4_is_bitsandbytes(recorded):
    """Zeros, an outlier, tiny numbers and a walk over all edges are among the blocks."""
    np.testing.assert_array_equal(QUANTILES, recorded["table"])
    numbers = recorded["numbers"].astype(np.float32)
    kernel = quantize_kernel("up/kernel", jnp.asarray(numbers[None]), "nf4")
    np.testing.assert_array_equal(kernel.q[0], recorded["packed"])
    np.testing.assert_array_equal(np.abs(numbers).max(1), recorded["largest"])


def test_scales_of_nf4_in_eight_bits_lose_no_more_than_bitsandbytes(recorded):
    numbers = recorded["numbers"].astype(np.float32)
    kernel = quantize_kernel("up/kernel", jnp.asarray(numbers[None]), "nf4")
    ours = error(dequantize("up/kernel", kernel)[0], numbers)
    assert ours < 1.01 * error(recorded["back"], numbers)


@pytest.mark.parametrize(("kind", "most"), [("float8", 0.028), ("int8", 0.011), ("nf4", 0.094)])
@pytest.mark.parametrize("name", ["up", "q", "out"])
def test_a_round_trip_through_few_bits_errs_as_much_as_documented(kind, most, name):
    shape = {"up": (2, 160, 200), "q": (2, 160, 5, 40), "out": (2, 5, 40, 160)}[name]
    kernel = np.array(jax.random.normal(KEY, shape))
    kernel[1] *= 2
    path = f"blocks/{name}/kernel"
    small = quantize_kernel(path, jnp.asarray(kernel), kind)
    back = dequantize(path, small)
    assert (back.shape, back.dtype) == (shape, jnp.float32)
    assert most / 2 < error(back, kernel) < most
    again = dequantize(path, quantize_kernel(path, back, kind))
    assert error(again, back) < most / 2


def test_bytes_are_those_of_the_bits():
    kernel = jax.ShapeDtypeStruct((2, 2048, 8, 256), jnp.float32)
    numbers = 2 * 2048 * 2048
    for kind, bits in (("float8", 8.002), ("int8", 8.002), ("nf4", 4.127)):
        small = jax.eval_shape(lambda k, kind=kind: quantize_kernel("q/kernel", k, kind), kernel)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(small))
        assert held * 8 / numbers == pytest.approx(bits, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_multiplies_as_its_rounded_matrix_forward_and_backward(kind):
    dense = Dense((4, 40), 200, compute=Compute("float32"), rngs=nnx.Rngs(0))
    kernel, x = dense.kernel[...], jax.random.normal(KEY, (3, 4, 40))
    small = quantize({"out": {"kernel": kernel[None]}}, "out", kind)["out"]["kernel"]
    rounded = dequantize("out/kernel", small)[0].reshape(160, 200)
    dense.kernel.set_value(jax.tree.map(lambda leaf: leaf[0], small))
    y, backward = jax.vjp(dense, x)
    assert error(y, np.asarray(x).reshape(3, 160) @ rounded) < 1e-6
    (dx,) = backward(jnp.ones_like(y))
    assert error(dx.reshape(3, 160), np.ones((3, 200), np.float32) @ rounded.T) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_for_backward_is_the_few_bits(kind):
    """A loop over layers would keep every layer's matrix if one product did."""
    kernels = quantize_kernel("up/kernel", jax.random.normal(KEY, (12, 64, 64)), kind)

    def layers(multiply, x):
        return jax.lax.scan(lambda x, k: (jnp.tanh(multiply(x, k)), None), x, kernels)[0]

    def kept(multiply) -> int:
        backward = jax.eval_shape(lambda x: jax.vjp(lambda x: layers(multiply, x), x)[1], x)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    x = jnp.ones((2, 64))
    whole = 12 * 64 * 64 * 4
    assert kept(lambda x, k: x @ matrix(k, 64)) > whole
    assert kept(dot) < 0.4 * whole


def test_what_is_in_few_bits_already_stays():
    whole = {"up": {"kernel": jnp.ones((1, 4, 4))}}
    once = quantize(whole, "up", "int8")
    assert isinstance(once["up"]["kernel"], Quantized)
    assert quantize(once, "up", "nf4")["up"]["kernel"] is once["up"]["kernel"]
    assert isinstance(quantize(whole, "up", "nf4")["up"]["kernel"], Nf4)


def test_what_cannot_be_kept_in_few_bits_is_refused():
    odd = {"up": {"kernel": jnp.ones((1, 4, 5))}}
    with pytest.raises(ValueError, match="up/kernel has 5 numbers along its last axis"):
        quantize(odd, "up", "nf4")
    with pytest.raises(ValueError, match="No kernel's path matches 'down'"):
        quantize(odd, "down", "int8")
    with pytest.raises(ValueError, match=r"compute.quantized_kind is 'int4'; expected one of"):
        dataclasses.replace(Compute(), quantized_kind="int4")
