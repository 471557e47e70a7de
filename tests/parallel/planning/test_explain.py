"""A compiled step read kernel by kernel: what each moves and computes, for which part of the model,
and what is waited for. The program in step.hlo is small enough to count by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from parallel.mesh import AXES
from parallel.planning.cluster import Chip, Cluster, Link
from parallel.planning.explain import Explanation, explain, grouped, phase, scope
from parallel.planning.hlo import Program
from parallel.planning.report import as_json, show

TEXT = (Path(__file__).parent / "step.hlo").read_text()
MESH = dict.fromkeys(AXES, 1) | {"fsdp": 4}
CHIP = Chip("toy", {"bfloat16": 1e6, "float32": 5e5}, 1e9, 1e6, 0.5, 0.5, kernel_seconds=1e-3)
CLUSTER = Cluster(CHIP, 4, node=4, inside=Link(1e6, 0.0, 1.0))
WEIGHT, ACTIVATION = 16 * 32, 8 * 32
PRODUCT = 2 * 8 * 64 * 32


def read(text: str) -> Explanation:
    return explain(Program(text), MESH, CLUSTER)


@pytest.fixture(scope="module")
def found() -> Explanation:
    return read(TEXT)


def test_a_kernel_of_a_loop_counts_as_often_as_the_loop_turns(found):
    assert {k.name: k.times for k in found.kernels} == {
        "w": 5, "product": 5, "keep": 5, "next": 5, "empty": 1, "turned": 1
    }  # fmt: skip
    assert found.flops == 5 * PRODUCT


def test_a_kernel_moves_the_parts_that_it_takes_and_puts(found):
    assert {k.name: k.bytes for k in found.kernels} == {
        "w": 4 * WEIGHT + 2 * WEIGHT,  # of one layer
        "product": 2 * (8 * 64 + 64 * 32 + ACTIVATION),  # not cuBLAS's workspace
        "keep": 2 * 2 * ACTIVATION,
        "next": 2 * ACTIVATION + 2 * 8 * 64,
        "empty": 2 * 5 * ACTIVATION,
        "turned": 2 * 2 * 5 * ACTIVATION,
    }


def test_a_copy_that_is_started_reads_and_writes_its_array_once():
    array = "bf16[5,8,32]{2,1,0}"
    started = f"  %begun = ({array}, {array}, u32[]) copy-start(%all)\n"
    ended = f"  %copied = {array} copy-done(%begun)\n"
    text = TEXT.replace("  %turned", started + ended + "  %turned")
    (copy,) = [k for k in read(text).kernels if k.name == "begun"]
    assert (copy.bytes, copy.work) == (2 * 2 * 5 * ACTIVATION, "move")


def test_kernels_are_named_by_the_models_scopes_and_sorted_by_what_they_do(found):
    assert {k.name: (k.scope, k.phase, k.work) for k in found.kernels} == {
        "w": ("language/mlp", "forward", "cast"),
        "product": ("language/mlp", "forward", "product"),
        "keep": ("language", "forward", "move"),
        "next": ("language/norm", "forward", "element-wise"),
        "empty": ("", "other", "fill"),
        "turned": ("language", "backward", "move"),
    }


def test_a_kernel_takes_its_flops_or_its_bytes_and_its_start(found):
    kernels = {k.name: k for k in found.kernels}
    product, moved = kernels["product"], kernels["turned"]
    assert product.seconds == pytest.approx(5 * (PRODUCT / 5e5 + 1e-3))
    assert moved.seconds == pytest.approx(moved.bytes / 5e5 + 1e-3)
    assert not product.memory_bound
    assert {k.name for k in found.moved} == {"keep", "turned"}
    assert "product" not in [k.name for k in found.slowest_memory_bound]


def test_weights_are_followed_through_the_loop_to_their_casts(found):
    (cast,) = found.casts
    assert (cast.argument, cast.dtype, cast.times) == ("language/mlp/kernel", "bf16", 5)
    assert cast.bytes == cast.whole == 2 * 5 * WEIGHT


def test_weights_that_a_loop_changes_are_no_longer_the_arguments():
    changed = TEXT.replace("tuple(%i, %next, %weights, %keep)", "tuple(%i, %next, %other, %keep)")
    changed = changed.replace(
        "  ROOT %out", "  %other = f32[5,16,32]{2,1,0} negate(%weights)\n  ROOT %out"
    )
    assert not read(changed).casts


def test_a_collective_is_exposed_as_far_as_no_kernel_runs_meanwhile(found):
    gather = 3 * 2 * WEIGHT / 1e6
    reduce = 2 * 3 * 2 * 5 * ACTIVATION // 4 / 1e6
    assert {s.collective.kind: s.seconds for s in found.collectives} == pytest.approx(
        {"all-gather": gather, "all-reduce": reduce}
    )
    assert found.exposed == pytest.approx(5 * gather + reduce)
    assert found.seconds == pytest.approx(found.exposed + sum(k.seconds for k in found.kernels))
    behind = TEXT.replace("  %gathered = bf16[64,32]{1,0} all-gather-done(%gather)\n", "")
    behind = behind.replace("custom-call(%x, %gathered)", "custom-call(%x, %x)")
    behind = behind.replace(
        "  ROOT %out", "  %gathered = bf16[64,32]{1,0} all-gather-done(%gather)\n  ROOT %out"
    )
    assert read(behind).exposed == pytest.approx(reduce)


def test_a_synchronous_collective_stops_the_kernels(found):
    text = TEXT.replace('"is_sync":false', '"is_sync":true')
    assert read(text).exposed == pytest.approx(found.exposed)


def test_a_loop_tells_its_kernels_and_seconds_by_turn(found):
    (loop,) = found.loops
    assert (loop.scope, loop.phase, loop.trips, loop.kernels) == ("language", "forward", 5, 4)
    outside = [k for k in found.kernels if k.times == 1]
    (reduce,) = [s.seconds for s in found.collectives if s.collective.kind == "all-reduce"]
    rest = sum(k.seconds for k in outside) + reduce
    assert 5 * loop.seconds + rest == pytest.approx(found.seconds)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("jit(step)/jvp(language)/while/body/closed_call/mlp/mul", ("language/mlp", "forward")),
        ("jit(step)/transpose(jvp(a))/norm/vmap(rope)/mul", ("a/norm/rope", "backward")),
        (
            "jit(step)/transpose(jvp(a))/while/body/checkpoint/rematted_computation/norm/mul",
            ("a/norm", "recomputed"),
        ),
        ("jit(f)/jvp()/vmap(BTNH,BSNH->BNTS)/mul;jit(f)/jvp(b)/mul", ("", "forward")),
        ("jit(step)/update/ema/add", ("update/ema", "other")),
        ("broadcast.416", ("", "other")),
    ],
)
def test_a_name_tells_part_and_pass(source, expected):
    assert (scope(source), phase(source)) == expected


def test_a_live_program_has_the_flops_of_its_scan_by_scope():
    def loss(weights, x):
        def layer(x, w):
            with jax.named_scope("mlp"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("tower"):
            return jax.lax.scan(layer, x, weights)[0].sum()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((7, 64, 64), (32, 64))]
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    found = explain(Program(text), {}, CLUSTER)
    product = 2 * 32 * 64 * 64
    assert found.flops == 3 * 7 * product
    products = [k for k in found.kernels if k.flops]
    by_phase = dict(grouped(products, lambda k: f"{k.scope} {k.phase}"))
    flops = {name: sum(k.times * k.flops for k in group) for name, group in by_phase.items()}
    assert flops == {
        "tower/mlp forward": 7 * product, "tower/mlp backward": 2 * 7 * product,
    }  # fmt: skip


def test_the_report_is_json_and_tables(found):
    report = as_json(found)
    assert json.loads(json.dumps(report))["bytes"] == found.bytes
    assert report["scopes"]["language/mlp"]["flops"] == found.flops
    assert report["work"]["move"]["bytes"] == report["moved_bytes"]
    console = Console(width=100, record=True)
    show(found, console)
    printed = console.export_text()
    for expected in ("language/mlp", "language/mlp/kernel", "all-gather", "turned", "5"):
        assert expected in printed
