"""Budgets of the full-size train steps on H100s that are not here: memory, bytes on the wire,
float8. The programs are compiled on this CPU; docs/compile.md says what that leaves open.
"""

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
import pytest

from models import Pi
from models.families.groot.head import SHARDING_RULES as GROOT_RULES
from models.families.groot.model import Groot, GrootConfig
from models.families.pi.model import SHARDING_RULES as PI_RULES
from models.layers.layers import Compute
from models.sharding import axes_of, path_name, shardings
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import OptimizerConfig
from parallel.planning.deviceless import CompiledStep, compile_step
from tools.recipes.presets import PI05

ROWS, SAMPLES, CAMERAS, PROMPT = 8, 4, 3, 64
"""A GPU has 8 rows of 4 samples, each of three pictures and 64 tokens of text: 32 samples."""
NODE, GPU_BYTES = 8, 80e9
KEY = jax.random.key(0)
OPTIMIZER = OptimizerConfig(warmup_steps=1000, decay_steps=30_000)

pytestmark = pytest.mark.slow


def pi05(fp8="none") -> tuple[Any, Any]:
    return Pi(replace(PI05.model, compute=Compute(fp8=fp8))), PI_RULES


def groot() -> tuple[Any, Any]:
    base = GrootConfig()
    stacks: dict[str, Any] = {
        name: replace(getattr(base, name), remat="full")
        for name in ("vision", "language", "adapter", "dit")
    }
    return Groot(replace(base, **stacks)), GROOT_RULES


def compiled(model, rules, gpus: int) -> CompiledStep:
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    places = SAMPLES * (CAMERAS * model.config.vision.tokens(model.config.image_size) + PROMPT)
    layout = model.config.layout(
        prefix=places, samples=SAMPLES, images=SAMPLES * CAMERAS, text=SAMPLES * PROMPT
    )
    node = min(gpus, NODE)
    return compile_step(
        model, OPTIMIZER, rules, MeshConfig(data=-1, fsdp=node), layout, ROWS * gpus,
        topology=f"1x{gpus // node}x{node}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_a_node() -> CompiledStep:
    return compiled(*pi05(), 8)


@pytest.fixture(scope="module")
def on_1024_in_float8() -> CompiledStep:
    return compiled(*pi05("current"), 1024)


def formula(model, rules, gpus: int) -> dict[tuple[str, ...], float]:
    """Bytes that a GPU sends in a step, by kind and axes (docs/compile.md). Gathered once are
    GR00T's weights of each embodiment's own, as the kernels that samples chose are kept, and its
    transformer's that are outside the loop: of keys and values, and of the last two layers."""
    node = make_mesh(MeshConfig(data=1, fsdp=NODE), jax.devices()[:NODE])
    shapes = jax.eval_shape(model.init, KEY)
    table, whole, weights, once = shapes.pop("embedding").size, 0, 0, 0.0
    for (path, x), placed in zip(
        jax.tree_util.tree_leaves_with_path(shapes),
        jax.tree.leaves(shardings(shapes, rules, node)),
        strict=True,
    ):
        name, cut = path_name(path), "fsdp" in axes_of(*placed.spec)
        weights += cut * x.size
        whole += (not cut) * x.size
        if re.search(r"^(state|action)_(en|de)coder|^dit/cross_blocks/[kv]/", name):
            once += cut * x.size
        elif re.search(r"^dit/(cross|self)_blocks/", name):
            once += cut * x.size / len(x)
    if "expert" in shapes:  # of the last language layer only keys and values are computed
        last = shapes["language"]["layers"]
        unread = [last["attention"]["q"], last["attention"]["out"], *last["mlp"].values()]
        weights -= sum(x["kernel"].size for x in unread) // model.config.language.depth
    vectors = NODE * ROWS * SAMPLES * PROMPT * model.config.language.width
    inside, across = (NODE - 1) / NODE, 2 * (gpus - NODE) / gpus
    both = ("data", "fsdp") if gpus > NODE else ("fsdp",)
    return {
        ("all-gather", "fsdp"): (2 * (2 * weights - once) + 2 * vectors) * inside,
        ("reduce-scatter", "fsdp"): (2 * weights + 4 * vectors) * inside,
        ("all-reduce", "data"): (2 * weights + 4 * table) / NODE * across,
        ("all-reduce", *both): 4 * whole * 2,
    }


def sent(report: CompiledStep) -> dict[tuple[str, ...], float]:
    total: dict[tuple[str, ...], float] = defaultdict(float)
    for (kind, _, axes), size in report.sent.items():
        total[kind, *axes] += size
    return total


def check_wire(report: CompiledStep, model, rules) -> None:
    """Asserts what holds of every bf16 step on whole nodes."""
    expected, found = formula(model, rules, report.devices), sent(report)
    for which in (("all-gather", "fsdp"), ("reduce-scatter", "fsdp")):
        assert found[which] == pytest.approx(expected[which], rel=0.05), which
    assert not report.loops
    which = ("all-reduce", "data")
    assert found.get(which, 0) == pytest.approx(expected[which], rel=0.05)
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.05)
    moved = found.keys() - {*expected, ("all-reduce", "fsdp"), ("all-reduce", "data")}
    assert sum(found[which] for which in moved) < 1e-4 * sum(found.values())


