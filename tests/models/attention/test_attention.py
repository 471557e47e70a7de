"""Every implementation of `attend` against a plain softmax, forward, residual and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from models.attention import attention, blocked, flash
from models.attention.attention import MASKED, attend, attend_fully, explain, merge
from models.attention.partial import differentiable
from models.attention.target import compiling_for
from tests.helpers.models.attention import (
    assert_near,
    case,
    mixture,
    outputs_and_gradients,
    positions,
)
from tests.helpers.parallel.compiled import compile_for


def interpreted(*inputs, causal=False, q_position=None, kv_position=None):
    """The GPU's kernel, step by step on this CPU."""
    return flash.flash(*inputs, *((q_position, kv_position) if causal else ()), interpret=True)


def compiled(run):
    """`run` as one program, traced anew at each call: a test may change what is traced."""

    def call(*inputs, causal=False, **options):
        return jax.jit(functools.partial(run, causal=causal))(*inputs, **options)

    return call


RUN = {
    "dense": compiled(functools.partial(attend, implementation="dense")),
    "blocked": compiled(functools.partial(attend, implementation="blocked")),
    "pallas": compiled(interpreted),
}
every = pytest.mark.parametrize("implementation", RUN)
causal_or_not = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks on both sides of small cases."""
    monkeypatch.setattr(blocked, "_SMALLEST", 8)
    monkeypatch.setattr(blocked, "_LARGEST", 16)
    for tile in ("_Q_TILE", "_K_TILE"):
        monkeypatch.setattr(flash, tile, 32)


def reference(q, k, v, q_segment, kv_segment, causal=False):
    """Softmax written out per query in float64; no code shared with the implementations."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros_like(q), np.full(q.shape[:3], MASKED)
    for b, i, n in np.ndindex(q.shape[:3]):
        seen = (kv_segment[b] == q_segment[b, i]) & (q_segment[b, i] != 0)
        if causal:
            seen = seen & (np.arange(k.shape[1]) <= i)
        if not seen.any():
            continue
        g = n // (q.shape[2] // k.shape[2])
        logits = k[b, seen, g] @ q[b, i, n] / np.sqrt(q.shape[3])
        weights = np.exp(logits - logits.max())
        out[b, i, n] = weights @ v[b, seen, g] / weights.sum()
        lse[b, i, n] = logits.max() + np.log(weights.sum())
    return out, lse


@every
@causal_or_not
def test_implementations_equal_a_softmax_over_the_visible_keys(implementation, causal):
    q, k, v, q_segment, kv_segment = case(0)
    got = RUN[implementation](q, k, v, q_segment, kv_segment, causal=causal, **positions(q, k))
    out, lse = reference(q, k, v, q_segment, kv_segment, causal)
    np.testing.assert_allclose(got.out, out, atol=1e-5)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["blocked", "pallas"])
@pytest.mark.parametrize("groups", [1, 2])
@causal_or_not
def test_gradients_of_output_and_residual_are_those_of_dense(implementation, groups, causal):
    q, *rest = case(1, groups=groups)
    options = dict(mix=mixture(q), causal=causal, **positions(q, rest[0]))
    ours = outputs_and_gradients(RUN[implementation], q, *rest, **options)
    dense = outputs_and_gradients(RUN["dense"], q, *rest, **options)
    for a, b in zip(dense[2:], ours[2:], strict=True):
        scale = float(np.abs(a).max())
        assert scale > 0.1
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@causal_or_not
def test_gradients_of_dense_as_one_of_many_parts_are_those_that_jax_finds(groups, causal):
    q, *rest = case(1, groups=groups)
    at = positions(q, rest[0])
    options = dict(mix=mixture(q), causal=causal, **at)
    kernel = attention._TABLE["dense"].kernel(None)
    own = differentiable(kernel.run, kernel.gradients)

    def run(*inputs, causal, q_position, kv_position):
        return own(*inputs, *((q_position, kv_position) if causal else (None, None)))

    ours = outputs_and_gradients(run, q, *rest, **options)
    wanted = outputs_and_gradients(RUN["dense"], q, *rest, **options)
    assert_near(wanted, ours, 1e-5)


@every
def test_bfloat16_inputs_keep_an_f32_softmax(implementation):
    q, k, v, q_segment, kv_segment = case(5)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    got = RUN[implementation](*low, q_segment, kv_segment)
    exact = [np.asarray(x, np.float32) for x in low]
    out, lse = reference(*exact, q_segment, kv_segment)
    assert got.out.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(got.out, np.float32), out, atol=2**-7)


