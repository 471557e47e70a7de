"""The device mesh: which axis of a computation runs over which devices.

Batch rows are split over both axes; parameters only over `fsdp`, whose devices hold one copy
between them. Every replica of the parameters is thus a group of `fsdp` devices, `data` of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

ROW_AXES = ("data", "fsdp")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 (at most once) takes all that the other axis leaves."""

    data: int = -1
    fsdp: int = 1


def make_mesh(
    config: MeshConfig = MeshConfig(), devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arranges `devices` (all of the job's by default) with axes ("data", "fsdp").

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp]
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = len(devices) // max(*sizes, 1)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(
            f"Mesh data={config.data}, fsdp={config.fsdp} does not fit {len(devices)} devices; "
            f"choose sizes whose product is {len(devices)}, or -1 for one of them."
        )
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes), ROW_AXES, axis_types=auto, devices=devices)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays [R, ...] whose rows are split over every device."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(rows: int, mesh: Mesh, accumulation: int = 1) -> None:
    """Raises ValueError unless `rows` split evenly over devices and micro-batches."""
    if accumulation < 1 or rows % (mesh.size * accumulation):
        raise ValueError(
            f"A batch of {rows} rows does not divide over {mesh.size} devices × {accumulation} "
            f"micro-batches; use a multiple of {mesh.size * max(accumulation, 1)} rows."
        )
