"""Arrays of a checkpoint by name, read by region: Orbax directories and safetensors files.

Orbax's library restores whole trees of one topology. Here its arrays are opened with tensorstore
(OCDBT or one directory per array, zarr 2 or 3), so any thread can read any region.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts
from jaxtyping import Shaped

from models.checkpoints.declared import check_declared
from models.checkpoints.rename import Shape
from models.checkpoints.safetensors_format import map_file
from models.files.address import whole
from models.files.bounds import check_name
from models.files.foreign_json import read_json, section

IN_FLIGHT_BYTES = 2 * 2**30
"""Limit of a checkpoint's bytes in memory while it is read, unless one of its chunks is larger."""

_ZARR = {".zarray": "zarr", "zarr.json": "zarr3"}
_NO_NUMBERS = ("json", "string", "ustring", "char", "byte")


@dataclass(frozen=True)
class CheckpointSource:
    """Arrays by name. `where` is the path for messages. An array has `shape` and `dtype`; indexing
    it and then calling `np.asarray` reads that region and no more. `metadata`: strings that the
    writer added."""

    where: str
    arrays: Mapping[str, Any]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(array.shape) for name, array in self.arrays.items()}

    def read(self, name: str, region: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """A region of array `name`; any number of threads may read."""
        return np.asarray(self.arrays[name][region])

    def least(self, name: str) -> int:
        """Bytes in memory that reading the smallest region of an array takes: one chunk."""
        array = self.arrays[name]
        return _chunk_bytes(array) if isinstance(array, ts.TensorStore) else 0

    def renamed(self, rename: Callable[[str], str]) -> "CheckpointSource":
        """The same arrays under other names."""
        return replace(self, arrays={rename(name): array for name, array in self.arrays.items()})


def open_orbax(path: Path) -> CheckpointSource:
    """The arrays of an Orbax directory, named "a/b/c".

    `path` is a directory that Orbax wrote, or a checkpoint that holds one as `params`. `params` at
    the head of the names, and `value` at their tail, are dropped if every name has them.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: no Orbax arrays are in it, they cannot be opened, or they declare far more than
        the files hold.
    """
    path = whole(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give an Orbax checkpoint.")
    directory = path / "params" if (path / "params").is_dir() else path
    check_declared(directory, {})
    specs = _zarr_specs(directory)
    if not specs:
        raise ValueError(
            f"{directory} holds no Orbax arrays (no manifest.ocdbt, no .zarray, no zarr.json); "
            f"give the directory that was saved, or its parent."
        )
    arrays = _open_all(directory, specs, ts.Context())
    _check_numbers(directory, arrays)
    # Orbax stores an unsharded array as one compressed chunk. Without a cache, each read of a
    # region would decompress it again.
    chunks = map(_chunk_bytes, arrays.values())
    limit = max(IN_FLIGHT_BYTES, *chunks)
    context = ts.Context({"cache_pool": {"total_bytes_limit": limit}})
    return CheckpointSource(str(path), _open_all(directory, specs, context))


def require_opened(directory: Path) -> None:
    """Raises ValueError unless every array of an Orbax directory can be opened, so that the files
    that list and describe them are whole. Orbax itself leaves threads behind when it fails."""
    _open_all(directory, _zarr_specs(directory), ts.Context())


def open_safetensors(path: Path) -> CheckpointSource:
    """The arrays of a safetensors file, of the shards that a `.safetensors.index.json` names, or of
    a directory that holds either (`model.safetensors`).

    Raises:
      FileNotFoundError: there is none, or a shard is missing.
      ValueError: a file is damaged or of a data type that is not known.
    """
    path = whole(path)
    names = ("model.safetensors.index.json", "model.safetensors")
    if path.is_dir():
        file = next((path / name for name in names if (path / name).is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{path} holds neither {' nor '.join(names)}.")
    else:
        file = path
    if file.suffix != ".json":
        return CheckpointSource(str(path), *map_file(file))
    shards = section(read_json(file), "weight_map", str(file)).values()
    for shard in shards:
        if not isinstance(shard, str):
            raise ValueError(f"{file}: weight_map names {str(shard)[:80]!r}; expected a file.")
        check_name(f"{file}: a file of weight_map", shard)
    arrays: dict[str, np.ndarray] = {}
    for shard in sorted(set(shards)):
        found = map_file(file.parent / shard)[0]
        if twice := set(found) & set(arrays):
            raise ValueError(
                f"{file.parent / shard} holds {min(twice)[:80]!r}, which another file of {file} "
                f"holds too; download them again."
            )
        arrays |= found
    return CheckpointSource(str(path), arrays)


def _zarr_specs(directory: Path) -> dict[str, dict[str, Any]]:
    """TensorStore spec of every array, by its name."""
    base = f"file://{quote(str(directory))}/"
    if (directory / "manifest.ocdbt").is_file():
        kvstore = {"driver": "ocdbt", "base": base}
        with _named(directory):
            keys = [key.decode() for key in ts.KvStore.open(kvstore).result().list().result()]
    else:
        kvstore = {"driver": "file", "path": f"{directory}/"}
        keys = [f"{file.parent.name}/{file.name}" for file in directory.glob("*/*zarr*")]
    file = directory / "_METADATA"
    described = read_json(file) if file.exists() else {}
    # Orbax once left out chunks of zeros. If the metadata says it did not, a missing chunk is lost
    # data.
    filled = not described.get("store_array_data_equal_to_fill_value", False)
    specs = {}
    for key in keys:
        folder, _, name = key.rpartition("/")
        if name in _ZARR:
            specs[folder.replace(".", "/")] = {
                "driver": _ZARR[name],
                "kvstore": {**kvstore, "path": f"{kvstore.get('path', '')}{folder}/"},
                "fill_missing_data_reads": filled,
            }
    return _plain_names(specs)


def _plain_names(specs: dict[str, Any]) -> dict[str, Any]:
    if all(name.startswith("params/") for name in specs):
        specs = {name.removeprefix("params/"): spec for name, spec in specs.items()}
    if all(name.endswith("/value") for name in specs):
        specs = {name.removesuffix("/value"): spec for name, spec in specs.items()}
    return specs


def _open_all(
    directory: Path, specs: dict[str, dict[str, Any]], context: ts.Context
) -> dict[str, ts.TensorStore]:
    with _named(directory):
        opening = {name: ts.open(spec, open=True, context=context) for name, spec in specs.items()}
        return {name: future.result() for name, future in opening.items()}


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Errors of the storage library as ValueErrors that name the directory."""
    try:
        yield
    except (ValueError, KeyError, IndexError, OSError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{directory} is damaged or not an Orbax directory: {str(error)[:400]}; copy or "
            "download it again."
        ) from error


def _check_numbers(directory: Path, arrays: Mapping[str, ts.TensorStore]) -> None:
    """Refuses arrays that do not hold numbers, or that declare far more than the files hold."""
    strange = [name for name, array in arrays.items() if array.dtype.name in _NO_NUMBERS]
    if strange:
        raise ValueError(
            f"{directory} holds {strange[0][:80]!r} of type {arrays[strange[0]].dtype.name}; "
            f"expected numbers."
        )
    declared = {
        name: max(_chunk_bytes(x), math.prod(map(int, x.shape)) * x.dtype.numpy_dtype.itemsize)
        for name, x in arrays.items()
    }
    check_declared(directory, declared)


def _chunk_bytes(array: ts.TensorStore) -> int:
    shape = array.chunk_layout.read_chunk.shape or array.shape
    return math.prod(int(size or 1) for size in shape) * array.dtype.numpy_dtype.itemsize
