"""cuDNN's kernels of variable lengths, called through XLA and through Transformer Engine: what they
are given, by an emulation of them, against plain softmax; and that XLA's call is the one JAX makes.

Where Transformer Engine is installed (`make te`), its own code stands between ours and the
emulation."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, use_abstract_mesh

from models.attention import cudnn, te
from models.attention.attention import attend, explain, merge
from models.attention.target import compiling_for
from tests.helpers.models import cudnn as cudnn_calls
from tests.helpers.models import transformer_engine
from tests.helpers.models.attention import assert_near, mixture, outputs_and_gradients
from tests.helpers.parallel.compiled import compile_for

SAMPLES = 4


def rows(lengths, asked=None, heads=4, groups=2, seed=0, dtype=np.float32):
    """Rows of samples of so many places, 60 in all; `asked` queries of each if given, else a query
    of each place."""
    rng = np.random.default_rng(seed)
    ids = np.arange(1, SAMPLES + 1, dtype=np.int32)
    k_segment = np.stack([_row(np.repeat(ids[: len(row)], row)) for row in lengths])
    q_segment = k_segment if asked is None else np.tile(np.repeat(ids, asked), (len(lengths), 1))
    q = rng.normal(size=(*q_segment.shape, heads, 8))
    k, v = rng.normal(size=(2, *k_segment.shape, groups, 8))
    return *(x.astype(dtype) for x in (q, k, v)), q_segment, k_segment


def _row(places):
    return np.pad(places, (0, 60 - len(places)))


CASES = {
    "rows onto themselves": rows([(20, 7, 25), (30, 5, 17)]),
    "chunks onto rows": rows([(20, 7, 25), (30, 5, 17)], asked=6),
    "one head of keys": rows([(20, 7, 25), (30, 5, 17)], asked=6, groups=1),
    "a sample without keys, a row without samples": rows([(20, 0, 0, 32), (0, 0, 0, 0)], asked=6),
    "one sample a row": rows([(60,), (60,)]),
}
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(params=["cudnn", "te"])
def ours(request, monkeypatch):
    {"cudnn": cudnn_calls, "te": transformer_engine}[request.param].emulate(monkeypatch)
    return functools.partial(attend, implementation=request.param, samples=SAMPLES)


def dense(*inputs):
    return attend(*inputs, implementation="dense")


def assert_equal(case, run, atol=1e-5):
    mix = mixture(case[0])
    assert_near(*(outputs_and_gradients(f, *case, mix=mix) for f in (dense, run)), atol)


@cases
def test_outputs_and_gradients_are_those_of_dense(ours, case):
    assert_equal(CASES[case], ours)


def test_keys_of_a_sample_may_stand_in_several_places(ours):
    """As in a cache to which states were appended."""
    q, k, v, q_segment, k_segment = CASES["chunks onto rows"]
    order = np.random.default_rng(3).permutation(60)
    assert_equal((q, k[:, order], v[:, order], q_segment, k_segment[:, order]), ours)


def test_parts_joined_by_their_log_sum_exp_have_the_gradients_of_the_whole(ours):
    """Also where a half of the keys is all that a sample has."""
    case = CASES["chunks onto rows"]

    def joined(q, k, v, q_segment, k_segment):
        halves = (slice(0, 28), slice(28, None))
        return merge(*(ours(q, k[:, s], v[:, s], q_segment, k_segment[:, s]) for s in halves))

    assert_equal(case, joined)


def test_bfloat16_gradients_are_as_good_as_denses(ours):
    """The output that stands for `shift` is rounded as cuDNN's own is."""
    low = [x.astype(jnp.bfloat16) for x in CASES["chunks onto rows"][:3]]
    segments = CASES["chunks onto rows"][3:]
    mix = mixture(low[0])
    exact = [np.asarray(x, np.float32) for x in low]
    wanted = outputs_and_gradients(dense, *exact, *segments, mix=mix)
    errors = []
    for run in (dense, ours):
        found = outputs_and_gradients(run, *low, *segments, mix=mix)
        pairs = zip(found[2:], wanted[2:], strict=True)
        errors.append([np.abs(a.astype(np.float32) - b).mean() for a, b in pairs])
    assert all(ours < 1.5 * dense for dense, ours in zip(*errors, strict=True))


