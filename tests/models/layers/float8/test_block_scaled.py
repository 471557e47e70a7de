"""Block-scaled float8: the Hopper's kernel step by step on this CPU, against numpy and against the
rounded products that other devices multiply."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from models.attention.target import compiling_for
from models.layers.float8 import block_scaled
from models.layers.float8.kernel import block_product
from models.layers.float8.scales import block_scales, in_blocks

ROOT = Path(__file__).parents[4]
E4M3 = ml_dtypes.float8_e4m3fn


def operand(rng, rows: int, places: int, blocks: int):
    """Float8 numbers and scales (powers of two), f32."""
    x = rng.normal(size=(rows, places)).astype(E4M3)
    return x, np.exp2(rng.integers(-9, 9, (blocks, -(-places // 128)))).astype(np.float32)


def plain(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    rows = np.repeat(scale, -(-len(x) // len(scale)) if len(scale) == len(x) else 128, axis=0)
    return x.astype(float) * np.repeat(rows[: len(x)], 128, axis=1)[:, : x.shape[1]]


@pytest.mark.parametrize("rows", [1, 64, 150])
@pytest.mark.parametrize("shared", [True, False])
def test_the_kernel_sums_scaled_blocks_whatever_the_sizes(rows, shared):
    rng = np.random.default_rng(0)
    a, b = operand(rng, rows, 300, rows), operand(rng, 200, 300, 2 if shared else 200)
    found = jax.jit(partial(block_product, dtype=jnp.float32, interpret=True))(*a, *b)
    expected = plain(*a) @ plain(*b).T
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.fixture
def as_on_a_hopper(monkeypatch):
    """Programs traced within take the kernel, which runs step by step."""
    monkeypatch.setattr(block_scaled, "block_product", partial(block_product, interpret=True))
    with compiling_for("gpu", 9.0):
        yield


def gradients(x, kernel, g):
    y, back = jax.vjp(block_scaled.dot, x, kernel)
    return y, *back(g)


def operands(tokens: int, inner: int, outer: int):
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(tokens, inner)), rng.normal(size=(inner, outer)) / inner**0.5
    return [np.asarray(a, np.float32) for a in (x, kernel, 1e-4 * rng.normal(size=(tokens, outer)))]


def test_the_kernel_gives_the_results_and_gradients_that_other_devices_round_to(monkeypatch):
    arrays = operands(150, 200, 300)
    expected = jax.jit(gradients)(*arrays)
    monkeypatch.setattr(block_scaled, "block_product", partial(block_product, interpret=True))
    with compiling_for("gpu", 9.0):
        found = jax.jit(lambda *a: gradients(*a))(*arrays)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other)


@pytest.mark.slow
def test_kept_kernels_multiply_as_those_that_are_rounded_on_the_way(as_on_a_hopper):
    """And what they multiply has a gradient, which guidance of a chunk asks for."""
    x, kernel, g = operands(150, 200, 300)
    scale = block_scales(kernel, (128, 128))
    kept = in_blocks(kernel, scale, (128, 128))

    def run(x, g):
        y, back = jax.vjp(lambda x: block_scaled.dot_kept(x, kept, scale), x)
        return y, *back(g)

    y, d_x, _ = gradients(x, kernel, g)
    for one in (jax.jit(run)(x, g), _elsewhere(lambda: jax.jit(lambda *a: run(*a))(x, g))):
        for found, expected in zip(one, (y, d_x), strict=True):
            assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)


def _elsewhere(run):
    with compiling_for("cpu"):
        return run()


_PROGRAM = """
import jax, jax.numpy as jnp
from functools import partial
from models.layers.float8.kernel import block_product
from parallel.planning import deviceless
from tests.helpers.parallel.compiled import compile_for
shapes = [((512, 2048), "float8_e4m3fn"), ((512, 16), "float32")]
shapes += [((1024, 2048), "float8_e4m3fn"), (({scales}, 16), "float32")]
arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
product = partial(block_product, dtype=jnp.bfloat16)
compile_for(deviceless.devices()[0], product, *arrays)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scales", [8, 1024])
def test_an_h100_multiplies_float8_in_its_tensor_cores_and_spills_nothing(scales, tmp_path):
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    flags = f"--xla_dump_to={tmp_path} --xla_dump_emitter_re=.*"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    program = [sys.executable, "-c", _PROGRAM.format(scales=scales)]
    subprocess.run(program, env=environment, check=True, cwd=ROOT)
    written = "\n".join(file.read_text() for file in tmp_path.glob("*.ptx"))
    assert written.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 4
    assert "mma.sync" not in written
    ptxas = next(Path(sys.prefix).glob("lib/*/site-packages/nvidia/*/bin/ptxas"))
    for file in tmp_path.glob("*.ptx"):
        if ".entry" in file.read_text():
            told = [ptxas, "-v", "-arch=sm_90a", file, "-o", tmp_path / "out"]
            found = subprocess.run(told, check=True, capture_output=True, text=True).stderr
            assert " 0 bytes spill stores" in found


SPLITS = {
    "rows": ("data", None, None),
    "outer": ("data", None, "tensor"),
    "contraction": ("data", "tensor", None),
    "sharded_parameters": (("data", "tensor"), None, "tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_each_device_multiplies_what_it_holds_and_split_contractions_are_summed(
    as_on_a_hopper, split
):
    """Blocks of 128 are whole on every device here, so that all round alike."""
    arrays = operands(512, 256, 256)
    alone = jax.jit(lambda *a: gradients(*a))(*arrays)
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2),
        ("data", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
    )
    tokens, inner, outer = SPLITS[split]
    specs = (tokens, inner), (inner, outer), (tokens, outer if outer not in _of(tokens) else None)
    places = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    with use_abstract_mesh(mesh.abstract_mesh):
        step = jax.jit(lambda *a: gradients(*a), in_shardings=places)
        compiled = step.lower(*arrays).compile()
    for one, other in zip(compiled(*jax.device_put(arrays, places)), alone, strict=True):
        assert np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other)
    if split == "rows":
        assert "all-gather" not in compiled.as_text()


def _of(entry) -> tuple:
    return entry if isinstance(entry, tuple) else (entry,)
