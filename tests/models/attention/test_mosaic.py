"""Mosaic's row of attention: its kernel in Pallas' interpreter, with the warpgroups, barriers and
copies of a Hopper GPU, against plain softmax; and its kernel compiled for an H100 without one."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import flash
from models.attention.attention import MASKED, attend, explain, merge
from models.attention.target import compiling_for
from tests.helpers.models.attention import assert_near, mixture, outputs_and_gradients, positions

mosaic = pytest.importorskip("models.attention.mosaic")
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")

ROOT = Path(__file__).parents[3]
dense = functools.partial(attend, implementation="dense")


@pytest.fixture(autouse=True)
def interpreter_as_new():
    yield
    interpreter.reset_gpu_interpret_mode_state()


def case(lengths, asked=None, heads=2, groups=1, dim=64, dtype=np.float32, seed=0):
    """A row of keys in runs of (segment, places), and queries in such runs."""
    rng = np.random.default_rng(seed)
    kv_segment, q_segment = (
        np.concatenate([np.full(places, s, np.int32) for s, places in runs])[None]
        for runs in (lengths, asked or lengths)
    )
    q = rng.normal(size=(*q_segment.shape, heads, dim)).astype(dtype)
    k, v = rng.normal(size=(2, *kv_segment.shape, groups, dim)).astype(dtype)
    return q, k, v, q_segment, kv_segment


def run(*inputs, causal=False, q_position=None, kv_position=None, races=False):
    masks = (q_position, kv_position) if causal else ()
    return compiled(races)(*inputs, *masks)


@functools.cache
def compiled(races):
    how = params.InterpretGPUParams(detect_races=races)
    return jax.jit(functools.partial(mosaic.forward, interpret=how))


def all_of(*inputs, mix, causal=False, q_position=None, kv_position=None):
    """Output, log-sum-exp and gradients, as the ring computes them."""
    masks = (q_position, kv_position) if causal else (None, None)
    out, lse = run(*inputs, causal=causal, q_position=q_position, kv_position=kv_position)
    d_out, seen = mix[..., :-1].astype(out.dtype), lse > MASKED / 2
    shift = (d_out * out.astype(np.float32)).sum(-1) - np.where(seen, mix[..., -1], 0)
    gradients = jax.jit(functools.partial(flash.flash_gradients, interpret=True))
    return [out, lse, *gradients(*inputs, *masks, d_out, np.where(seen, lse, 0), shift)]


RUNS = [(1, 30), (0, 5), (2, 70), (3, 40)]
TWICE = [(2, 20), (1, 70), (2, 50)]
FEW = [(1, 8), (3, 20), (9, 5), (0, 3)]


@pytest.mark.parametrize(
    ("keys", "queries", "heads", "groups", "dim", "causal"),
    [
        pytest.param(RUNS, None, 1, 1, 64, False, marks=pytest.mark.slow),
        (RUNS, None, 2, 1, 64, True),
        pytest.param(TWICE, FEW, 4, 2, 128, False, marks=pytest.mark.slow),
        pytest.param(TWICE, [(1, 40), (2, 50)], 2, 2, 192, True, marks=pytest.mark.slow),
        pytest.param(RUNS, FEW, 8, 1, 256, False, marks=pytest.mark.slow),
    ],
)
def test_output_log_sum_exp_and_gradients_are_those_of_dense(
    keys, queries, heads, groups, dim, causal
):
    q, k, *rest = case(keys, queries, heads, groups, dim)
    options = dict(mix=mixture(q).astype(np.float32), causal=causal, **positions(q, k))
    wanted = outputs_and_gradients(dense, q, k, *rest, **options)
    assert_near(wanted, [np.asarray(x) for x in all_of(q, k, *rest, **options)], 1e-5)


@pytest.mark.slow
def test_the_error_in_bfloat16_is_that_of_dense():
    q, k, v, *segments = case(RUNS, None, 2, 1, 64)
    mix = mixture(q).astype(np.float32)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    exact = [np.asarray(x, np.float32) for x in low]
    wanted = outputs_and_gradients(dense, *exact, *segments, mix=mix)
    errors = [
        [np.abs(np.asarray(a, np.float32) - b).mean() for a, b in zip(found, wanted, strict=True)]
        for found in (
            outputs_and_gradients(dense, *low, *segments, mix=mix),
            all_of(*low, *segments, mix=mix),
        )
    ]
    assert all(ours < 1.5 * dense + 1e-6 for dense, ours in zip(*errors, strict=True))


def test_hidden_tiles_are_not_read():
    q, k, v, q_segment, kv_segment = case([(1, 64), (2, 64), (1, 64)])
    k, v = (np.where((kv_segment == 2)[..., None, None], np.float32(np.nan), x) for x in (k, v))
    mine = q_segment == 1
    out = np.asarray(run(q[:, :64], k, v, q_segment[:, :64], kv_segment).out)
    assert mine[:, :64].all()
    assert np.isfinite(out).all()


def test_queries_without_keys_get_zero_and_no_log_sum_exp():
    out, lse = run(*case([(1, 100)], [(0, 10), (2, 60)]))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.float32(MASKED))


@pytest.mark.slow
def test_merged_parts_equal_attention_over_all_keys():
    q, k, v, q_segment, kv_segment = case(TWICE)
    first, second = slice(0, 70), slice(70, None)
    parts = [run(q, k[:, s], v[:, s], q_segment, kv_segment[:, s]) for s in (first, second)]
    for a, b in zip(merge(*parts), dense(q, k, v, q_segment, kv_segment), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_no_copy_overwrites_what_is_still_read():
    """Eight tiles of keys pass through the two that shared memory holds."""
    jax.block_until_ready(run(*case([(1, 500)], [(1, 70)]), races=True))
    assert not interpreter.get_races().races_found


def test_the_row_says_what_it_cannot_serve():
    def said(head_dim=256, dtype=jnp.bfloat16, causal=False):
        q, k = (jax.ShapeDtypeStruct((2, 2048, n, head_dim), dtype) for n in (8, 1))
        return dict(explain(q, k, causal=causal))["mosaic"]

    assert "cpu" in said()
    with compiling_for("cuda", 8.9):
        assert "9.0, not cuda (8.9)" in said()
    with compiling_for("cuda", 10.0):
        assert "10.0" in said()
    with compiling_for("cuda", 9.0):
        assert said() == said(causal=True) == "not yet measured to be faster on any GPU"
        assert "head dim 72 is not a multiple of 64" in said(72)
        assert "320" in said(320)
        assert "float32" in said(dtype=jnp.float32)


_PROGRAM = """
import jax, jax.numpy as jnp
from models.attention.mosaic import forward
from parallel.planning import deviceless
from tests.helpers.parallel.compiled import compile_for
segment = jax.ShapeDtypeStruct((2, 1032), "int32")
q, k = (jax.ShapeDtypeStruct((2, 1032, n, {dim}), "bfloat16") for n in (8, 1))
masks = (segment,) * ({causal} and 4 or 2)
compile_for(deviceless.devices()[0], forward, q, k, k, *masks)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "causal"), [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]
)
def test_an_h100_multiplies_in_its_tensor_cores_and_spills_nothing(dim, causal, tmp_path):
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    program = [sys.executable, "-c", _PROGRAM.format(dim=dim, causal=causal)]
    subprocess.run(program, env=environment, check=True, cwd=ROOT)
    (file,) = tmp_path.glob("*.ptx")
    assert file.read_text().count("wgmma.mma_async") == dim // 16 + 4 * max(1, dim // 128)
    if dim == 256 and jax.__version_info__ >= (0, 11):
        pytest.skip("the assembler of jax 0.12 spills 472 bytes here")
    (told,) = tmp_path.glob("*.ptxas")
    assert " 0 bytes spill stores" in told.read_text()
