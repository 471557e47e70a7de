"""Arrays of a checkpoint by name, read by region: Orbax directories and safetensors files.

Orbax's library restores whole trees of one topology; here its arrays are opened with tensorstore
(OCDBT or one directory per array, zarr 2 or 3), whose every region can be read by any thread.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts
from jaxtyping import Shaped

from models.checkpoints.rename import Shape
from models.checkpoints.safetensors_format import map_file

IN_FLIGHT_BYTES = 2 * 2**30
"""What is held of a checkpoint while it is read, if no chunk of it is larger."""

_ZARR = {".zarray": "zarr", "zarr.json": "zarr3"}


@dataclass(frozen=True)
class Source:
    """Arrays by name. `where` is the path for messages; an array has `shape` and `dtype`, and
    indexing it and then `np.asarray` reads that region and no more. `metadata`: strings that the
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

    def renamed(self, rename: Callable[[str], str]) -> "Source":
        """The same arrays under other names."""
        return replace(self, arrays={rename(name): array for name, array in self.arrays.items()})


def open_orbax(path: Path) -> Source:
    """The arrays of an Orbax directory, named "a/b/c".

    `path` is a directory that Orbax wrote, or a checkpoint that holds such a one as `params`. The
    names' head `params` is dropped, and their tail `value` where every name has it.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: no Orbax arrays are in it.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give an Orbax checkpoint.")
    directory = path / "params" if (path / "params").is_dir() else path
    specs = _zarr_specs(directory)
    if not specs:
        raise ValueError(
            f"{directory} holds no Orbax arrays (no manifest.ocdbt, no .zarray, no zarr.json); "
            f"give the directory that was saved, or its parent."
        )
    # Orbax stores an unsharded array as one compressed chunk, which without a cache each region
    # read of it would decompress anew.
    chunks = map(_chunk_bytes, _open_all(specs, ts.Context()).values())
    limit = max(IN_FLIGHT_BYTES, *chunks)
    context = ts.Context({"cache_pool": {"total_bytes_limit": limit}})
    return Source(str(path), _open_all(specs, context))


def open_safetensors(path: Path) -> Source:
    """The arrays of a safetensors file, of the shards that a `.safetensors.index.json` names, or of
    the directory of either (`model.safetensors`).

    Raises:
      FileNotFoundError: there is none, or a shard is missing.
      ValueError: a file is damaged or of a data type that is not known.
    """
    path = Path(path).absolute()
    names = ("model.safetensors.index.json", "model.safetensors")
    if path.is_dir():
        file = next((path / name for name in names if (path / name).is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{path} holds neither {' nor '.join(names)}.")
    else:
        file = path
    if file.suffix != ".json":
        return Source(str(path), *map_file(file))
    shards = sorted(set(json.loads(file.read_text())["weight_map"].values()))
    arrays: dict[str, np.ndarray] = {}
    for shard in shards:
        arrays |= map_file(file.parent / shard)[0]
    return Source(str(path), arrays)


def _zarr_specs(directory: Path) -> dict[str, dict[str, Any]]:
    """How to open every array, by its name."""
    base = f"file://{quote(str(directory))}/"
    if (directory / "manifest.ocdbt").is_file():
        kvstore = {"driver": "ocdbt", "base": base}
        keys = [key.decode() for key in ts.KvStore.open(kvstore).result().list().result()]
    else:
        kvstore = {"driver": "file", "path": f"{directory}/"}
        keys = [f"{file.parent.name}/{file.name}" for file in directory.glob("*/*zarr*")]
    file = directory / "_METADATA"
    described = json.loads(file.read_text()) if file.is_file() else {}
    # Orbax once left out chunks of zeros; where it says it did not, an absent one is a loss.
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


def _open_all(specs: dict[str, dict[str, Any]], context: ts.Context) -> dict[str, ts.TensorStore]:
    opening = {name: ts.open(spec, open=True, context=context) for name, spec in specs.items()}
    return {name: future.result() for name, future in opening.items()}


def _chunk_bytes(array: ts.TensorStore) -> int:
    shape = array.chunk_layout.read_chunk.shape or array.shape
    return math.prod(int(size or 1) for size in shape) * array.dtype.numpy_dtype.itemsize