@every
def test_merged_parts_equal_attention_over_all_keys(implementation):
    q, k, v, q_segment, kv_segment = case(3)

    def part(s: slice):
        return RUN[implementation](q, k[:, s], v[:, s], q_segment, kv_segment[:, s])

    whole = part(slice(None))
    joined = jax.jit(merge)(part(slice(0, 28)), part(slice(28, None)))
    np.testing.assert_allclose(joined.out, whole.out, atol=1e-6)
    np.testing.assert_allclose(joined.lse, whole.lse, rtol=1e-6)


@every
def test_a_sample_leaks_into_no_other_ones_output_or_gradient(implementation):
    q, k, v, q_segment, kv_segment = case(4)
    mine, theirs = ((s == 2)[..., None, None] for s in (q_segment, kv_segment))
    numbers = ((mine, 7, q), (theirs, 5, k), (theirs, -5, v))
    changed = [np.where(at, np.float32(number), x) for at, number, x in numbers]
    before, after = (
        outputs_and_gradients(RUN[implementation], *x, q_segment, kv_segment, mix=mixture(q))
        for x in ((q, k, v), changed)
    )
    own = [mine, mine[..., 0], mine, theirs, theirs]
    for a, b, of_sample in zip(before, after, own, strict=True):
        others = np.broadcast_to(~of_sample, a.shape)
        np.testing.assert_array_equal(a[others], b[others])
        assert np.abs(a - b)[~others].max() > 0.1


@every
def test_padding_and_queries_without_keys_get_zero_output_and_zero_gradient(implementation):
    q, k, v, q_segment, kv_segment = case(6)
    q_segment[0], kv_segment[1, -20:] = 0, 0
    mix = np.ones((*q.shape[:3], q.shape[3] + 1))

    def scalar(q, k, v):
        got = RUN[implementation](q, k, v, q_segment, kv_segment)
        return jnp.sum(got.out * mix[..., :-1]) + jnp.sum(got.lse * mix[..., -1]), got.out

    gradients = jax.jit(jax.grad(scalar, (0, 1, 2), has_aux=True))
    (d_q, d_k, d_v), out = jax.device_get(gradients(q, k, v))
    assert not np.any(out[0])
    for x in (d_q[0], d_k[0], d_v[0], d_k[1, -20:], d_v[1, -20:]):
        np.testing.assert_array_equal(x, 0)
    assert all(np.isfinite(x).all() and np.abs(x[1]).max() > 0.1 for x in (d_q, d_k, d_v))


def test_cost_follows_the_sum_of_squared_segment_lengths():
    pairs = []
    visits = jax.jit(lambda blocks: blocked.visits(blocked.meets(blocks, blocks))[1])
    for segments in (1, 4, 16):
        blocks = np.repeat(np.arange(1, segments + 1), 256 // segments).reshape(1, 16, 16)
        pairs.append(int(np.asarray(visits(blocks)).sum()))
    assert pairs == [256, 64, 16]


@pytest.mark.parametrize("implementation", ["blocked", "pallas"])
def test_blocks_that_no_query_may_see_are_not_read(implementation):
    segment = np.repeat(np.array([1, 2, 3, 1], np.int32), 32)[None]
    x = np.ones((1, 128, 1, 16), np.float32)
    k = np.where((segment == 2)[..., None, None], np.float32(np.nan), x)
    out = np.asarray(RUN[implementation](x, k, k, segment, segment).out)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0, 0]), segment[0] == 2)


def test_a_block_visits_only_the_blocks_it_needs():
    """Segments 1 to 4, then 2 again, as where the keys of several parts stand one after another."""
    segment = np.repeat(np.array([1, 2, 3, 4, 2], np.int32), 16).reshape(1, 5, 16)
    meets = jax.jit(blocked.meets)(segment, segment)
    order, count = jax.device_get(jax.jit(blocked.visits)(meets))
    np.testing.assert_array_equal(count, [[1, 2, 1, 1, 2]])
    assert order[0, 1, :2].tolist() == order[0, 4, :2].tolist() == [1, 4]


def test_causal_blocks_skip_later_keys():
    segment = np.ones((1, 4, 16), np.int32)
    position = np.arange(64, dtype=np.int32).reshape(1, 4, 16)
    meets = jax.jit(blocked.meets)(segment, segment, position, position)
    order, count = jax.device_get(jax.jit(blocked.visits)(meets))
    np.testing.assert_array_equal(count, [[1, 2, 3, 4]])
    np.testing.assert_array_equal(order[0, 2], [0, 1, 2, 3])


