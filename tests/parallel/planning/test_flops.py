"""FLOPs, bytes and live memory read off a jaxpr are those of hand formulas and of XLA."""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Pi
from models.attention.target import compiling_for
from models.inputs.packed_batch import PackedBatch, pack
from models.layers.layers import Remat
from parallel.optimizer import OptimizerConfig
from parallel.planning import flops
from parallel.planning.flops import Matmul, own_work, work
from tools.recipes.presets import PI05, TINY

F32 = jnp.float32
PLACES = PI05.model.layout(prefix=1024, samples=2, images=3)
SMALL = TINY.model.layout(prefix=80, samples=2, images=1)


def shape(*sizes: int, dtype=F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def with_remat(config, remat: Remat):
    parts = {n: replace(getattr(config, n), remat=remat) for n in ("vision", "language", "expert")}
    return replace(config, **parts)


def batch(rows: int, layout) -> PackedBatch:
    one = pack([[]], layout)
    return jax.tree.map(lambda x: shape(rows, *x.shape[1:], dtype=x.dtype), one)


@lru_cache
def gradient_work(config, rows: int, layout):
    model = Pi(config)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    loss = jax.value_and_grad(lambda p, b: model.loss(p, b, jax.random.key(0)), has_aux=True)
    return work(loss, params, batch(rows, layout)), params


def test_a_product_costs_two_operations_per_multiplication():
    found = work(jnp.matmul, shape(3, 5, 7), shape(7, 11))
    assert found.flops == 2 * 3 * 5 * 7 * 11


def test_a_batched_product_keeps_its_sizes():
    found = work(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shape(4, 5, 6), shape(4, 6, 7))
    assert list(found.matmuls) == [Matmul(4, 5, 7, 6, "float32", 4)]
    assert next(iter(found.matmuls)).bytes == 4 * 4 * (5 * 6 + 6 * 7 + 5 * 7)


def test_a_convolution_costs_its_windows():
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    found = work(convolve, shape(2, 8, 8, 3), shape(3, 3, 3, 16))
    assert found.flops == 2 * (2 * 8 * 8) * 16 * (3 * 3 * 3)


def test_a_scan_costs_its_length_and_a_while_loop_the_trips_given():
    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    def looped(x, w, n):
        return jax.lax.fori_loop(0, n, lambda _, x: x @ w, x)

    assert work(scanned, shape(4, 8), shape(5, 8, 8)).flops == 5 * 2 * 4 * 8 * 8
    count = shape(dtype=jnp.int32)
    assert work(looped, shape(4, 8), shape(8, 8), count, trips=3).flops == 3 * 2 * 4 * 8 * 8


def test_recomputation_under_checkpoint_counts():
    def loss(w, x, wrap):
        return jnp.square(wrap(lambda x: jnp.tanh(x @ w) @ w)(x)).sum()

    plain = work(jax.grad(lambda w, x: loss(w, x, lambda f: f)), shape(8, 8), shape(4, 8))
    again = work(jax.grad(lambda w, x: loss(w, x, jax.checkpoint)), shape(8, 8), shape(4, 8))
    product = 2 * 4 * 8 * 8
    assert plain.flops == 5 * product  # two forward, two for the weight, one for what lies between
    assert again.flops == plain.flops + product  # what tanh reads


def test_elementwise_chains_move_what_they_read_and_write_once():
    found = work(lambda x, y: jnp.tanh(x * 2 + y) - 1, shape(1000), shape(1000))
    assert found.bytes == 3 * 4000
    assert found.kernels == 1


def test_the_peak_counts_what_lives_at_once():
    big = 4 * 64 * 64

    def chain(x):
        for _ in range(6):
            x = jnp.tanh(x @ x)
        return x

    def keeps(x):
        kept = [x @ (x + n) for n in range(6)]
        return sum(k @ k for k in kept)

    assert work(chain, shape(64, 64)).peak <= 3 * big
    assert work(keeps, shape(64, 64)).peak >= 6 * big


@pytest.mark.slow
def test_products_of_a_small_model_are_those_xla_counts():
    """XLA's count adds element-wise operations, which are a few per cent here; its loops count
    once, so layers are unrolled (few, without remat)."""
    found, params = gradient_work(TINY.model, 4, SMALL)
    model = Pi(TINY.model)
    loss = jax.value_and_grad(lambda p, b: model.loss(p, b, jax.random.key(0)), has_aux=True)
    compiled = jax.jit(loss).lower(params, batch(4, SMALL)).compile()
    theirs = compiled.cost_analysis()["flops"]
    assert 0.85 < found.flops / theirs < 1.0


@pytest.mark.slow
def test_pi05_costs_six_operations_per_parameter_and_place():
    """Three passes of 2 FLOPs over the weights that a place meets, and the scores of attention."""
    few, params = gradient_work(with_remat(PI05.model, "none"), 8, PLACES)
    many, _ = gradient_work(with_remat(PI05.model, "none"), 9, PLACES)

    def weights(tree, layers):
        kernels = [x for x in jax.tree.leaves(tree) if len(x.shape) > 2]
        return sum(x.size // x.shape[0] for x in kernels) * layers

    vision = weights(params["vision"]["blocks"], 27) * 3 * 256
    language = weights(params["language"]["layers"], 17) * 1024  # the last keeps keys alone
    horizon = 2 * 50
    expert = weights({k: v for k, v in params["expert"]["layers"].items() if "norm" not in k}, 18)
    by_hand = 6 * (vision + language + expert * horizon)
    assert 1.0 < (many.flops - few.flops) / by_hand < 1.06


@pytest.mark.slow
def test_remat_trades_operations_for_memory():
    costs = [
        gradient_work(with_remat(PI05.model, r), 8, PLACES)[0] for r in ("none", "dots", "full")
    ]
    assert costs[0].peak > costs[1].peak > costs[2].peak
    assert costs[0].flops < costs[2].flops < 4 / 3 * costs[0].flops


@pytest.mark.slow
def test_a_models_own_operations_are_neither_recomputed_nor_those_of_a_kernels_padding():
    """SigLIP's heads of 72, which a GPU's kernel pads to 128, of two pictures in each row."""
    optimizer, rows = OptimizerConfig(), batch(8, PLACES)
    model, again = (Pi(with_remat(PI05.model, remat)) for remat in ("none", "full"))
    with compiling_for("gpu", 9.0):
        padded = flops.gradient_work(model, optimizer, rows, trips=5)
        own = own_work(again, optimizer, rows, trips=5)
    assert own == own_work(model, optimizer, rows, trips=5)
    assert own.flops < padded.flops


def test_work_needs_no_arrays():
    found = work(lambda w: w @ w, shape(1 << 20, 1 << 20))
    assert found.flops == 2.0 * (1 << 60)
    assert np.isfinite(found.peak)


@pytest.mark.slow
def test_rows_cost_alike():
    one, four = (gradient_work(TINY.model, n, SMALL)[0].flops for n in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.02)
