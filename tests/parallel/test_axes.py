"""One run, however the mesh is cut: every pair of axes gives the losses of a single device. A mesh
of three axes holds three pairs, and each mesh costs a compilation."""

import functools
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations

import jax
import numpy as np
import pytest

from models.attention.target import compiling_for
from models.families.groot.head import SHARDING_RULES as GROOT_RULES
from models.families.pi.model import SHARDING_RULES as PI_RULES
from models.layers.float8 import block_scaled
from models.layers.float8.kernel import block_product
from models.layers.layers import Lora
from models.sharding import shardings
from parallel.hosts.distributed import row_share
from parallel.mesh import AXES, MeshConfig, make_mesh
from parallel.planning.hlo import Program
from tests.helpers.parallel import small_pi
from tests.helpers.parallel.small_pi import CONFIG, losses, train
from tests.helpers.parallel.toy import together

PAIRS = [
    pytest.param(MeshConfig(**{"data": 1, a: 2, b: 4}), id=f"{a}2-{b}4")
    for pair in combinations(AXES, 2)
    for a, b in (pair, pair[::-1])
]
THREE = MeshConfig(fsdp=2, context=2, tensor=2)
MESHES = [
    (MeshConfig(data=2, fsdp=4), 1),
    (MeshConfig(data=2, stage=4), 2),
    (MeshConfig(data=2, context=4), 1),
    (MeshConfig(data=2, tensor=4), 2),
    (MeshConfig(fsdp=2, stage=2, context=2), 2),
    (MeshConfig(stage=2, context=2, tensor=2), 1),
]
"""Meshes, and micro-batches of a step: with `THREE`, every pair of axes."""


def sizes(mesh):
    """Axes of more than one device."""
    return {axis: n for axis, n in make_mesh(mesh).shape.items() if n > 1}


def named(value):
    if isinstance(value, MeshConfig):
        return "-".join(f"{axis}{n}" for axis, n in asdict(value).items() if n > 1)
    return None


@functools.cache
def alone(config=CONFIG):
    return train(one_device(), config=config)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def assert_same_state(ours, theirs):
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "accumulation"), MESHES, ids=named)
def test_every_pair_of_axes_gives_the_losses_of_one_device(mesh, accumulation):
    """Accumulates or not by turns; `make drill` runs each pair alone, both ways and both orders."""
    np.testing.assert_allclose(
        losses(make_mesh(mesh), accumulation), alone().losses, rtol=1e-5, atol=0
    )


def test_these_meshes_have_every_pair_of_axes_and_four_devices_along_all_but_the_slowest():
    cut = [sizes(mesh) for mesh in (*(mesh for mesh, _ in MESHES), THREE)]
    together = {frozenset(pair) for axes in cut for pair in combinations(axes, 2)}
    assert together == {frozenset(pair) for pair in combinations(AXES, 2)}
    assert {axis for axes in cut for axis, n in axes.items() if n == 4} == {*AXES[1:]}


@pytest.mark.drill
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mesh", PAIRS)
def test_every_pair_of_axes_in_both_orders_with_and_without_accumulation(mesh, accumulation):
    np.testing.assert_allclose(
        losses(make_mesh(mesh), accumulation), alone().losses, rtol=1e-5, atol=0
    )


@pytest.mark.slow
def test_three_axes_and_accumulation_give_the_losses_weights_and_averages_of_one_device():
    run = train(make_mesh(THREE), accumulation=2)
    np.testing.assert_allclose(run.losses, alone().losses, rtol=1e-5, atol=0)
    assert_same_state(run.state.params, alone().state.params)
    assert_same_state(run.state.ema, alone().state.ema)
    pairs = zip(*map(jax.tree.leaves, (run.state.params, run.state.ema)), strict=True)
    assert max(np.abs(p - e).max() for p, e in pairs) > 1e-4  # they are two things


def adapted(config):
    lora = Lora(rank=2, alpha=2.0)
    stacks = {
        name: replace(getattr(config, name), attention_lora=lora, mlp_lora=lora)
        for name in ("language", "expert")
    }
    return replace(config, **stacks)