@pytest.mark.slow
def test_a_gradient_that_the_output_cannot_carry_is_not_a_number(ours):
    q, *rest = CASES["chunks onto rows"]
    d_q = jax.grad(lambda q: ours(q, *rest).lse.sum())(q)
    np.testing.assert_array_equal(np.isnan(d_q[..., 0, 0]), rest[2] < SAMPLES)


def test_of_an_output_without_gradient_nothing_comes(ours):
    q, *rest = CASES["chunks onto rows"]
    seen = np.arange(q.shape[1])[:, None, None] < 9
    d_q = jax.grad(lambda q: (ours(q, *rest).out * seen).sum())(q)
    np.testing.assert_array_equal(d_q[:, 9:], 0)
    assert np.abs(d_q[:, :9]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("split_queries", [True, False])
def test_a_row_split_over_devices_gives_the_same(monkeypatch, split_queries):
    cudnn_calls.emulate(monkeypatch)
    case = CASES["rows onto themselves" if split_queries else "chunks onto rows"]
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 1, 2, 1),
        ("data", "fsdp", "context", "tensor"),
        axis_types=(AxisType.Auto,) * 4,
    )

    def split(*inputs):
        with use_abstract_mesh(mesh.abstract_mesh):
            return attend(
                *inputs,
                implementation="cudnn",
                samples=SAMPLES,
                split_queries=split_queries,
            )

    with jax.set_mesh(mesh):
        assert_equal(case, split)


def test_more_numbers_than_32_bits_count_are_refused():
    q, k = (jax.ShapeDtypeStruct((64, 1 << 14, n, 256), jnp.bfloat16) for n in (8, 1))
    segment = jax.ShapeDtypeStruct((64, 1 << 14), jnp.int32)
    run = functools.partial(cudnn.cudnn, samples=SAMPLES)
    with pytest.raises(ValueError, match=r"queries \(64, 16384, 8, 256\).*fewer rows"):
        jax.eval_shape(run, q, k, k, segment, segment)


def test_the_row_says_what_it_cannot_serve():
    q, k = (jax.ShapeDtypeStruct((2, 2048, n, 256), jnp.bfloat16) for n in (8, 1))

    def said(samples=4, causal=False):
        return dict(explain(q, k, samples, causal))["cudnn"]

    assert "cpu" in said()
    with compiling_for("cuda", 8.0):
        assert "9.0" in said()
    with compiling_for("cuda", 9.0):
        assert "not yet measured" in said()
        assert "positions" in said(causal=True)
        assert "number of samples" in said(samples=None)


def test_transformer_engine_is_named_where_it_is_missing(monkeypatch):
    q, k = (jax.ShapeDtypeStruct((2, 2048, n, 256), jnp.bfloat16) for n in (8, 1))
    for found, said in ((None, "`make te` builds it"), (object(), "not yet measured")):
        monkeypatch.setattr(te, "find_spec", lambda name, found=found: found)
        with compiling_for("cuda", 9.0):
            assert said in str(dict(explain(q, k, 4))["te"])


def test_transformer_engine_serves_no_mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    with use_abstract_mesh(mesh.abstract_mesh), pytest.raises(ValueError, match="use 'cudnn'"):
        te.te(*CASES["one sample a row"], samples=SAMPLES)