def hidden(report: CompiledStep) -> float:
    """Share of all bytes sent that go behind matrix products."""
    behind = (c.sent * c.times for c in report.collectives if c.asynchronous and c.flops)
    return sum(behind) / sum(report.sent.values())


def test_full_finetuning_fits_eight_gpus_at_32_samples_each(on_a_node):
    memory = on_a_node.memory
    assert memory.peak < 0.5 * GPU_BYTES
    state = 4 * 4 * sum(x.size for x in jax.tree.leaves(jax.eval_shape(pi05()[0].init, KEY)))
    assert memory.arguments == pytest.approx(state / NODE, rel=0.02)  # all of it is cut
    assert memory.aliased == pytest.approx(memory.outputs, rel=0.001)


def test_bytes_on_the_wire_follow_the_formula(on_a_node):
    check_wire(on_a_node, *pi05())


def test_weights_are_gathered_in_bf16_layer_by_layer(on_a_node):
    gathers = [c for c in on_a_node.collectives if c.kind == "all-gather"]
    assert {c.dtype for c in gathers if c.bytes > 1e6} == {"bf16"}
    layer = 3 * 2048 * 16384
    assert max(c.bytes * c.group for c in gathers) <= 2 * layer


def test_gradients_are_scattered_not_kept_whole(on_a_node):
    reduced = [c for c in on_a_node.collectives if c.kind == "all-reduce"]
    assert max(c.bytes for c in reduced) < 4 * 3e6  # of biases, norms and positions


def test_most_bytes_travel_behind_matrix_products(on_a_node, on_1024_in_float8):
    assert hidden(on_a_node) > 0.6
    assert hidden(on_1024_in_float8) > 0.5


def test_the_blocks_multiply_in_float8(on_1024_in_float8):
    """All projections of the blocks' loops; with attention, whose kernels XLA does not count, too:
    11 products of a query-key pair forward, forward again and backward."""
    matmuls = on_1024_in_float8.matmuls
    in_blocks = [m for m in matmuls if "scan_layers" in m.functions]
    float8 = sum(m.flops * m.times for m in in_blocks if m.dtype.startswith("f8"))
    projections = sum(m.flops * m.times for m in in_blocks if not m.batched)
    assert float8 > 0.99 * projections
    every = sum(m.flops * m.times for m in matmuls)
    sample = CAMERAS * 256 + PROMPT
    pairs = ROWS * SAMPLES * (17 * sample**2 + 18 * 50 * sample)
    attention = 11 * 2 * 8 * 256 * pairs
    assert float8 > 0.9 * (every + attention)


def test_float8_weights_travel_as_float8_and_data_parallel_gradients_once(on_1024_in_float8):
    found = on_1024_in_float8.sent
    gathered = {k: v for k, v in found.items() if k[0] == "all-gather"}
    float8 = sum(v for (_, dtype, _), v in gathered.items() if dtype.startswith("f8"))
    assert float8 > 0.85 * sum(gathered.values())
    expected = formula(*pi05(), 1024)["all-reduce", "data"]
    assert sent(on_1024_in_float8)["all-reduce", "data"] == pytest.approx(expected, rel=0.05)
    assert on_1024_in_float8.memory.peak < 0.5 * GPU_BYTES


@pytest.mark.drill
@pytest.mark.parametrize("gpus", [1, 8, 256, 1024])
@pytest.mark.parametrize("make", [pi05, groot])
def test_every_size_compiles_and_keeps_to_its_budget(make, gpus):
    report = compiled(*make(), gpus)
    assert report.devices == gpus
    if gpus == 1:
        assert not report.collectives
    else:
        assert report.memory.peak < 0.5 * GPU_BYTES
        check_wire(report, *make())
    memory, wire = (
        report.memory,
        ", ".join(f"{'+'.join(k)} {v / 1e9:.2f}" for k, v in sent(report).items()),
    )
    print(
        f"| {make.__name__} | {gpus} | {report.seconds:.0f} s | {memory.peak / 1e9:.1f} | {wire} |"
    )
