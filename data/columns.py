"""Parquet columns to numpy arrays of the type and shape that `info.json` declares, and nothing
else.

LeRobot writes vectors as fixed-size lists, its converter as plain lists; both are the same bytes
underneath. A column of another type is an error that names the file, because a silent cast hides a
broken recording.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    if not _NUMBER.fullmatch(dtype):
        return None
    try:
        return pa.from_numpy_dtype(np.dtype(dtype))
    except (TypeError, pa.ArrowNotImplementedError):
        return None


_NUMBER = re.compile(r"bool|u?int\d{1,3}|float\d{1,3}")


def open_parquet(path: Path, file: Path | str | None = None) -> pq.ParquetFile:
    """Opens a parquet file, whose checksums (where it has any) are verified when it is read.

    Args:
      file: what error messages call it, `path` if None.

    Raises:
      MissingFileError: it is missing.
      DatasetError: it is damaged (a killed recording leaves a file without footer).
    """
    file = file or path
    if not path.is_file():
        raise MissingFileError(file, "file", "is missing; copy or record the dataset again.")
    with reading(file):
        opened = pq.ParquetFile(path, page_checksum_verification=True)
        _ = opened.schema_arrow.names
    return opened


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Turns pyarrow's errors about a damaged parquet file into one that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(
            file,
            "file",
            f"is no readable parquet ({reason}); it was cut off or damaged, "
            "copy or record it again.",
        ) from None


def read_table(path: Path, file: Path | str | None = None) -> pa.Table:
    """A parquet file whole; messages call it `file`, or `path` if None.

    Raises:
      MissingFileError: it is missing.
      DatasetError: it is damaged.
    """
    file = file or path
    with open_parquet(path, file) as opened, reading(file):
        return opened.read()


def read_columns(
    opened: pq.ParquetFile,
    columns: Sequence[str],
    file: Path | str,
    groups: Iterable[int] | None = None,
) -> pa.Table:
    """The named columns of an open parquet file, or of some of its row groups.

    Raises:
      DatasetError: it is damaged, or a column is missing or there twice.
    """
    there = opened.schema_arrow.names
    missing = [name for name in columns if there.count(name) != 1]
    if missing:
        raise DatasetError(
            file,
            f"column '{missing[0]}'",
            f"is missing or there twice (there are {there}); write the dataset again.",
        )
    with reading(file):
        if groups is None:
            table = opened.read(list(columns))
        else:
            table = opened.read_row_groups(list(groups), list(columns))
    return table.select(list(columns))


def to_numpy(
    path: Path | str, name: str, column: pa.ChunkedArray, feature: Mapping[str, Any]
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
    while isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
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
    with reading(path):
        values = array.to_numpy(zero_copy_only=False)
    return values.reshape((rows,) if name in BOOKKEEPING else (rows, *shape))