VARIANTS = {
    "lora": adapted(CONFIG),
    "kept": replace(CONFIG, language=replace(CONFIG.language, remat="none")),
    "current": replace(CONFIG, compute=replace(CONFIG.compute, fp8="current")),
    "delayed": replace(CONFIG, compute=replace(CONFIG.compute, fp8="delayed")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "rtol"),
    [
        ("lora", 1e-5),
        ("delayed", 5e-3),
        pytest.param("kept", 1e-5, marks=pytest.mark.drill),
        pytest.param("current", 5e-3, marks=pytest.mark.drill),
    ],
)
def test_adapters_remat_and_float8_are_cut_like_the_rest(variant, rtol):
    """Scales of float8 are those of whole tensors, so the first loss is the same; later ones differ
    by roundings of sums that were added up in another order."""
    run = train(make_mesh(MeshConfig(data=2, context=2, tensor=2)), config=VARIANTS[variant])
    expected = alone(VARIANTS[variant]).losses
    np.testing.assert_allclose(run.losses[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(run.losses, expected, rtol=rtol)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("mesh", "chunk"),
    [(MeshConfig(data=4, fsdp=2), 0), (MeshConfig(data=2, context=2, tensor=2), 4)],
)
def test_a_step_with_a_hoppers_block_kernel_is_that_of_one_device(mesh, chunk, monkeypatch):
    """The kernel where a mesh splits tokens, columns and contractions, and what replaces it where
    chunks leave "tensor" to the compiler: the loss and the gradient, to 1e-5 where rounding to
    float8 costs 0.08. Later losses differ: Adam makes whole steps of the roundings that are the
    gradient of a key's bias, which does not matter, and float8 rounds the moved keys otherwise."""
    monkeypatch.setattr(block_scaled, "block_product", partial(block_product, interpret=True))
    compute = replace(CONFIG.compute, fp8="block", attention="dense", chunk=chunk)
    with compiling_for("gpu", 9.0):
        run, one = (
            train(on, steps=1, config=replace(CONFIG, compute=compute))
            for on in (make_mesh(mesh), one_device())
        )
    np.testing.assert_allclose(run.losses, one.losses, rtol=1e-5)
    ours, theirs = (small_pi.gradient(r.state) for r in (run, one))
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@functools.cache
def collectives(accumulation=1, **sizes):
    """Collectives of the step that the test of this pair runs."""
    mesh = make_mesh(MeshConfig(**sizes))
    step, _ = small_pi.compiled(mesh, accumulation)
    return Program(step.as_text()).collectives(dict(mesh.shape))


@pytest.mark.slow
def test_heads_and_hidden_units_stay_on_their_devices():
    along = [c for c in collectives(accumulation=2, data=2, tensor=4) if "tensor" in c.axes]
    assert {c.kind for c in along} <= {"all-reduce", "all-gather"}
    assert any(c.kind == "all-reduce" for c in along)
    kinds = {c.kind for c in collectives(data=1, fsdp=2, tensor=4) if "tensor" in c.axes}
    assert "all-to-all" not in kinds


@pytest.mark.slow
def test_keys_go_round_the_ring_and_nothing_else_does():
    along = [c for c in collectives(data=2, context=4) if "context" in c.axes]
    kinds = {c.kind for c in along}
    assert "all-to-all" not in kinds
    permuted = {c.bytes for c in along if c.kind == "collective-permute"}
    rows, places = small_pi.ROWS // 2, small_pi.LAYOUT.prefix // 4
    heads = CONFIG.language.kv_heads * CONFIG.language.head_dim
    assert permuted == {4 * rows * places * heads, 4 * rows * places}  # keys or values; segments


@pytest.mark.parametrize(("rules", "name"), [(PI_RULES, "q"), (GROOT_RULES, "k")])
def test_a_parameter_that_an_axis_does_not_divide_is_named(rules, name):
    shapes = {"language": {"layers": {"attention": {name: {"kernel": np.zeros((4, 8, 4, 8))}}}}}
    with pytest.raises(ValueError, match=rf"language/layers/attention/{name}/kernel.*tensor of"):
        shardings(shapes, rules, make_mesh(MeshConfig(tensor=8)))


def test_one_process_brings_all_rows():
    for axis in AXES:
        assert row_share(make_mesh(MeshConfig(**{"data": 1} | {axis: -1}))) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.drill), 4])
def test_several_processes_give_the_losses_of_one(processes):
    """4 × 2 devices, where pairs along "context" bring the same rows; `make drill` runs 2 × 4. Two
    processes also train in `test_distributed` and, launched, in tests/tools/test_train.py."""
    outputs = together("tests.helpers.parallel.pi_host", processes, 8 // processes)
    printed = [
        [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]
        for output in outputs
    ]
    assert all(one == printed[0] for one in printed)
    np.testing.assert_allclose(printed[0], alone().losses, rtol=1e-5, atol=0)
