"""Batch normalisation against Flax's: what is absent does not count, sums of parts are those of the
whole, and outside of training no sample changes another."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import use_abstract_mesh

from models.layers import stack
from models.layers.batch_norm import (
    DECAY,
    BatchNorm,
    FrozenBatchNorm,
    advance,
    training,
)
from models.layers.functional import Functional
from models.layers.pipeline import Pipeline
from parallel.mesh import MeshConfig, make_mesh

RNG = np.random.default_rng(0)
X = (3 + 2 * RNG.normal(size=(6, 4, 5, 3))).astype(np.float32)
PRESENT = np.array([True, False, True, True, False, True])
WEIGHT = RNG.normal(size=X.shape).astype(np.float32) * PRESENT[:, None, None, None]
NORM = Functional(lambda rngs: BatchNorm(3))
PARAMS = {
    "scale": np.float32([1.5, 0.5, -1.0]),
    "bias": np.float32([0.0, 1.0, 2.0]),
    "running": {
        "mean": np.float32([2.0, 3.5, 0.0]),
        "variance": np.float32([3.0, 1.0, 1.0]),
        "batches": np.float32(7),
    },
}


def loss(params, x, present, weight):
    y = NORM.bind(training(params))(x, present)
    return jnp.sum(y * weight), y


gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def flaxs():
    norm = nnx.BatchNorm(3, momentum=DECAY, epsilon=1e-5, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = PARAMS["scale"], PARAMS["bias"]
    norm.mean[...], norm.var[...] = PARAMS["running"]["mean"], PARAMS["running"]["variance"]
    return norm


def test_training_normalises_and_advances_as_flax_does_over_what_is_present():
    ours, (slopes, x_slope) = gradient(PARAMS, X, PRESENT, WEIGHT)
    norm = flaxs()
    mask = np.broadcast_to(PRESENT[:, None, None, None], X.shape)
    graph, state = nnx.split(norm)

    def theirs(state, x):
        module = nnx.merge(graph, state)
        y = module(x, mask=mask)
        return jnp.sum(y * WEIGHT), (y, nnx.state(module, nnx.BatchStat))

    (total, (y, seen)), (wanted, x_wanted) = jax.value_and_grad(
        theirs, argnums=(0, 1), has_aux=True
    )(state, X)
    np.testing.assert_allclose(ours[0], total, rtol=1e-5)
    np.testing.assert_allclose(ours[1][PRESENT], y[PRESENT], rtol=1e-5, atol=1e-5)
    for name in ("scale", "bias"):
        np.testing.assert_allclose(slopes[name], wanted[name][...], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x_slope, x_wanted, rtol=1e-4, atol=1e-5)
    moved = advance(PARAMS, PARAMS, slopes)  # with PyTorch's unbiased variance
    np.testing.assert_allclose(moved["running"]["mean"], seen["mean"][...], rtol=1e-5)
    count, kept = PRESENT.sum() * 20, DECAY * PARAMS["running"]["variance"]
    unbiased = kept + (seen["var"][...] - kept) * count / (count - 1)
    np.testing.assert_allclose(moved["running"]["variance"], unbiased, rtol=1e-5)
    assert moved["running"]["batches"] == 8
    np.testing.assert_array_equal(moved["scale"], PARAMS["scale"])


def test_absent_pictures_change_nothing_whatever_they_show():
    first, slopes = gradient(PARAMS, X, PRESENT, WEIGHT)
    shown = np.where(PRESENT[:, None, None, None], X, np.nan)
    again, others = gradient(PARAMS, shown, PRESENT, WEIGHT)
    np.testing.assert_array_equal(first[1][PRESENT], again[1][PRESENT])
    jax.tree.map(np.testing.assert_array_equal, slopes[0]["running"], others[0]["running"])
    fewer, least = gradient(PARAMS, X[PRESENT], np.ones(4, bool), WEIGHT[PRESENT])
    np.testing.assert_allclose(fewer[1], first[1][PRESENT], rtol=1e-5, atol=1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5), least[0]["running"], slopes[0]["running"]
    )


def test_sums_of_parts_are_those_of_the_whole():
    whole = gradient(PARAMS, X, PRESENT, WEIGHT)[1][0]["running"]
    parts = [gradient(PARAMS, X[s], PRESENT[s], WEIGHT[s])[1][0] for s in (np.s_[:2], np.s_[2:])]
    summed = jax.tree.map(np.add, *(part["running"] for part in parts))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), summed, whole)


def test_without_a_picture_the_running_statistics_normalise_and_stay():
    nobody = np.zeros(6, bool)
    (_, y), (slopes, _) = gradient(PARAMS, X, nobody, WEIGHT)
    np.testing.assert_allclose(y, NORM.bind(PARAMS)(X, nobody), rtol=1e-5, atol=1e-5)
    jax.tree.map(
        np.testing.assert_array_equal, advance(PARAMS, PARAMS, slopes)["running"], PARAMS["running"]
    )


def test_outside_of_training_running_statistics_normalise_and_have_no_gradient():
    y = NORM.bind(PARAMS)(X, PRESENT)
    norm = flaxs()
    norm.eval()
    np.testing.assert_allclose(y, norm(X), rtol=1e-5, atol=1e-5)
    slopes = jax.grad(lambda p: jnp.sum(NORM.bind(p)(X, PRESENT) * WEIGHT))(PARAMS)
    assert not any(map(np.any, jax.tree.leaves(slopes["running"])))
    np.testing.assert_array_equal(NORM.bind(PARAMS)(X[:1], PRESENT[:1]), y[:1])


def test_stacked_layers_each_have_statistics_of_their_own():
    layers = Functional(lambda rngs: stack.stack_layers(lambda r: BatchNorm(3), 2, rngs))
    params = layers.init(jax.random.key(0))
    assert params["running"]["mean"].shape == (2, 3)

    def total(params, x, apart):
        graph, weights = nnx.split(layers.bind(training(params)))
        if apart:
            for layer in range(2):
                x = nnx.merge(graph, stack.layer_of(weights, layer))(x, PRESENT)
            return jnp.sum(x * WEIGHT)
        layer = lambda x, w: (nnx.merge(graph, w)(x, PRESENT), None)  # noqa: E731
        return jnp.sum(stack.scan_layers(layer, x, weights, remat="full")[0] * WEIGHT)

    scanned, alone = (jax.grad(total)(params, X, apart)["running"] for apart in (False, True))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), scanned, alone)
    moved = advance(params, params, {**params, "running": scanned})["running"]
    shown = X[PRESENT].reshape(-1, 3)
    np.testing.assert_allclose(moved["mean"][0], (1 - DECAY) * shown.mean(0), rtol=1e-5)
    unbiased = DECAY + (1 - DECAY) / (1 - 1 / len(shown))
    np.testing.assert_allclose(moved["variance"][1], np.full(3, unbiased), rtol=1e-5)
    np.testing.assert_array_equal(moved["batches"], [1, 1])


def test_a_layer_used_twice_counts_both_uses():
    def twice(params):
        norm = NORM.bind(training(params))
        return jnp.sum(norm(X[:2], PRESENT[:2])) + jnp.sum(norm(X[2:], PRESENT[2:]))

    whole = gradient(PARAMS, X, PRESENT, WEIGHT)[1][0]["running"]
    both = jax.grad(twice)(PARAMS)["running"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), both, whole)


def test_half_precision_keeps_its_dtype():
    x = X.astype(jnp.bfloat16)
    assert NORM.bind(training(PARAMS))(x, PRESENT).dtype == jnp.bfloat16
    frozen = Functional(lambda rngs: FrozenBatchNorm(3))
    params = frozen.init(jax.random.key(0))
    assert frozen.bind(params)(x).dtype == jnp.bfloat16


def test_a_frozen_layer_computes_pytorchs_formula():
    own = {"scale": PARAMS["scale"], "bias": PARAMS["bias"]}
    own |= {"mean": PARAMS["running"]["mean"], "variance": PARAMS["running"]["variance"]}
    y = Functional(lambda rngs: FrozenBatchNorm(3)).bind({"frozen": own})(X)
    scale = own["scale"] / np.sqrt(own["variance"] + 1e-5)
    wanted = X * scale + (own["bias"] - own["mean"] * scale)  # torchvision.ops.FrozenBatchNorm2d
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_of_other_dimensions_is_refused(unchecked):
    for present in (PRESENT[:5], np.ones(X.shape, bool)):
        with pytest.raises(ValueError, match=r"takes `present` .* for x \[6, 4, 5, 3\]"):
            NORM.bind(PARAMS)(X, present)


def test_training_in_layers_that_stages_share_is_refused():
    layers = Functional(lambda rngs: stack.stack_layers(lambda r: BatchNorm(3), 2, rngs))
    mesh = make_mesh(MeshConfig(stage=2), jax.devices()[:2])

    def total(params):
        graph, weights = nnx.split(layers.bind(training(params)))
        layer = lambda x, w: (nnx.merge(graph, w)(x, jnp.ones(len(x), bool)), None)  # noqa: E731
        with use_abstract_mesh(mesh.abstract_mesh):
            return jnp.sum(stack.scan_layers(layer, X, weights, pipeline=Pipeline(2))[0])

    with pytest.raises(ValueError, match=r"over mesh axis stage by hand.*use FrozenBatchNorm in"):
        jax.eval_shape(total, layers.init(jax.random.key(0)))


def test_statistics_that_nothing_would_keep_are_refused():
    flax = Functional(lambda rngs: nnx.BatchNorm(3, rngs=rngs))
    with pytest.raises(ValueError, match=r"keeps mean as an nnx\.BatchStat.*batch_norm"):
        flax.init(jax.random.key(0))
