"""Reads a checkpoint of another code straight into the shardings of our parameters.

Several threads read each shard that this host's devices hold by its index, cast it, and put it on
its devices. What they hold of the checkpoint at a time is bounded, so no host ever has a full copy.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from models.checkpoints.layout import read_block
from models.checkpoints.rename import MappedParameter, Table, match
from models.checkpoints.sources import IN_FLIGHT_BYTES, CheckpointSource
from models.files.terminal import byte_bar
from models.sharding import placed

PyTree = Any
Index = tuple[slice, ...]

_PIECE_BYTES = 64 * 2**20
_BAR_FROM_BYTES = 256 * 2**20


def read(
    source: CheckpointSource,
    table: Table,
    like: PyTree,
    turned: Mapping[str, Callable[[jax.Array], Any]] = MappingProxyType({}),
) -> PyTree:
    """The parameters that `like` describes, read from `source` by the rules of `table`.

    Args:
      like: nested dict of ShapeDtypeStructs. Each leaf is cast to its dtype and placed in its
        sharding; without one, on this host's first device.
      turned: by path, functions that convert a parameter as soon as it and those before it are
        read; the parameter itself is not kept.

    Raises:
      ValueError: the checkpoint does not hold these parameters (every difference is listed), or
        some of them are NaN or infinite.
    """
    wanted = {path: placed(leaf) for path, leaf in flatten_dict(like, sep="/").items()}
    shapes = {path: tuple(leaf.shape) for path, leaf in wanted.items()}
    leaves = match(table, source.shapes, shapes, source.where)
    shards = [shard for path, leaf in wanted.items() for shard in _shards(path, leaf)]
    least = {p: max(map(source.least, leaf.names), default=0) for p, leaf in leaves.items()}
    # One thread reads one array's chunks in a row, so that none is decoded twice.
    tasks: dict[object, list[_Shard]] = {}
    for number, shard in enumerate(shards):
        key = leaves[shard.path].names[0] if least[shard.path] else number
        tasks.setdefault(key, []).append(shard)
    room = _Room(IN_FLIGHT_BYTES)

    def fill(shard: _Shard) -> tuple[list[jax.Array], bool]:
        pieces = max(_PIECE_BYTES, least[shard.path])
        dtype = np.dtype(wanted[shard.path].dtype)
        block, finite = read_block(leaves[shard.path], shard.region, source.read, dtype, pieces)
        copies = [jax.device_put(block, device) for device in shard.devices]
        return jax.block_until_ready(copies), finite

    def work(task: list[_Shard]) -> list[tuple[list[jax.Array], bool]]:
        with room.take(max(shard.size + least[shard.path] for shard in task)):
            return [fill(shard) for shard in task]

    arrays: dict[str, list[jax.Array]] = {path: [] for path in wanted}
    missing = Counter(shard.path for shard in shards)
    flat: dict[str, Any] = {}
    bad = set()

    def finish() -> None:
        """Joins the parameters that are complete, in the same order on all hosts."""
        for path in list(arrays):
            if missing[path]:
                return
            leaf = wanted[path]
            assert leaf.sharding is not None
            whole = jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, arrays.pop(path)
            )
            flat[path] = turned[path](whole) if path in turned else whole

    threads = min(32, 2 * (os.cpu_count() or 1))
    total = sum(shard.size for shard in shards)
    with (
        byte_bar("reading weights", total, _BAR_FROM_BYTES) as advance,
        ThreadPoolExecutor(threads) as pool,
    ):
        working = {pool.submit(work, task): task for task in tasks.values()}
        try:
            for future in as_completed(working):
                for shard, (copies, finite) in zip(working[future], future.result(), strict=True):
                    arrays[shard.path] += copies
                    missing[shard.path] -= 1
                    del copies
                    if not finite:
                        bad.add(shard.path)
                    advance(shard.size)
                working.pop(future)
                finish()
                del future
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _check_finite(source, leaves, bad)
    return unflatten_dict(flat, sep="/")


class _Shard(NamedTuple):
    """A block of a parameter, the devices of this host that hold it, and its bytes."""

    path: str
    region: Index
    devices: list[jax.Device]
    size: int


class _Room:
    """Lets threads reserve bytes of memory up to a limit; one that is alone may reserve more."""

    def __init__(self, limit: int) -> None:
        self._free, self._limit, self._taken = threading.Condition(), limit, 0

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: not self._taken or self._taken + size <= self._limit)
            self._taken += size
        try:
            yield
        finally:
            with self._free:
                self._taken -= size
                self._free.notify_all()


def _shards(path: str, leaf: jax.ShapeDtypeStruct) -> list[_Shard]:
    shards: dict[tuple[tuple[int, int], ...], _Shard] = {}
    assert leaf.sharding is not None
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True)]
        size = math.prod(stop - start for start, stop in bounds) * np.dtype(leaf.dtype).itemsize
        shards.setdefault(tuple(bounds), _Shard(path, index or (), [], size)).devices.append(device)
    return list(shards.values())


def _check_finite(
    source: CheckpointSource, leaves: dict[str, MappedParameter], bad: set[str]
) -> None:
    if bad:
        names = ", ".join(f"{path} ({leaves[path].rule.theirs})" for path in sorted(bad))
        raise ValueError(
            f"{source.where} holds NaN or infinite weights in {len(bad)} of {len(leaves)} "
            f"parameters: {names}; the run that wrote it diverged, so use an earlier checkpoint."
        )
