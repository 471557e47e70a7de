"""The device mesh: which axis of a computation runs over which devices.

Rows of a batch are split over `data` and `fsdp`. Parameters are also split over `fsdp`, whose
devices together hold one copy. `tensor` splits heads and hidden units, `context` the places of a
row, and `stage` the layers; the devices along these three axes work on the same rows.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.sharding import ROWS

AXES = ("data", "fsdp", "stage", "context", "tensor")
"""Axes from slowest to fastest: neighbouring devices, which communicate fastest, share tensors."""


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis; -1 (at most once) takes all that the other axes leave."""

    data: int = -1
    fsdp: int = 1
    stage: int = 1
    context: int = 1
    tensor: int = 1


def make_mesh(
    config: MeshConfig = MeshConfig(), devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arranges `devices` (by default, all devices of the job) along `AXES`.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [asdict(config)[axis] for axis in AXES]
    if sizes.count(-1) == 1:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = len(devices) // max(rest, 1)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        named = ", ".join(f"{axis}={asdict(config)[axis]}" for axis in AXES)
        raise ValueError(
            f"Mesh {named} does not fit {len(devices)} devices; "
            f"choose sizes whose product is {len(devices)}, or -1 for one of them."
        )
    auto = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)
    return _stage_first(mesh)


def _stage_first(mesh: Mesh) -> Mesh:
    """The same mesh, each device at the same coordinates, with "stage" named before the other axes.

    Inside a pipeline's `shard_map` over "stage" are others over rows and places. Since 0.11 XLA's
    compiler aborts the process ("Manual axes must be sorted by mesh axis index") if an outer
    `shard_map` is over an axis that the mesh names later than the axis of an inner one.
    """
    order = ["stage", *(axis for axis in mesh.axis_names if axis != "stage")]
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in order])
    return Mesh(devices, order, axis_types=mesh.axis_types)


def row_shards(mesh: Mesh) -> int:
    """Number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays [R, ...] whose rows are split over the axes of `ROWS`."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays of which every device holds a full copy."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(rows: int, mesh: Mesh, accumulation: int = 1) -> None:
    """Raises ValueError unless `rows` split evenly over row shards and micro-batches."""
    shards = row_shards(mesh)
    if accumulation < 1 or rows % (shards * accumulation):
        raise ValueError(
            f"A batch of {rows} rows does not divide over {shards} devices × {accumulation} "
            f"micro-batches; use a multiple of {shards * max(accumulation, 1)} rows."
        )
