"""Reading the text of a compiled program: collectives, matrix products, how often."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from parallel.planning.hlo import Program

MESH = {"data": 2, "fsdp": 4}

LOOP = (Path(__file__).parent / "loop.hlo").read_text()


def test_what_a_loop_runs_counts_as_often_as_the_loop():
    (gather,) = [c for c in Program(LOOP).collectives(MESH) if c.dtype == "bf16"]
    assert (gather.kind, gather.times, gather.axes, gather.group) == ("all-gather", 5, ("fsdp",), 4)
    assert (gather.bytes, gather.sent) == (2 * 2 * 16, 3 * 2 * 2 * 16)
    assert gather.source == "gather"


def test_a_combined_start_is_counted_once_for_each_dtype():
    found = [(c.kind, c.dtype, c.bytes) for c in Program(LOOP).collectives(MESH)]
    assert found == [
        ("all-reduce", "f32", 128),
        ("all-gather", "bf16", 64),
        ("all-gather", "s32", 24),
    ]


def test_what_stands_between_start_and_end_runs_meanwhile():
    reduce, gather, _ = Program(LOOP).collectives(MESH)
    assert (gather.asynchronous, gather.kernels, gather.flops) == (True, 1, 2 * 4 * 16 * 8)
    assert (reduce.asynchronous, reduce.kernels, reduce.flops) == (False, 0, 0)


def test_products_of_fusions_and_of_cublas_are_counted_with_their_dtype_and_author():
    call, dot = Program(LOOP).matmuls()
    assert (call.flops, call.times, call.functions) == (1024, 5, ("Dense.product", "scan"))
    assert (dot.flops, dot.times, dot.dtype, dot.batched) == (1024, 5, "bf16", False)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("[2,4]<=[8]", ("fsdp",), 4),
        ("{}", ("data", "fsdp"), 8),
        ("mesh['a'=2,'b'=4] {'b'}", ("fsdp",), 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", ("data", "fsdp"), 8),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), 2),
        ("mesh['a'=8] {'a':(2)4}", ("fsdp",), 4),
        ("mesh['a'=8] {'a':(1)2}", ("data",), 2),
    ],
)
def test_groups_are_named_by_the_axes_of_the_mesh(groups, axes, size):
    reduce = Program(LOOP.replace("replica_groups={}", f"replica_groups={groups}")).collectives(
        MESH
    )[0]
    assert (reduce.axes, reduce.group) == (axes, size)
    assert reduce.sent == 2 * 128 * (size - 1) // size


def test_a_loop_of_unknown_length_is_named_and_counted_once():
    program = Program(LOOP.replace("known_trip_count", "unknown"))
    assert program.unknown_loops == ["loop"]
    assert {m.times for m in program.matmuls()} == {1}


def test_of_a_conditional_the_dearest_branch_counts_alone():
    def chosen(i, x):
        branches = [lambda x: x, lambda x: jnp.tanh(x @ x) @ x, lambda x: x @ x]
        return jax.lax.switch(i, branches, x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compiled = jax.jit(chosen).lower(jax.ShapeDtypeStruct((), jnp.int32), x).compile()
    program = Program(compiled.as_text())
    assert [(m.flops, m.times) for m in program.matmuls()] == [(2 * 64**3, 1)] * 2


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        Program("module @jit_step {}")


def test_a_live_program_has_its_gathers_and_its_products():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    weights, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in [((3, 64, 64), (None, "fsdp")), ((32, 64), (("data", "fsdp"),))]
    )

    def forward(weights, x):
        def layer(x, w):
            return jax.lax.with_sharding_constraint(x @ w, PartitionSpec(("data", "fsdp"))), None

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.lax.scan(layer, x, weights)[0]

    program = Program(jax.jit(forward).lower(weights, x).compile().as_text())
    products = program.matmuls()
    assert sum(m.flops * m.times for m in products) == 3 * 2 * 4 * 64 * 64
    gathers = [c for c in program.collectives(dict(mesh.shape)) if c.kind == "all-gather"]
    assert [(c.dtype, c.axes, c.bytes * c.times) for c in gathers] == [
        ("f32", ("fsdp",), 3 * 16 * 64 * 4)
    ]
