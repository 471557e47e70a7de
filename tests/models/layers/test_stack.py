"""Stacks of layers give the numbers of their layers one by one, and acting copies no weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.stack import (
    Apart,
    apart,
    layer_of,
    over_layers,
    scan_but_last,
    scan_layers,
)

DEPTH, WIDTH = 6, 256
TWO_LAYERS = 2 * 4 * WIDTH**2
"""Bytes; a copy of all that run has five."""


def layer(x, weights, shift):
    y = jnp.tanh(x @ weights["kernel"]) * weights["scale"] + shift[:, None]
    return y, y.sum(-1)


def sliced(x, weights, shift):
    left = []
    for at in range(DEPTH - 1):
        x, sums = layer(x, jax.tree.map(lambda w, at=at: w[at], weights), shift)
        left.append(sums)
    return x, jnp.stack(left)


def numbers():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "kernel": jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH)) / 16,
        "scale": 1 + 0.1 * jax.random.normal(keys[1], (DEPTH, WIDTH)),
    }
    return jax.random.normal(keys[2], (4, WIDTH)), weights, jnp.arange(4)


def looped(x, weights, shift, remat="none", unroll=False):
    return scan_but_last(layer, x, weights, remat, (shift,), unroll=unroll)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("unroll", [False, True])
def test_values_and_gradients_are_those_of_the_layers_one_by_one(remat, unroll):
    x, weights, shift = numbers()
    run = partial(looped, remat=remat, unroll=unroll)

    def close(found, wanted):
        atol = 1e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)

    def total(x, weights, run):
        out, left = run(x, weights, shift)
        return (out**2).sum() + (left**3).sum()

    jax.tree.map(close, run(x, weights, shift), sliced(x, weights, shift))
    ours, theirs = (jax.grad(total, (0, 1))(x, weights, each) for each in (run, sliced))
    jax.tree.map(close, ours, theirs)
    assert not np.asarray(ours[1]["kernel"][-1]).any()


def temporary(function, *given):
    return jax.jit(function).lower(*given).compile().memory_analysis().temp_size_in_bytes


def test_acting_makes_no_copy_of_the_weights():
    x, weights, shift = numbers()
    assert temporary(looped, x, weights, shift) < TWO_LAYERS


def test_what_is_cached_for_each_layer_is_not_copied_either():
    x, weights, shift = numbers()
    own = jnp.ones((DEPTH, WIDTH, WIDTH))

    def added(x, weights, own, shift):
        y, left = layer(x, weights, shift)
        return y @ own / WIDTH, left

    def run(x, weights, own, shift):
        return scan_but_last(added, x, weights, rows=(shift,), cached=(own,))

    assert temporary(run, x, weights, own, shift) < 2 * TWO_LAYERS


def test_weights_are_not_copied_where_only_others_are_trained():
    x, weights, shift = numbers()

    def loss(scale, x, weights):
        return (looped(x, weights, shift)[0] * scale).sum()

    scale = jnp.ones(WIDTH)
    assert temporary(jax.grad(loss), scale, x, weights) < TWO_LAYERS


def taken_apart(weights):
    return apart(weights, "kernel|scale")


def layered(x, weights, shift, run=scan_layers):
    return run(layer, x, weights, rows=(shift,))


@pytest.mark.parametrize("run", [scan_layers, scan_but_last])
def test_layers_apart_give_the_numbers_of_the_stack(run):
    x, weights, shift = numbers()
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    found = jax.jit(partial(layered, run=run))(x, taken_apart(weights), shift)
    jax.tree.map(close, found, layered(x, weights, shift, run))
    sums = over_layers(lambda w: w["kernel"].sum(), taken_apart(weights))
    close(sums, over_layers(lambda w: w["kernel"].sum(), weights))
    for number in (0, -1):
        jax.tree.map(close, layer_of(taken_apart(weights), number), layer_of(weights, number))


def test_of_one_layer_none_is_before_the_last():
    x, weights, shift = numbers()
    one = apart(jax.tree.map(lambda w: w[:1], weights), "kernel|scale")
    y, left = jax.jit(partial(layered, run=scan_but_last))(x, one, shift)
    np.testing.assert_array_equal(y, x)
    assert left.shape == (0, 4)


def test_a_loop_within_a_loop_copies_stacked_weights_and_reads_those_apart_where_they_lie():
    """As acting does: all layers in each step of the flow."""
    x, weights, shift = numbers()

    def flow(x, weights, shift):
        return jax.lax.fori_loop(0, 3, lambda _, x: layered(x, weights, shift)[0], x)

    one = TWO_LAYERS // 2
    assert temporary(flow, x, taken_apart(weights), shift) < one / 2
    assert temporary(flow, x, weights, shift) > one / 2


def test_only_what_was_asked_for_is_taken_apart_and_its_array_is_freed():
    _, weights, _ = numbers()
    found = apart(weights, "^kernel$", free=True)
    assert isinstance(found["kernel"], Apart)
    assert found["kernel"].shape == (DEPTH, WIDTH, WIDTH)
    assert weights["kernel"].is_deleted()
    assert found["scale"] is weights["scale"]
