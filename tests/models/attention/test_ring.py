"""Attention split over a mesh against attention on one device, and how evenly it is split."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import blocked, flash, ring
from models.attention.attention import MASKED, attend
from models.attention.ring import Kernel, append, deal, spread
from models.sharding import constrain
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.models.attention import case, mixture, outputs_and_gradients, positions
from tests.helpers.parallel.small_pi import batch

QUERIES, KEYS = 32, 48


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "_SMALLEST", 4)
    monkeypatch.setattr(blocked, "_LARGEST", 8)


def on(mesh, run):
    """`run`, compiled for the mesh."""

    def traced(*arrays, **options):
        with jax.set_mesh(mesh):
            return run(*arrays, **options)

    return traced


def assert_same(ours, theirs):
    for a, b in zip(theirs, ours, strict=True):
        scale = float(np.abs(np.where(a > MASKED / 2, a, 0)).max())
        assert scale > 0.1
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5)


def interpreted(*arrays, causal=False, q_position=None, kv_position=None, implementation=""):
    """The GPU's kernels, step by step on this CPU."""
    kernel = Kernel(
        functools.partial(flash.flash, interpret=True),
        functools.partial(flash.flash_gradients, interpret=True),
    )
    masks = (q_position, kv_position) if causal else (None, None)
    return spread(kernel, (*arrays, *masks), split_queries=False)


@pytest.mark.parametrize(
    ("mesh", "implementation", "causal"),
    [
        (MeshConfig(data=2, context=4), "dense", True),
        (MeshConfig(data=2, context=4), "blocked", True),
        (MeshConfig(context=2), "pallas", True),
        (MeshConfig(context=4, tensor=2), "dense", False),
        (MeshConfig(context=4, tensor=2), "blocked", False),
        (MeshConfig(fsdp=2, tensor=4), "blocked", True),
    ],
)
def test_a_split_row_is_attended_to_as_a_whole_one(mesh, implementation, causal):
    """Segments reach across devices, which differ in what they hold of them."""
    q, *rest = case(1, QUERIES, KEYS, groups=1 if mesh.tensor == 4 else 2)
    options = dict(mix=mixture(q), causal=causal, **positions(q, rest[0]))
    run = interpreted if implementation == "pallas" else attend
    if implementation != "pallas":
        options["implementation"] = implementation
    devices = jax.devices()[: 2 if implementation == "pallas" else 8]
    ours = on(make_mesh(mesh, devices), outputs_and_gradients)(run, q, *rest, **options)
    options["implementation"] = "dense"
    assert_same(ours, outputs_and_gradients(attend, q, *rest, **options))


@pytest.mark.parametrize("groups", [1, 2])
def test_queries_that_every_device_holds_are_joined_across_them(groups):
    mesh = make_mesh(MeshConfig(context=4, tensor=2))
    q, *rest = case(2, 30, KEYS, groups=groups)
    run = functools.partial(attend, split_queries=False)
    options = {"mix": mixture(q), "implementation": "dense"}
    assert_same(
        on(mesh, outputs_and_gradients)(run, q, *rest, **options),
        outputs_and_gradients(attend, q, *rest, **options),
    )


def test_no_sample_of_a_split_row_sees_another():
    mesh = make_mesh(MeshConfig(context=4, data=2))
    q, k, v, q_segment, kv_segment = case(3, QUERIES, KEYS)
    run = on(mesh, jax.jit(functools.partial(attend, implementation="blocked")))
    before = run(q, k, v, q_segment, kv_segment)
    other = (kv_segment == 2)[..., None, None]
    after = run(q, np.where(other, 7 - k, k), np.where(other, 9 * v, v), q_segment, kv_segment)
    same, (one, changed) = q_segment != 2, (np.asarray(x.out) for x in (before, after))
    np.testing.assert_array_equal(one[same], changed[same])
    assert np.abs(one - changed)[~same].max() > 0.1


def test_backward_keeps_no_more_for_a_longer_ring():
    """Residuals are a device's own queries, keys and result, however many devices pass by."""

    def kept(context):
        mesh = make_mesh(MeshConfig(context=context), jax.devices()[:context])
        arrays = [jnp.asarray(x) for x in case(4, 8 * context, 8 * context)]
        run = functools.partial(attend, implementation="dense")
        out = lambda *qkv: run(*qkv, *arrays[3:]).out  # noqa: E731
        back = on(mesh, jax.eval_shape)(lambda *qkv: jax.vjp(out, *qkv)[1], *arrays[:3])
        return sum(x.size for x in jax.tree.leaves(back)) // context

    assert kept(8) == kept(4) == kept(2)


