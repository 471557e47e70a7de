"""The pipeline against the plain loop over layers that it stands for, on forced CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from models.layers.layers import Compute, Dense
from models.layers.pipeline import Pipeline, check_pipeline, on_each_stage, staged
from models.layers.stack import scan_layers, stack_layers
from models.sharding import shardings
from parallel.mesh import MeshConfig, make_mesh
from parallel.planning.hlo import Program

DEPTH, ROWS, PLACES, WIDTH = 8, 16, 3, 8
STAGED, BY_ROW = PartitionSpec("stage"), PartitionSpec(("data", "fsdp"))


def mesh_of(stages, data=2):
    return make_mesh(MeshConfig(data=data, stage=stages), jax.devices()[: data * stages])


def layer(x, weights, cached, condition, segment):
    """Reads its rows' own conditions and segments and the layer's own cached places; leaves some
    places of its own behind."""
    hidden = jnp.tanh(x @ weights["kernel"] + weights["bias"]) * condition["scale"]
    shown = jnp.where(segment[..., None] == 1, hidden, 0) + cached.sum(-1, keepdims=True)
    return x + shown, (x @ weights["kernel"])[..., :2]


def inputs():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    weights = {"kernel": 0.3 * draw(DEPTH, WIDTH, WIDTH), "bias": draw(DEPTH, WIDTH)}
    x, cached = draw(ROWS, PLACES, WIDTH), draw(DEPTH, ROWS, PLACES, 2)
    return (weights, x, cached, {"scale": draw(ROWS, 1, WIDTH)}), rng.integers(0, 3, (ROWS, PLACES))


def run(mesh, pipeline, remat):
    """Jitted (inputs, segment) to ((loss, (x, left)), gradients) on a mesh."""

    def loss(values, segment):
        weights, x, cached, condition = values
        with use_abstract_mesh(mesh.abstract_mesh):
            rows = (condition, segment)
            x, left = scan_layers(layer, x, weights, remat, rows, (cached,), pipeline)
        return (x**2).sum() + (left**3).sum(), (x, left)

    layered = PartitionSpec("stage", ("data", "fsdp"))
    placed = tuple(NamedSharding(mesh, s) for s in (STAGED, BY_ROW, layered, BY_ROW))
    return jax.jit(
        jax.value_and_grad(loss, has_aux=True),
        in_shardings=(placed, NamedSharding(mesh, BY_ROW)),
        out_shardings=((None, (placed[1], placed[2])), placed),
    )


@pytest.fixture(scope="module")
def plain():
    return jax.device_get(run(mesh_of(1, 1), Pipeline(), "none")(*inputs()))


@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "remat"),
    [(2, 0, 1, "none"), (4, 8, 1, "full"), (2, 1, 1, "dots"), (2, 2, 4, "none"), (4, 8, 2, "full")],
)
def test_a_pipeline_gives_the_numbers_and_gradients_of_the_loop(
    plain, stages, microbatches, repeats, remat
):
    mesh = mesh_of(stages, data=2 if microbatches != 1 else 1)
    found = run(mesh, Pipeline(microbatches, repeats), remat)(*inputs())
    for ours, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_activations_alone_travel_between_stages_once_a_tick():
    mesh = mesh_of(4)
    compiled = run(mesh, Pipeline(4), "full").lower(*inputs()).compile()
    between = [c for c in Program(compiled.as_text()).collectives(mesh.shape) if "stage" in c.axes]
    ring = [c for c in between if c.kind == "collective-permute"]
    activations = ROWS // 4 // 2 * PLACES * WIDTH * 4
    assert [(c.bytes, c.times) for c in ring] == [(activations, 7)] * 2  # forward and backward
    with_conditions = ROWS // 2 * (PLACES + 1) * WIDTH * 4
    rest = [c for c in between if c.kind != "collective-permute"]
    assert {c.kind for c in rest} <= {"all-reduce"}
    assert {c.times for c in rest} == {1}
    assert max(c.bytes for c in rest) <= with_conditions  # gradients of what enters


def test_with_repeats_weights_travel_by_permutation_and_once():
    mesh = mesh_of(2)
    compiled = run(mesh, Pipeline(2, repeats=2), "full").lower(*inputs()).compile()
    between = [c for c in Program(compiled.as_text()).collectives(mesh.shape) if "stage" in c.axes]
    assert {c.kind for c in between} <= {"collective-permute", "all-reduce"}
    share = DEPTH // 2 // 2 * WIDTH * WIDTH * 4
    moved = [c.times for c in between if c.bytes == share]
    assert moved
    assert set(moved) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_backward_keeps_no_copy_of_weights_for_a_micro_batch(repeats, remat):
    """bf16 activations: the copies would be those that the products take."""
    mesh, width = mesh_of(2, 1), 256
    weights = jax.ShapeDtypeStruct((4, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((16, width), jnp.bfloat16)

    def needed(microbatches):
        def loss(weights, x):
            def layer(x, w):
                return x + jnp.tanh(x @ w.astype(x.dtype)), None

            with use_abstract_mesh(mesh.abstract_mesh):
                pipeline = Pipeline(microbatches, repeats)
                x, _ = scan_layers(layer, x, weights, remat, pipeline=pipeline)
            return (x.astype(jnp.float32) ** 2).sum()

        over = NamedSharding(mesh, STAGED)
        step = jax.jit(jax.grad(loss), in_shardings=(over, None), out_shardings=over)
        return step.lower(weights, x).compile().memory_analysis().temp_size_in_bytes

    assert needed(16) < 1.2 * needed(2)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "repeats"), [(4, 1), (4, 2)])
def test_float8_histories_get_the_largest_magnitudes_of_all_micro_batches(microbatches, repeats):
    mesh, compute = mesh_of(2), Compute("float32", fp8="delayed")
    layers = stack_layers(
        lambda rngs: Dense(WIDTH, WIDTH, compute=compute, rngs=rngs), 4, nnx.Rngs(0)
    )
    graph, weights = nnx.split(layers)
    x = np.random.default_rng(0).normal(size=(ROWS, PLACES, WIDTH)).astype(np.float32)
    x[5] *= 20  # of one micro-batch

    def gradients(mesh):
        def loss(weights, x):
            with use_abstract_mesh(mesh.abstract_mesh):
                x, _ = scan_layers(
                    lambda x, w: (x + nnx.merge(graph, w)(x), None),
                    x,
                    weights,
                    "full",
                    pipeline=Pipeline(microbatches, repeats),
                )
            return (x**2).sum()

        over = (NamedSharding(mesh, STAGED), NamedSharding(mesh, BY_ROW))
        return jax.jit(jax.grad(loss), in_shardings=over)(weights, x)

    ours, other = (jax.device_get(gradients(m)) for m in (mesh, mesh_of(1, 1)))
    assert (other["fp8_history"].get_value()[..., 0] > 0).all()
    for name in ("fp8_history", "kernel"):
        np.testing.assert_allclose(ours[name].get_value(), other[name].get_value(), rtol=1e-4)


def test_layers_that_do_not_read_each_other_run_each_on_its_stage():
    mesh, ((weights, x, _, _), _) = mesh_of(4), inputs()

    def all_layers(x, weights):
        return jax.lax.map(lambda kernel: x @ kernel, weights["kernel"])

    def on_mesh(weights, x):
        with use_abstract_mesh(mesh.abstract_mesh):
            return on_each_stage(all_layers, x, weights)

    placed = NamedSharding(mesh, STAGED), NamedSharding(mesh, BY_ROW)
    compiled = jax.jit(on_mesh, in_shardings=placed).lower(weights, x).compile()
    assert Program(compiled.as_text()).collectives(mesh.shape) == []
    np.testing.assert_allclose(compiled(weights, x), all_layers(x, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pipeline", "stages", "depth", "rows", "message"),
    [
        (Pipeline(), 4, 18, 64, "18 layers does not divide over 4 stages"),
        (Pipeline(repeats=2), 2, 18, 64, "18 layers does not divide over 2 stages × 2 repeats"),
        (Pipeline(4), 2, 18, 12, "12 rows .* 2 devices × 4 micro-batches .* multiple of 8"),
        (Pipeline(2, repeats=3), 3, 18, 64, "3 with 2 micro-batches on 3 stages"),
    ],
)
def test_what_does_not_divide_is_refused(pipeline, stages, depth, rows, message):
    with pytest.raises(ValueError, match=message):
        check_pipeline(pipeline, stages, depth, rows, row_shards=2)


@pytest.mark.parametrize("sizes", [(-1, 1), (0, 0)])
def test_an_impossible_pipeline_is_refused(sizes):
    with pytest.raises(ValueError, match=r"pipeline\.microbatches"):
        Pipeline(*sizes)


def test_the_bubble_shrinks_with_micro_batches_and_repeats():
    assert Pipeline(4).bubble(1) == 0
    assert Pipeline(4).bubble(4) == pytest.approx(3 / 7)
    assert Pipeline(16).bubble(4) == pytest.approx(3 / 19)
    assert Pipeline(4, repeats=4).bubble(4) == pytest.approx(3 / 19)
    assert Pipeline(repeats=2).bubble(3) == pytest.approx(2 / 8)


def test_rules_cut_the_layers_of_stacks_and_nothing_else():
    rules = staged(((r"kernel$", PartitionSpec(None, "fsdp")), (r"^scale$", PartitionSpec())), "a/")
    sizes = {"stage": 2, "fsdp": 2}
    mesh = AbstractMesh((2, 2), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    kernel = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    tree = {"a": {"b": {"kernel": kernel}}, "c": {"a": {"kernel": kernel}}, "scale": kernel}
    found = {
        path: s.spec
        for path, s in (
            (jax.tree_util.keystr(p, simple=True, separator="/"), s)
            for p, s in jax.tree_util.tree_leaves_with_path(shardings(tree, rules, mesh))
        )
    }
    assert found == {
        "a/b/kernel": PartitionSpec("stage", "fsdp"),
        "c/a/kernel": PartitionSpec(None, "fsdp"),
        "scale": PartitionSpec(),
    }
