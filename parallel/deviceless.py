"""Compiling for a GPU that is not there: XLA's CUDA compiler needs a description of the chip, not
the chip.

What comes back is the program the chip would run (kernels, cuBLAS calls, collectives, memory), so
a test on any machine can count float8 matmuls or bytes on the wire. It differs from the real one in
that nothing is autotuned. `targets/` holds the descriptions, taken from XLA's own specifications.
"""

import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TARGETS = Path(__file__).parent / "targets"

_PARTS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
_INSTALL = "pip install 'chiliad[deviceless]'"


def devices(target: str = "h100", topology: str = "1x1x1") -> list[jax.Device]:
    """Descriptions of the target's devices, to build shardings and meshes of; they hold no arrays.

    `topology` is slices x hosts x devices: "1x128x8" is 128 hosts of 8.

    Raises:
      ImportError: a part of the CUDA compiler is not installed, or JAX started without it.
      FileNotFoundError: there is no such target.
      ValueError: the topology is not three positive numbers.
    """
    chip = TARGETS / f"{target}.textproto"
    if not chip.exists():
        known = ", ".join(sorted(p.stem for p in TARGETS.glob("*.textproto")))
        raise FileNotFoundError(f"{chip} does not exist: target {target!r} is not one of {known}.")
    sizes = topology.split("x")
    if len(sizes) != 3 or not all(s.isdigit() and int(s) for s in sizes):
        raise ValueError(
            f"topology is {topology!r}, expected slices x hosts x devices such as '1x128x8'."
        )
    for part in _PARTS:
        try:
            version(part)
        except PackageNotFoundError as error:
            raise ImportError(
                f"{part} is not installed, and compiling for {target} needs it: {_INSTALL}."
            ) from error
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=chip.read_text(), topology=topology
        )
    except NotImplementedError as error:
        raise ImportError(
            "JAX started without its CUDA plugin because no GPU is here: set JAX_PLATFORMS=cpu "
            "or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the first array is made."
        ) from error
    return list(found.devices)


def compile_for(
    device: jax.Device,
    function: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`function` compiled for one device; `args` are trees of arrays or ShapeDtypeStructs.

    `options` are XLA flags without dashes, such as {"xla_gpu_enable_triton_gemm": False}. For
    several devices, lower a jitted function on ShapeDtypeStructs whose shardings name a mesh of
    `devices`.
    """
    place = SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(lambda: args),
    )
    return jax.jit(function).lower(*shapes).compile(compiler_options=dict(options or {}))
