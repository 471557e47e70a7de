"""Parquet columns to numpy arrays of the type and shape that `info.json` declares, and nothing
else.

LeRobot writes vectors as fixed-size lists, its converter as plain lists; both are the same bytes
underneath. A column of another type is an error that names the file, because a silent cast hides a
broken recording.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DatasetError, MissingFileError

BOOKKEEPING: dict[str, dict[str, Any]] = {
    "timestamp": {"dtype": "float32", "shape": (1,), "names": None},
    "frame_index": {"dtype": "int64", "shape": (1,), "names": None},
    "episode_index": {"dtype": "int64", "shape": (1,), "names": None},
    "index": {"dtype": "int64", "shape": (1,), "names": None},
    "task_index": {"dtype": "int64", "shape": (1,), "names": None},
}
"""The columns every LeRobot dataset has, one scalar a frame."""


def arrow_type(dtype: str) -> pa.DataType | None:
    """The parquet value type of a feature's dtype; None if it is not a column of plain values."""
    if dtype == "string":
        return pa.string()
    if dtype in ("image", "video"):
        return None
    try:
        return pa.from_numpy_dtype(np.dtype(dtype))
    except (TypeError, pa.ArrowNotImplementedError):
        return None


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """The named columns (all, if None) of a parquet file.

    Raises:
      MissingFileError: it is missing.
      DatasetError: it is damaged (a killed recording leaves a file without footer) or lacks a
        column.
    """
    if not path.is_file():
        raise MissingFileError(path, "file", "is missing; copy or record the dataset again.")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in columns or () if name not in names]
            if not missing:
                return file.read(columns)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            path,
            "file",
            f"is no readable parquet ({str(error).splitlines()[0]}); it was cut off or damaged, "
            "copy or record it again.",
        ) from None
    raise DatasetError(
        path,
        f"column '{missing[0]}'",
        f"is missing (there are {names}); write the dataset again with it.",
    )


def to_numpy(
    path: Path, name: str, column: pa.ChunkedArray, feature: Mapping[str, Any]
) -> np.ndarray:
    """A column as [N, *shape] of the feature's dtype; bookkeeping columns are [N].

    Raises:
      DatasetError: the values are of another type or shape than the feature declares, or null.
    """
    expected = arrow_type(feature["dtype"])
    array = column.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    rows, nulls = len(array), array.null_count
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
        nulls += array.null_count
    actual = pa.string() if pa.types.is_large_string(array.type) else array.type
    if actual != expected:
        raise DatasetError(
            path,
            f"column '{name}'",
            f"holds {column.type}, but meta/info.json declares {feature['dtype']}; "
            f"write the column as {feature['dtype']} or correct info.json.",
        )
    shape = tuple(feature["shape"])
    if nulls or len(array) != rows * int(np.prod(shape)):
        raise DatasetError(
            path,
            f"column '{name}'",
            f"has {nulls} empty values and {len(array)} values in {rows} rows, expected shape "
            f"{shape} in each; write the column again.",
        )
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape((rows,) if name in BOOKKEEPING else (rows, *shape))
