"""safetensors files, mapped for reading and written array by array.

The format is the length of a JSON header, the header, and raw little-endian arrays (its
specification is the README of huggingface/safetensors), so a map of the file reads any region.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from models.checkpoints.rename import Shape
from models.checkpoints.transpose import copy_into

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
"""An array to be written: its shape, and how to make it or what broadcasts to it."""

_LENGTH = 8
_METADATA = "__metadata__"


def map_file(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a file by name, as views of its map, and the strings its writer added.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, or holds a data type that is not known.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; the checkpoint is incomplete.")
    raw = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
    begin = _LENGTH + int.from_bytes(raw[:_LENGTH].tobytes(), "little")
    if len(raw) < begin or len(raw) < _LENGTH:
        raise ValueError(f"{file} is no safetensors file or was cut off: it ends in its header.")
    header = json.loads(raw[_LENGTH:begin].tobytes())
    metadata = header.pop(_METADATA, {})
    arrays = {}
    for name, entry in header.items():
        start, stop = (begin + offset for offset in entry["data_offsets"])
        if stop > len(raw):
            raise ValueError(f"{file} ends within its array {name}; copy or download it again.")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{file} holds {name} as {entry['dtype']}; known are {', '.join(_DTYPES)}."
            )
        arrays[name] = raw[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def write_file(
    file: Path,
    arrays: Mapping[str, Entry],
    dtype: np.dtype | Mapping[str, np.dtype],
    metadata: Mapping[str, str],
) -> None:
    """Writes arrays, each made when its turn comes; the file appears when it is whole.

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
    with unfinished.open("wb") as out:
        out.write(len(text).to_bytes(_LENGTH, "little") + text)
        for name, (shape, make) in arrays.items():
            array = np.empty(shape, dtypes[name])
            copy_into(array, np.broadcast_to(make(), shape))
            array.tofile(out)
    unfinished.rename(file)
