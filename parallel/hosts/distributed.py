"""Several processes that run one program: each brings its own rows of the batch."""

from typing import Any

import jax
from jax.sharding import Mesh

from parallel.mesh import check_rows, row_shards, rows_sharding


def host_index() -> int:
    """This process's index among `host_count()` processes; 0 writes the shared files."""
    return jax.process_index()


def host_count() -> int:
    """Number of processes that run this job."""
    return jax.process_count()


def row_share(mesh: Mesh) -> tuple[int, int]:
    """Part of a batch's rows that this process brings: (index, count), rows index·R/count to (index
    + 1)·R/count.

    Processes whose devices differ along stage, context or tensor alone bring the same rows.

    Raises:
      ValueError: the devices of some process do not hold one of several equal, adjoining parts.
    """
    shards: dict[int, set[int]] = {}
    held: Any = rows_sharding(mesh).devices_indices_map((row_shards(mesh),))
    for device, (rows,) in held.items():
        shards.setdefault(device.process_index, set()).add(rows.start or 0)
    parts = sorted({tuple(sorted(held)) for held in shards.values()})
    size = len(parts[0])
    if parts != [tuple(range(i, i + size)) for i in range(0, row_shards(mesh), size)]:
        named = "; ".join(f"process {p}: {sorted(shards[p])}" for p in sorted(shards))
        raise ValueError(
            f"The {row_shards(mesh)} parts of the batch's rows (over data and fsdp) must fall to "
            f"the processes in equal, contiguous shares, but they hold {named}; choose mesh sizes "
            f"that divide the {jax.local_device_count()} devices of a process, or are multiples of "
            f"that number."
        )
    mine = shards[jax.process_index()]
    return min(mine) // size, len(parts)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Makes global arrays [R, ...] from this process's rows, a tree of numpy arrays [R / count,
    ...] that holds the part given by `row_share`.

    Raises:
      ValueError: the rows of all parts do not divide over the mesh's devices.
    """
    sharding = rows_sharding(mesh)
    if host_count() == 1:  # the same result, three times as fast
        check_rows(len(jax.tree.leaves(batch)[0]), mesh)
        return jax.device_put(batch, sharding)
    _, count = row_share(mesh)
    check_rows(len(jax.tree.leaves(batch)[0]) * count, mesh)

    def whole(x: Any) -> Any:
        shape = (len(x) * count, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(whole, batch)
