from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.gemma import GemmaConfig, Prefix
from models.layers.layers import Compute, Remat

pytestmark = pytest.mark.slow

POLICIES = get_args(Remat)
ROWS, PLACES = 2, 256
QUICK = {"xla_backend_optimization_level": 0}


def stack(remat: Remat, unroll: bool = False) -> Prefix:
    config = GemmaConfig(64, 6, 512, heads=4, kv_heads=1, head_dim=32, remat=remat)
    compute = Compute(dtype="float32", attention="blocked", unroll=unroll)
    return Prefix(config, compute, nnx.Rngs(0))


@pytest.fixture(scope="module")
def compiled():
    """The compiled gradient of a stack under every policy, and its results; under two of them also
    as layers that are no loop."""
    x = jax.random.normal(jax.random.key(1), (ROWS, PLACES, 64))
    segment = jnp.ones((ROWS, PLACES), jnp.int32)
    position = jnp.broadcast_to(jnp.arange(PLACES), (ROWS, PLACES))
    weights = jax.jit(lambda: nnx.split(stack("none"))[1])()
    found = {}
    unrolled = [(remat, True) for remat in ("none", "full")]
    for remat, unroll in [(remat, False) for remat in POLICIES] + unrolled:
        graph, _ = nnx.split(nnx.eval_shape(partial(stack, remat, unroll)))

        def loss(weights, graph=graph):
            cache = nnx.merge(graph, weights)(x, segment, position)
            return jnp.sum(jnp.sin(cache.k)) + jnp.sum(cache.v**2)

        program = jax.jit(jax.grad(loss)).lower(weights).compile(compiler_options=QUICK)
        name = f"{remat}, unrolled" if unroll else remat
        found[name] = program, jax.device_get(program(weights))
    return found


def temporary(compiled, name):
    return compiled[name][0].memory_analysis().temp_size_in_bytes


def test_neither_policies_nor_unrolling_change_a_gradient(compiled):
    for _, gradient in compiled.values():
        for ours, theirs in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(compiled["none"][1]), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))


def test_policies_keep_less_from_first_to_last(compiled):
    used = [temporary(compiled, remat) for remat in POLICIES]
    assert used == sorted(used, reverse=True)
    layers, place = 5 * ROWS * PLACES * 4, {"out": 4 * 32, "qkv": 6 * 32 + 64, "mlp": 2 * 512 + 64}
    of = dict(zip(POLICIES, used, strict=True))
    assert of["attention"] - of["full"] > 0.8 * layers * place["out"]
    assert of["qkv"] - of["attention"] > 0.8 * layers * place["qkv"]
    assert of["dots"] - of["qkv"] > 0.5 * layers * place["mlp"]


def test_unrolled_layers_are_no_loop_and_attend_again_where_they_keep_nothing(compiled):
    """The layers' loops, and attention's, of which each of five layers has its own, are counted."""
    loops = {name: program.as_text().count(" while(") for name, (program, _) in compiled.items()}
    assert loops["none"] < loops["full"] < 10 < loops["none, unrolled"]
    assert loops["full, unrolled"] >= loops["none, unrolled"] + 2 * 5
