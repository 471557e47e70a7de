"""Compiling for an H100 without one: what comes back is a program for that chip."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallel.planning import deviceless
from tests.helpers.parallel.compiled import compile_for


@pytest.fixture(scope="module", autouse=True)
def compiler():
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")


def test_a_matmul_becomes_a_cublas_call_of_the_h100():
    (device,) = deviceless.devices()
    a = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    compiled = compile_for(
        device, lambda x, y: x @ y, a, a, options={"xla_gpu_enable_triton_gemm": False}
    )
    assert "H100" in device.device_kind
    assert "__cublas" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 2 * 512 * 512


def test_1024_gpus_reduce_and_scatter_gradients_of_sharded_weights():
    mesh = Mesh(np.array(deviceless.devices(topology="1x128x8")).reshape(128, 8), ("data", "fsdp"))
    weight = jax.ShapeDtypeStruct(
        (1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    x = jax.ShapeDtypeStruct(
        (8192, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    )
    step = jax.jit(jax.grad(lambda w, x: jnp.square(x @ w).sum()), out_shardings=weight.sharding)
    text = step.lower(weight, x).compile().as_text()
    assert "reduce-scatter" in text
    assert "all-gather-start" in text


def test_an_unknown_target_is_named_with_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"'a100' is not one of .*h100"):
        deviceless.devices("a100")


@pytest.mark.parametrize("topology", ["8", "1x0x8", "1x2xmany"])
def test_a_topology_that_is_not_three_numbers_is_refused(topology):
    with pytest.raises(ValueError, match="slices x hosts x devices"):
        deviceless.devices(topology=topology)


def test_a_missing_compiler_names_the_extra(monkeypatch):
    def missing(name: str) -> str:
        raise deviceless.PackageNotFoundError(name)

    monkeypatch.setattr(deviceless, "version", missing)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[plan\]'"):
        deviceless.devices()


@pytest.mark.slow
def test_a_plugin_that_jax_left_out_is_explained():
    """JAX drops the plugin at its start where no CUDA libraries are found."""
    program = (
        "import os; os.environ.pop('JAX_PLATFORMS', None);"
        "os.environ.pop('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', None);"
        "import jax; jax.devices('cpu');"
        "from parallel.planning import deviceless\n"
        "try: print(len(deviceless.devices()))\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "1" or "JAX_PLATFORMS=cpu" in run.stdout