@pytest.mark.parametrize("implementation", ["blocked", "pallas"])
def test_rows_stay_on_their_devices(implementation):
    """A partitioner that does not know that rows are independent gathers all of them."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    inputs = case(7)
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in inputs]
    mix = mixture(inputs[0])

    def loss(run, q, k, v, *segments):
        return jnp.sum(run(q, k, v, *segments).out * mix[..., :-1])

    ours, dense = (
        jax.jit(jax.grad(functools.partial(loss, RUN[name]), (0, 1, 2)))
        for name in (implementation, "dense")
    )
    compiled = ours.lower(*placed).compile()
    assert "all-gather" not in compiled.as_text()
    assert "all-reduce" not in compiled.as_text()
    for a, b in zip(dense(*inputs), compiled(*placed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_blocks_pad_a_row_little(monkeypatch):
    monkeypatch.undo()
    blocks = {96: 96, 192: 96, 200: 40, 512: 64, 520: 40, 4096: 64}
    assert {length: blocked.block_length(length) for length in blocks} == blocks


def shapes(length, dtype=jnp.bfloat16, head_dim=256):
    return [jax.ShapeDtypeStruct((2, length, n, head_dim), dtype) for n in (8, 1)]


def chosen(q, k):
    return next(name for name, objection in explain(q, k) if objection is None)


def test_auto_is_the_first_row_without_an_objection():
    assert chosen(*shapes(64)) == "dense"
    assert chosen(*shapes(1024)) == "blocked"
    with compiling_for("cuda", 9.0):
        assert chosen(*shapes(64)) == "dense"
        assert chosen(*shapes(2048)) == "pallas"
        assert chosen(*shapes(1024, jnp.float32)) == "dense"
        assert chosen(*shapes(2048, jnp.float32)) == "blocked"
        assert chosen(*shapes(2048, head_dim=288)) == "blocked"
    with compiling_for("cuda", 7.5):
        assert chosen(*shapes(2048)) == "blocked"


def test_auto_changes_its_choice_past_these_numbers_of_pairs():
    def pairs(queries, keys):
        return [jax.ShapeDtypeStruct((1, t, 1, 256), jnp.bfloat16) for t in (queries, keys)]

    assert chosen(*pairs(128, 256)) == "dense"
    assert chosen(*pairs(1, 32 * 1024 + 1)) == "blocked"
    with compiling_for("cuda", 8.0):
        assert chosen(*pairs(128, 256)) == "dense"
        assert chosen(*pairs(1, 32 * 1024 + 1)) == "pallas"
    with compiling_for("cuda", 7.5):
        assert chosen(*pairs(1024, 1024)) == "dense"
        assert chosen(*pairs(1, 1024 * 1024 + 1)) == "blocked"


def test_cudnn_is_for_a_hopper_and_what_its_kernels_take():
    def said(head_dim=128, dtype=jnp.bfloat16, **options):
        return dict(explain(*shapes(1024, dtype, head_dim), **options))["cudnn"]

    with compiling_for("cuda", 8.9):
        assert "needs an NVIDIA GPU of compute capability 9.0, not cuda (8.9)" in said(samples=4)
    with compiling_for("cuda", 9.0):
        assert said(samples=4) == "not yet measured to be faster on any GPU"
        assert "its causal mask follows the order" in said(samples=4, causal=True)
        assert "it needs `samples`" in said()
        assert "head dim 68 is not a multiple of 8" in said(68, samples=4)
        assert "float32" in said(dtype=jnp.float32, samples=4)


def test_every_row_says_what_speaks_against_it():
    said = dict(explain(*shapes(1024)))
    assert "1,048,576" in said["dense"]
    assert "cpu" in said["pallas"]
    assert said["blocked"] is None
    for kernel in ("tokamax", "pallas.ops.gpu", "pallas.ops.gpu.attention_mgpu"):
        assert "log-sum-exp" in said[kernel]
    with compiling_for("cuda", 9.0):
        assert "float32" in dict(explain(*shapes(1024, jnp.float32)))["pallas"]
        assert "288" in dict(explain(*shapes(1024, head_dim=288)))["pallas"]


def test_heads_that_cannot_share_and_positions_that_lack_are_refused():
    q, k, v, *segments = case(0, heads=4, groups=2)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key-value heads"):
        attend(q[:, :, :3], k, v, *segments)
    for name in ("q", "kv"):
        one = {f"{name}_position": positions(q, k)[f"{name}_position"]}
        with pytest.raises(ValueError, match="causal attention needs q_position and kv_position"):
            attend(q, k, v, *segments, causal=True, **one)


def test_a_named_row_that_cannot_serve_says_why_instead_of_another_running():
    with pytest.raises(ValueError, match=r"'pallas' cannot compute this: needs an NVIDIA GPU.*cpu"):
        attend(*case(0), implementation="pallas")
    with pytest.raises(ValueError, match=r"'tokamax' is not supported: .*log-sum-exp"):
        attend(*case(0), implementation="tokamax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'flash3'.*dense"):
        attend(*case(0), implementation="flash3")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "queries", "heads", "groups", "head_dim", "causal"),
    [
        ("auto", 1032, 8, 1, 256, False),
        ("auto", 1032, 8, 1, 256, True),
        ("auto", 400, 8, 1, 256, False),
        ("auto", 1032, 4, 4, 72, False),
        ("blocked", 1032, 8, 1, 256, True),
        ("dense", 400, 8, 1, 256, True),
        ("mosaic", 1032, 8, 1, 256, False),
        ("mosaic", 400, 4, 4, 64, True),
    ],
)
def test_rows_compile_for_an_h100_without_one(
    monkeypatch, implementation, queries, heads, groups, head_dim, causal
):
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    deviceless = pytest.importorskip("parallel.planning.deviceless")
    monkeypatch.undo()
    (device,) = deviceless.devices()
    q_segment, segment = (jax.ShapeDtypeStruct((2, t), jnp.int32) for t in (queries, 1032))
    q = jax.ShapeDtypeStruct((2, queries, heads, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1032, groups, head_dim), jnp.bfloat16)
    dense = 4 * 2 * heads * queries * 1032

    def loss(q, k, v, q_segment, segment):
        got = attend(
            q, k, v, q_segment, segment,
            causal=causal, q_position=q_segment, kv_position=segment,
            implementation=implementation,
        )  # fmt: skip
        return got.out.astype(jnp.float32).sum() + got.lse.sum()

    with compiling_for("cuda", 9.0):
        compiled = compile_for(device, jax.grad(loss, (0, 1, 2)), q, k, k, q_segment, segment)
    text = compiled.as_text()
    kernels = tuple(text.count(f'{name}"') for name in ("__gpu$xla.gpu.triton", "mosaic_gpu_v2"))
    assert kernels == {"auto": (3, 0), "mosaic": (2, 1)}.get(implementation, (0, 0))
    assert (compiled.memory_analysis().temp_size_in_bytes < dense) == (implementation != "dense")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(8, 1, 256), (8, 2, 64), (4, 4, 72)])
@causal_or_not
@pytest.mark.parametrize("implementation", ["pallas", "mosaic"])
def test_our_kernels_on_the_gpu_equal_dense(
    monkeypatch, implementation, heads, groups, head_dim, causal
):
    monkeypatch.undo()
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU here")
    rng = np.random.default_rng(8)
    segment = jnp.asarray(np.sort(rng.integers(0, 6, (2, 1000)), axis=1))
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, 1000, n, head_dim)), jnp.bfloat16)
        for n in (heads, groups, groups)
    )
    if reason := attention._TABLE[implementation].cannot(attention._case(q, k, causal=causal)):
        pytest.skip(reason)
    options = dict(mix=mixture(q), causal=causal, **positions(q, k))
    ours = functools.partial(attend, implementation=implementation)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("float32"):
        dense = outputs_and_gradients(RUN["dense"], *exact, segment, segment, **options)
    assert_near(dense, outputs_and_gradients(ours, q, k, v, segment, segment, **options), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 2, 1, 1, 2), (1, 2, 2, 2, 1)])
def test_a_pictures_attention_is_jaxs_own_by_our_kernel_too(monkeypatch, sizes):
    axes = ("data", "fsdp", "stage", "context")
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, (*axes, "tensor"), axis_types=(AxisType.Auto,) * 5)
    q, k, v = np.random.default_rng(3).normal(size=(3, 8, 40, 4, 24)).astype(np.float32)
    mix = mixture(q)[..., :-1]

    def loss(q, k, v):
        with use_abstract_mesh(mesh.abstract_mesh):
            out = attend_fully(q, k, v, axes)
        return jnp.sum(out * mix), out

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, PartitionSpec()))
    plain = jax.jit(run)(*placed)
    kernel = attention.Kernel(interpreted, flash.flash_gradients)
    row = attention._Row(lambda case: kernel)
    monkeypatch.setitem(attention._TABLE, "pallas", row)
    split = NamedSharding(mesh, PartitionSpec(axes, None, "tensor"))
    program = jax.jit(lambda *x: run(*x)).lower(*jax.device_put((q, k, v), split)).compile()
    assert "all-gather" not in program.as_text()
    ours = program(*jax.device_put((q, k, v), split))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_pictures_logits_are_not_in_an_h100s_memory(monkeypatch):
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    deviceless = pytest.importorskip("parallel.planning.deviceless")
    monkeypatch.undo()
    (device,) = deviceless.devices()
    q = jax.ShapeDtypeStruct((8, 320, 16, 72), jnp.bfloat16)

    def loss(*x):
        return attend_fully(*x).astype(jnp.float32).sum()

    with compiling_for("cuda", 9.0):
        text = compile_for(device, jax.grad(loss, (0, 1, 2)), q, q, q).as_text()
    assert text.count('__gpu$xla.gpu.triton"') == 3
    assert "320,320]" not in text
    plain = compile_for(device, jax.grad(loss, (0, 1, 2)), q, q, q).as_text()
    assert "320,320]" in plain