def test_places_that_do_not_divide_are_named():
    q, *rest = case(5, QUERIES, 50)
    with pytest.raises(ValueError, match=r"50 key places .* axis context of size 4"):
        on(make_mesh(MeshConfig(context=4)), attend)(q, *rest)
    with pytest.raises(ValueError, match=r"2 key-value heads .* axis tensor of size 4"):
        on(make_mesh(MeshConfig(tensor=4)), attend)(q, *rest)
    with pytest.raises(ValueError, match=r"prefix of 31 places .* axis context of size 2"):
        on(make_mesh(MeshConfig(context=2)), deal)(shortened(31))


def shortened(places):
    names = ("prefix_source", "prefix_segment", "prefix_position")
    return replace(batch(0), **{name: getattr(batch(0), name)[:, :places] for name in names})


def test_dealing_out_places_keeps_every_one_of_them(monkeypatch):
    monkeypatch.setattr(ring, "RUN", 4)
    before = batch(0)
    after = on(make_mesh(MeshConfig(context=4)), deal)(before)
    assert on(make_mesh(), deal)(before) is before
    for name in ("prefix_source", "prefix_segment", "prefix_position"):
        old, new = np.asarray(getattr(before, name)), np.asarray(getattr(after, name))
        of_second = [*range(4, 8), *range(20, 24)]
        np.testing.assert_array_equal(new.reshape(len(old), 4, -1)[:, 1], old[:, of_second])
        np.testing.assert_array_equal(np.sort(old, 1), np.sort(new, 1))


@pytest.mark.parametrize(("causal", "worst", "saved"), [(False, 1.25, 0.25), (True, 1.4, 0.1)])
def test_dealt_out_places_leave_the_slowest_device_less_to_do(causal, worst, saved):
    """Rows of 8,192 places over 8 devices, samples of 300 to 1,300: blocks of 64 keys that a device
    visits, the most of any device in each turn of the ring."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(300, 1300, (8, 28))
    segment = np.stack([np.repeat(np.arange(1, 29), of_row)[:8192] for of_row in lengths])
    position = np.stack(
        [np.concatenate([np.arange(n) for n in of_row])[:8192] for of_row in lengths]
    )

    def slowest_and_mean(order):
        parts = [[x[:, o] for x in (segment, position)] for o in np.split(order, 8)]
        work = [[visited(parts[d], parts[d - t], causal) for d in range(8)] for t in range(8)]
        return np.max(work, axis=1).sum(), np.mean(work, axis=1).sum()

    dealt, even = slowest_and_mean(np.arange(8192).reshape(-1, 8, 64).swapaxes(0, 1).ravel())
    in_order, same = slowest_and_mean(np.arange(8192))
    singly, more = slowest_and_mean(np.arange(8192).reshape(-1, 8).T.ravel())
    assert dealt < worst * even
    assert dealt < (1 - saved) * in_order
    assert dealt < 0.65 * singly
    assert even == same < 0.65 * more


def visited(mine, theirs, causal):
    """Blocks of keys visited by the blocks of queries of each row."""
    q, kv = ([blocked.cut(jnp.asarray(x), 64) for x in side] for side in (mine, theirs))
    masks = (q[0], kv[0], q[1], kv[1]) if causal else (q[0], kv[0])
    return np.asarray(_meets(*masks).sum((1, 2)))


_meets = jax.jit(blocked.meets)


def test_what_is_appended_stands_beside_each_devices_own_places():
    mesh = make_mesh(MeshConfig(context=2))
    x, y = jnp.arange(8)[None], 10 + jnp.arange(3)[None]
    joined = on(mesh, jax.jit(lambda x, y: append(constrain(x, None, "context"), y, 1)))
    assert joined(x, y).tolist() == [[0, 1, 2, 3, 10, 11, 4, 5, 6, 7, 12, 0]]
    assert append(x, y, 1).tolist() == [[*range(8), 10, 11, 12]]
