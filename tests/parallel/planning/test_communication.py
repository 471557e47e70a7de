"""Bytes on the wire are the textbook's, and follow the shardings, micro-batches and layers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from models.model import Stack
from parallel.mesh import AXES
from parallel.planning.cluster import CHIPS, Chip, make_cluster, read_cluster
from parallel.planning.communication import (
    Collective,
    StepShape,
    busy,
    collectives,
    group,
    seconds,
    wire_bytes,
)

ONE = dict.fromkeys(AXES, 1)
MESH = AbstractMesh((1,) * 5, AXES, axis_types=(AxisType.Auto,) * 5)
H100 = make_cluster("h100", 1024)


def parameter(*shape, spec=()):
    placed = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)


def sent(params, step, stacks=()):
    return {(c.kind, c.axis): c.bytes for c in collectives(params, stacks, step)}


@pytest.mark.parametrize("n", [2, 8, 1024])
def test_a_ring_all_reduce_sends_twice_all_but_one_share(n):
    assert wire_bytes("all-reduce", 1.0, n) == 2 * (n - 1) / n
    assert wire_bytes("all-gather", 1.0, n) == wire_bytes("reduce-scatter", 1.0, n) == (n - 1) / n


def test_one_device_sends_nothing():
    assert wire_bytes("all-reduce", 1e9, 1) == 0
    assert seconds(Collective("all-gather", "fsdp", 1e9, 10), ONE, H100) == 0


def test_fsdp_inside_a_node_and_data_across_lie_where_they_should():
    sizes = ONE | {"data": 128, "fsdp": 8}
    assert group("fsdp", sizes, 8) == (8, 1)
    assert group("data", sizes, 8) == (1, 128)
    assert group("fsdp", ONE | {"fsdp": 1024}, 8) == (8, 128)
    assert group("data", ONE | {"data": 16, "tensor": 4}, 8) == (2, 8)


def test_groups_that_nodes_cut_cross_between_them():
    """Six of 24 devices along fsdp, in nodes of eight: the second six lie on two nodes."""
    assert group("fsdp", ONE | {"data": 4, "fsdp": 6}, 8) == (2, 2)
    assert group("fsdp", ONE | {"data": 8, "fsdp": 3}, 8) == (1, 2)
    assert group("fsdp", ONE | {"data": 2, "fsdp": 12}, 8) == (4, 2)
    assert group("data", ONE | {"data": 8, "fsdp": 3}, 8) == (2, 3)
    assert group("fsdp", ONE | {"fsdp": 6}, 8) == (6, 1)
    crossing = Collective("all-gather", "fsdp", 1e9, 0)
    load = busy(crossing, ONE | {"data": 4, "fsdp": 6}, make_cluster("h100", 24))
    assert load.across == pytest.approx(5 / 6 * 1e9 / 2 / (50e9 * 0.8))


def test_frozen_weights_are_gathered_as_they_are_kept_and_nothing_of_theirs_is_reduced():
    base = parameter(4, 1000, spec=(None, "fsdp"))
    half = jax.ShapeDtypeStruct(base.shape, jnp.bfloat16, sharding=base.sharding)
    quarter = jax.ShapeDtypeStruct(base.shape, jnp.uint8, sharding=base.sharding)
    words = parameter(1000, 8, spec=("fsdp",))
    step = StepShape(ONE | {"data": 2, "fsdp": 8}, rows=1)
    found = {c.kind: c.bytes for c in collectives({}, (), step, [base, half, quarter, words])}
    assert found == {"all-gather": 2 * 4000 * (2 + 2 + 1)}


def test_sharded_weights_are_gathered_twice_and_their_gradients_reduced_and_scattered():
    params = {"w": parameter(4, 1000, spec=(None, "fsdp")), "b": parameter(10)}
    step = StepShape(ONE | {"data": 2, "fsdp": 8}, rows=1)
    assert sent(params, step) == {
        ("all-gather", "fsdp"): 2 * 4000 * 2,
        ("reduce-scatter", "fsdp"): 4000 * 2,
        ("all-reduce", "fsdp"): 10 * 2,
        ("all-reduce", "data"): (4000 / 8 + 10) * 2,
    }


def test_micro_batches_repeat_all_of_it():
    params = {"w": parameter(4, 1000, spec=(None, "fsdp"))}
    once = StepShape(ONE | {"data": 2, "fsdp": 8}, rows=1)
    thrice = replace(once, accumulation=3)
    assert sent(params, thrice) == {k: 3 * v for k, v in sent(params, once).items()}


def test_plain_data_parallelism_reduces_every_gradient_and_gathers_nothing():
    params = {"w": parameter(1000), "v": parameter(4, 500, spec=(None, "fsdp"))}
    assert sent(params, StepShape(ONE | {"data": 16}, 1)) == {("all-reduce", "data"): 3000 * 2}


def test_a_table_of_words_stays_where_it_is_and_its_gradient_is_f32():
    params = {"words": parameter(1000, 8, spec=("fsdp",))}
    step = StepShape(ONE | {"data": 2, "fsdp": 4}, rows=1)
    assert sent(params, step) == {("all-reduce", "data"): 8000 * 4 / 4}


def test_weights_in_float8_travel_as_such_and_their_gradients_do_not():
    params = {"w": parameter(4, 1000, spec=(None, "fsdp"))}
    step = StepShape(ONE | {"fsdp": 8}, rows=1, gathered=1)
    assert sent(params, step) == {
        ("all-gather", "fsdp"): 2 * 4000,
        ("reduce-scatter", "fsdp"): 4000 * 2,
    }


def test_tensor_halves_are_summed_twice_a_layer_in_each_pass():
    stack, rows = Stack(depth=3, width=64, places=10, keys=32), 4
    step = StepShape(ONE | {"tensor": 2}, rows, recompute=False)
    stream = rows * 10 * 64 * 2
    assert sent({}, step, [stack]) == {("all-reduce", "tensor"): 4 * 3 * stream}
    again = replace(step, recompute=True)
    assert sent({}, again, [stack]) == {("all-reduce", "tensor"): 6 * 3 * stream}
    (once,), (thrice,) = (collectives({}, [stack], replace(step, accumulation=n)) for n in (1, 3))
    assert (once.calls, thrice.calls) == (4 * 3, 3 * 4 * 3)


def test_a_ring_passes_each_share_of_keys_to_all_others():
    stack, rows = Stack(depth=3, width=64, places=12, keys=32), 4
    step = StepShape(ONE | {"context": 4}, rows, recompute=False)
    share = rows * 12 / 4 * 32 * 2
    assert sent({}, step, [stack]) == {("permute", "context"): 3 * (4 - 1) * 3 * share}


def test_stages_hand_over_every_micro_batch_in_both_directions():
    stack = Stack(depth=4, width=64, places=10, keys=0)
    step = StepShape(ONE | {"stage": 2}, rows=4, recompute=False, microbatches=4)
    assert sent({}, step, [stack]) == {("permute", "stage"): 2 * (4 + 1) * (4 / 4) * 10 * 64 * 2}


def test_a_stack_whose_layers_all_stages_hold_hands_nothing_over():
    tower = Stack(depth=4, width=64, places=10, keys=0, staged=False)
    step = StepShape(ONE | {"stage": 2}, rows=4, recompute=False, microbatches=4)
    assert sent({}, step, [tower]) == {}


def test_stages_gather_their_layers_for_every_micro_batch_and_the_others_theirs_once():
    """docs/pipeline.md: as accumulation does."""
    params = {
        "layers": parameter(4, 8, 100, spec=("stage", None, "fsdp")),
        "vision": parameter(4, 100, spec=(None, "fsdp")),
    }
    step = StepShape(ONE | {"fsdp": 2, "stage": 2, "data": 2}, rows=8, microbatches=4)
    turned = 4 * 3200 / 2 + 400
    assert sent(params, step) == {
        ("all-gather", "fsdp"): 2 * turned * 2,
        ("reduce-scatter", "fsdp"): turned * 2,
        ("all-reduce", "data"): (3200 / 2 + 400) / 2 * 2,
    }


def test_large_gathers_take_their_bytes_over_the_slowest_link():
    size = 6.6e9
    inside = Collective("all-gather", "fsdp", size, 0)
    time = seconds(inside, ONE | {"data": 128, "fsdp": 8}, H100)
    assert time == pytest.approx(7 / 8 * size / (450e9 * 0.8))
    time = seconds(inside, ONE | {"fsdp": 1024}, H100)
    assert time == pytest.approx(1023 / 1024 * size / (8 * 50e9 * 0.8))
    across = Collective("all-reduce", "data", size / 8, 0)
    time = seconds(across, ONE | {"data": 128, "fsdp": 8}, H100)
    assert time == pytest.approx(2 * 127 / 128 * size / 8 / (50e9 * 0.8))


def test_small_collectives_take_their_hops():
    many = Collective("all-reduce", "data", 0.0, 100)
    times = [seconds(many, ONE | {"data": n}, H100) for n in (8, 64, 1024)]
    assert 0 < times[0] < times[1] < times[2]


def test_a_faster_nic_is_never_slower():
    across = Collective("all-reduce", "data", 1e9, 3)
    slow, fast = (make_cluster("h100", 1024, nic_gbps=g) for g in (100, 400))
    sizes = ONE | {"data": 1024}
    assert seconds(across, sizes, fast) < seconds(across, sizes, slow)


def test_a_cluster_is_read_from_json(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text(
        '{"chip": "h200", "devices": 64, "across": {"bandwidth": 25e9, "latency": 1e-5}}'
    )
    cluster = read_cluster(file)
    assert (cluster.chip, cluster.devices, cluster.across.rate) == (CHIPS["h200"], 64, 20e9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"chip": "h900", "devices": 8}', "h900"),
        ('{"chip": "h100"}', "devices"),
        ('{"chip": "h100",', "cluster.json is not JSON"),
        ('{"chip": "h100", "devices": 8, "failures": 0}', "cluster.failures is 0"),
        ('{"chip": "h100", "devices": 8, "jitter": -1}', "cluster.jitter is -1"),
        (
            '{"chip": "h100", "devices": 8, "across": {"bandwidth": 0, "latency": 0}}',
            "across: bandwidth is 0",
        ),
        (
            '{"chip": {"name": "x", "flops": {}, "memory": 1, "bandwidth": 1}, "devices": 8}',
            "flops",
        ),
    ],
)
def test_a_cluster_that_is_none_is_refused(tmp_path, text, problem):
    file = tmp_path / "cluster.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_cluster(file)


def test_half_nodes_and_unknown_chips_are_refused():
    with pytest.raises(ValueError, match="expected whole nodes"):
        make_cluster("h100", 12)
    with pytest.raises(ValueError, match="'v100', expected one of"):
        make_cluster("v100", 8)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_cluster("nowhere.json")


def test_a_dtype_a_chip_has_no_units_for_runs_at_its_slowest():
    chip = Chip("toy", {"bfloat16": 2.0, "float32": 1.0}, 1, 1)
    assert (chip.peak("bfloat16"), chip.peak("float64")) == (2.0, 1.0)
