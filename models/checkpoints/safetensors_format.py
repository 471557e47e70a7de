"""safetensors files, memory-mapped for reading and written array by array.

The format is the length of a JSON header, the header, and raw little-endian arrays (its
specification is the README of huggingface/safetensors), so any region can be read from a map of the
file.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeGuard

import ml_dtypes
import numpy as np

from models.checkpoints.rename import Shape
from models.checkpoints.transpose import copy_into
from models.files.foreign_json import LARGEST_BYTES, parse_json
from models.files.lfs import refuse_pointer

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
Entry = tuple[Shape, Callable[[], np.ndarray]]
"""An array to be written: its shape, and a function that makes it or an array that broadcasts to
it."""

_LENGTH = 8
_LARGEST_RANK = 8
_METADATA = "__metadata__"


def map_file(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a file by name, as views of its memory map, and the strings that its writer
    added.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, holds an unknown data type, or its header does not follow the
        format's specification: arrays lie end to end and fill the file, each as long as its shape
        and dtype say.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; the checkpoint is incomplete.")
    refuse_pointer(file)
    raw = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
    begin = _LENGTH + int.from_bytes(raw[:_LENGTH].tobytes(), "little")
    if len(raw) < begin or len(raw) < _LENGTH:
        raise ValueError(
            f"{file} is not a safetensors file, or was cut off: it ends within its header; copy or "
            "download it again."
        )
    length = min(begin, _LENGTH + LARGEST_BYTES + 1)
    header = parse_json(raw[_LENGTH:length].tobytes(), f"The header of {file}")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise ValueError(
            f"{file}: {_METADATA} in its header is not a table of strings; copy or download it "
            "again."
        )
    entries = {name: _entry(file, name, entry) for name, entry in header.items()}
    arrays, end = {}, 0
    for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda x: x[1][2:]):
        if begin + stop > len(raw):
            raise ValueError(
                f"{file} ends within its array {_short(name)}; copy or download it again."
            )
        if start != end:
            raise ValueError(
                f"{file} has its array {_short(name)} at byte {start} where the one before it ends "
                f"at {end}; expected arrays end to end, so copy or download it again."
            )
        arrays[name], end = raw[begin + start : begin + stop].view(dtype).reshape(shape), stop
    if begin + end != len(raw):
        raise ValueError(
            f"{file} has {len(raw) - begin - end} bytes after its last array; copy or download it "
            "again."
        )
    return {name: arrays[name] for name in header}, metadata


def _entry(file: Path, name: str, entry: object) -> tuple[np.dtype, Shape, int, int]:
    """Dtype, shape and both ends of an array's bytes, as a header gives them."""
    told = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (told.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _is_sizes(shape) or len(shape) > _LARGEST_RANK:
        raise ValueError(
            f"{file} holds {_short(name)} with shape {_short(shape)}; expected a list of at most "
            f"{_LARGEST_RANK} sizes."
        )
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(
            f"{file} holds {_short(name)} as {_short(kind)}; expected one of {', '.join(_DTYPES)}."
        )
    size = math.prod(shape) * _DTYPES[kind].itemsize
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise ValueError(
            f"{file} holds {_short(name)}, {kind} of shape {_short(shape)}, at bytes "
            f"{_short(offsets)}; expected two offsets {_short(size)} bytes apart."
        )
    return _DTYPES[kind], tuple(shape), offsets[0], offsets[1]


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**48 for x in value)


def _short(value: object) -> str:
    """At most 100 characters of a value, printable."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "�" for c in value[:100])
    return reprlib.repr(value)


def new_model(folder: Path) -> Path:
    """Path of `model.safetensors` in a folder; raises ValueError if the file exists."""
    file = folder / "model.safetensors"
    if file.exists():
        raise ValueError(f"{file} already exists; give a directory without a model in it.")
    return file


def write_file(
    file: Path,
    arrays: Mapping[str, Entry],
    dtype: np.dtype | Mapping[str, np.dtype],
    metadata: Mapping[str, str],
) -> None:
    """Writes arrays, each made only when its turn comes; the file appears when it is complete.

    Args:
      dtype: of all arrays, or of each by its name.
      metadata: strings for the header.
    """
    kinds = {known: kind for kind, known in _DTYPES.items()}
    dtypes = dict.fromkeys(arrays, dtype) if isinstance(dtype, np.dtype) else dtype
    header: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for name, (shape, _) in arrays.items():
        start, end = end, end + int(np.prod(shape)) * dtypes[name].itemsize
        header[name] = {
            "dtype": kinds[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH)
    unfinished = file.with_name(file.name + ".unfinished")
    try:
        with unfinished.open("wb") as out:
            out.write(len(text).to_bytes(_LENGTH, "little") + text)
            for name, (shape, make) in arrays.items():
                array = np.empty(shape, dtypes[name])
                copy_into(array, np.broadcast_to(make(), shape))
                out.write(array.reshape(-1).view(np.uint8).data)
        unfinished.rename(file)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
