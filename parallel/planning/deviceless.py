"""Compiling for GPUs that are not present: XLA's CUDA compiler needs a description of the chip, not
the chip.

The result is the program that the chip would run, though not autotuned, so a test on any machine
can count float8 matmuls or bytes on the wire. `targets/` holds XLA's own specifications.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from models.attention.target import compiling_for
from models.inputs.packed_batch import Layout, pack
from models.sharding import Rules
from parallel.hosts.facts import HostFacts, facts_sharding
from parallel.mesh import MeshConfig, make_mesh, rows_sharding
from parallel.optimizer import OptimizerConfig
from parallel.planning.hlo import CompiledCollective, CompiledMatmul, Program
from parallel.step import Trainable, abstract_state, make_train_step

TARGETS = Path(__file__).parent / "targets"

_PARTS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Without autotuning, XLA would take the first Triton kernel that it considers."""
_INSTALL = "pip install -e '.[plan]' in Chiliad's repository"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device. Outputs that take the place of arguments are `aliased`. `peak` is all
    that is held at once: arguments, the further memory that outputs need, and temporaries."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int


@dataclass(frozen=True)
class CompiledStep:
    """A train step compiled for devices that are not present; all figures are for one device and
    one step. `seconds`: CPU time of tracing and compiling. `kernels`: calls of our own Triton
    kernels, whose products are not in `matmuls`. `loops`: loops of unknown length, of which one
    iteration is counted. `program` is the whole program, and `mesh` the sizes of the axes in the
    order in which it numbers devices, slowest first."""

    mesh: Mapping[str, int]
    seconds: float
    memory: DeviceMemory
    collectives: tuple[CompiledCollective, ...]
    matmuls: tuple[CompiledMatmul, ...]
    kernels: int
    loops: tuple[str, ...]
    program: Program = field(repr=False)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matrix products, by dtype of their operands."""
        total: dict[str, int] = defaultdict(int)
        for m in self.matmuls:
            total[m.dtype] += m.flops * m.times
        return dict(total)

    @property
    def sent(self) -> dict[tuple[str, str, tuple[str, ...]], int]:
        """Bytes that a device sends, by kind of collective, dtype and axes of the mesh."""
        total: dict[tuple[str, str, tuple[str, ...]], int] = defaultdict(int)
        for c in self.collectives:
            total[c.kind, c.dtype, c.axes] += c.sent * c.times
        return dict(total)


def compile_step(
    model: Trainable,
    optimizer: OptimizerConfig,
    rules: Rules,
    mesh: MeshConfig,
    layout: Layout,
    rows: int,
    *,
    accumulation: int = 1,
    target: str = "h100",
    topology: str = "1x1x8",
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """The train step (`parallel.step.make_train_step`, as the trainer runs it) on batches of `rows`
    rows over all devices of the topology, compiled for them.

    `options` are XLA flags without dashes, in addition to those that the step itself sets.

    Raises:
      ImportError, FileNotFoundError: as `devices`.
      ValueError: as `devices`, `make_mesh`, `abstract_state` and the step itself.
    """
    found = devices(target, topology)
    start = time.process_time()
    placed = make_mesh(mesh, found)
    state = abstract_state(model, optimizer, rules, placed)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (rows, *x.shape[1:]), x.dtype, sharding=rows_sharding(placed)
        ),
        pack([[]], layout),
    )
    facts = jax.ShapeDtypeStruct(
        (placed.size, len(HostFacts._fields)), "float32", sharding=facts_sharding(placed)
    )
    step: Any = make_train_step(model, optimizer, placed, state, accumulation, hosts=True)
    with compiling_for("gpu", float(found[0].compute_capability)):
        lowered = step.lower(state, batch, jax.ShapeDtypeStruct((), "uint32"), facts)
    compiled = lowered.compile(compiler_options={**CUBLAS, **(options or {})})
    seconds = time.process_time() - start
    program, used = Program(compiled.as_text()), compiled.memory_analysis()
    return CompiledStep(
        mesh=dict(placed.shape),
        seconds=seconds,
        memory=DeviceMemory(
            used.argument_size_in_bytes,
            used.output_size_in_bytes,
            used.alias_size_in_bytes,
            used.temp_size_in_bytes,
            used.peak_memory_in_bytes,
        ),
        collectives=tuple(program.collectives(dict(placed.shape))),
        matmuls=tuple(program.matmuls()),
        kernels=program.kernels("__gpu$xla.gpu.triton"),
        loops=tuple(program.unknown_loops),
        program=program,
    )


def devices(target: str = "h100", topology: str = "1x1x1") -> list[jax.Device]:
    """Descriptions of the target's devices, for building shardings and meshes; they hold no arrays.

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
            "JAX started without its CUDA plugin because this machine has no GPU: set "
            "JAX_PLATFORMS=cpu or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the first array is made."
        ) from error
    return list(found.devices)
