import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from models.layers.dit import DitBlock, TransformerConfig
from models.layers.layers import Compute, GatedMLP, Lora
from models.layers.qwen.qwen3 import SwiGLU
from models.layers.siglip import SiglipConfig
from models.layers.siglip import VitBlock as SiglipBlock
from models.sharding import ROWS
from parallel.mesh import MeshConfig, make_mesh

LORA = Lora(rank=2, alpha=4.0)
SIGLIP = SiglipConfig(width=32, depth=1, hidden=48, heads=2)
DIT = TransformerConfig(depth=1, heads=2, head_dim=16, lora=LORA)
LAYERS = {
    "GeGLU": lambda c, r: GatedMLP(32, 48, c, r),
    "GeGLU with LoRA": lambda c, r: GatedMLP(32, 48, c, r, LORA),
    "SwiGLU": lambda c, r: SwiGLU(32, 48, c, r),
    "SigLIP": lambda c, r: SiglipBlock(SIGLIP, c, r),
    "DiT with LoRA": lambda c, r: DitBlock(DIT, 32, False, c, r),
}
X = jax.random.normal(jax.random.key(0), (8, 6, 32))


def results(make, chunk, fp8="none", mesh=None, x=X):
    """Output of a layer, and gradients of weights and input."""
    layer = make(Compute(dtype="float32", fp8=fp8, chunk=chunk), nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    weights = jax.tree.map(
        lambda w: w + 0.1 * jnp.cos(jnp.arange(w.size)).reshape(w.shape), weights
    )

    def loss(weights, x):
        layer = nnx.merge(graph, weights)
        y = layer.mlp(x) if hasattr(layer, "mlp") else layer(x)
        return jnp.sum(jnp.sin(jnp.arange(y.size)).reshape(y.shape) * y), y

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    if mesh is None:
        return jax.device_get(run(weights, x))
    x = jax.device_put(x, NamedSharding(mesh, P(ROWS, "context")))
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    with use_abstract_mesh(mesh.abstract_mesh):
        return jax.device_get(run(weights, x))


def assert_close(ours, theirs, tolerance=1e-6):
    """Relative to the largest entry; a gradient that is 0 but for rounding (a bias of keys moves no
    softmax) is so in both."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        largest = np.abs(b).max()
        atol = 1e-5 if largest < 1e-5 else tolerance * largest
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name",
    [
        *("GeGLU", "GeGLU with LoRA"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYERS)[2:]),
    ],
)
def test_chunks_change_nothing(name):
    assert_close(results(LAYERS[name], chunk=13), results(LAYERS[name], chunk=0))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MeshConfig(2, 2, 1, 2, 1), MeshConfig(1, 2, 1, 2, 2)])
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_devices_take_chunks_of_what_they_hold(sizes, fp8):
    make = LAYERS["GeGLU with LoRA"]
    assert_close(results(make, 5, fp8, make_mesh(sizes)), results(make, 0, fp8))


def test_histories_of_float8_scales_get_the_largest_magnitude_of_all_chunks():
    make = LAYERS["GeGLU"]
    ours, theirs = results(make, 13, "delayed"), results(make, 0, "delayed")
    assert_close(ours, theirs)
    np.testing.assert_array_equal(
        *(r[0][0]["gate"]["fp8_history"][...][:2] for r in (ours, theirs))
    )


def temporary(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_what_a_wide_layer_makes_of_all_tokens_never_exists():
    x = jax.ShapeDtypeStruct((4, 1024, 32), jnp.float32)
    whole = 4 * 1024 * 512 * 4

    def size(chunk):
        layer = GatedMLP(32, 512, Compute(dtype="float32", chunk=chunk), nnx.Rngs(0))
        graph, weights = nnx.split(layer)
        return temporary(jax.grad(lambda w, x: nnx.merge(graph, w)(x).sum(), (0, 1)), weights, x)

    assert size(0) > 3 * whole
    assert size(256) < whole / 2


def test_devices_send_nothing_between_chunks():
    mesh = make_mesh(MeshConfig(2, 4))

    def like(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    graph, weights = nnx.split(GatedMLP(64, 256, Compute(dtype="float32", chunk=32), nnx.Rngs(0)))
    weights = jax.tree.map(lambda w: like(w.shape, "fsdp"), weights)
    gradient = jax.grad(lambda w, x: jnp.sum(nnx.merge(graph, w)(x) ** 2), (0, 1))
    with use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(gradient).lower(weights, like((16, 64, 64), ROWS)).compile().as_text()
    sent = re.findall(r" (?:all-|reduce-|collective-)[a-z-]+\(.*op_name=\"([^\"]*)", program)
    assert len(sent) >= 4
    assert not [name for name in sent if "while" in name]