def test_the_call_is_the_one_that_jax_makes_for_packed_rows(monkeypatch):
    """Operands, layouts and configuration, forward and backward; what JAX's says besides are the
    defaults of XLA's format."""
    theirs = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(theirs, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(theirs, "check_compute_capability", lambda _: True)
    x = jax.ShapeDtypeStruct((2, 64, 4, 128), jnp.bfloat16)
    length, offset = (jax.ShapeDtypeStruct((2, 3 + more), jnp.int32) for more in (0, 1))

    def of_jax(q, k, v, *runs):
        out = theirs.dot_product_attention(
            q, k, v, None, None, *runs, scale=128**-0.5, mask_type=theirs.MaskType.PADDING
        )
        return out.astype(jnp.float32).sum()

    def of_ours(q, k, v, *runs):
        runs = cudnn.SampleRuns(*runs)
        out, stats = cudnn.call_forward(q, k, v, runs)
        return out, cudnn.call_backward(q, k, v, stats, out, out, runs)

    def calls(run):
        traced = jax.jit(run).trace(x, x, x, length, length, offset, offset)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        found = re.findall(r"custom_call @(__cudnn\$\w+)\((.*?)\) \{(.*?)\} : (.*)", text)
        return [(name, _config(rest), _types(rest + types)) for name, _, rest, types in found]

    def _config(rest):
        text = re.search(r'backend_config = "(.*?)"', rest)[1]
        return json.loads(text.replace("\\22", '"'))["cudnn_fmha_backend_config"]

    def _types(text):
        return re.findall(r"dense<[^>]*> : tensor<\w+>|tensor<[\w]+>", text)

    def besides(ours, theirs):
        for key, value in theirs.items():
            if isinstance(value, dict) and key in ours:
                yield from besides(ours[key], value)
            elif key not in ours:
                yield value
            else:
                assert value == ours[key], key

    unset = ([], 0, "0", "PRIMITIVE_TYPE_INVALID")
    both = zip(calls(of_ours), calls(jax.grad(of_jax, (0, 1, 2))), strict=True)
    for (name, config, types), (jaxs, whole, of_theirs) in both:
        assert (name, types) == (jaxs, of_theirs)
        assert whole.pop("seed") == 42
        assert all(value in unset for value in besides(config, whole))
        assert len(types) == 2 * (14 if name.endswith("Backward") else 10)


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "groups"), [(1032, 1), (400, 8)])
def test_it_compiles_for_an_h100_without_one(queries, groups):
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    deviceless = pytest.importorskip("parallel.planning.deviceless")
    (device,) = deviceless.devices()
    q_segment, segment = (jax.ShapeDtypeStruct((2, t), jnp.int32) for t in (queries, 1032))
    q = jax.ShapeDtypeStruct((2, queries, 8, 256), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1032, groups, 256), jnp.bfloat16)

    def loss(q, k, v, *segments):
        got = attend(q, k, v, *segments, implementation="cudnn", samples=SAMPLES)
        return got.out.astype(jnp.float32).sum() + got.lse.sum()

    with compiling_for("cuda", 9.0):
        compiled = compile_for(device, jax.grad(loss, (0, 1, 2)), q, k, k, q_segment, segment)
    text = compiled.as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    assert f"{queries},1032]" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(8, 1, 256), (8, 2, 64), (4, 4, 72)])
@pytest.mark.parametrize("asked", [None, 24])
@pytest.mark.parametrize("row", ["cudnn", "te"])
def test_cudnn_on_the_gpu_equals_dense(row, heads, groups, head_dim, asked):
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU here")
    if row == "te" and (reason := te.missing()):
        pytest.skip(reason)
    lengths = [(20, 7, 25), (30, 5, 17)]
    *_, q_segment, k_segment = rows(lengths, asked)
    q_segment, k_segment = (np.repeat(x, 16, axis=1) for x in (q_segment, k_segment))
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*s.shape, n, head_dim)), jnp.bfloat16)
        for s, n in ((q_segment, heads), (k_segment, groups), (k_segment, groups))
    )
    mix, exact = mixture(q), [x.astype(jnp.float32) for x in (q, k, v)]
    run = functools.partial(attend, implementation=row, samples=SAMPLES)
    with jax.default_matmul_precision("float32"):
        wanted = outputs_and_gradients(dense, *exact, q_segment, k_segment, mix=mix)
    found = outputs_and_gradients(run, q, k, v, q_segment, k_segment, mix=mix)
    assert_near(wanted, found, 2e-2)
