"""Conversion of parquet columns to numpy arrays of exactly the type and shape that `info.json`
declares.

LeRobot writes vectors as fixed-size lists, its converter as plain lists; both are the same bytes
underneath. A column of another type is an error that names the file, because a silent cast hides a
broken recording.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DatasetError, MissingFileError, naming_damage, require_content
from data.files.limits import most_bytes, most_values

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


class ParquetFile(pq.ParquetFile):
    """An open file that knows its size, to check its declared unpacked size against."""

    file_bytes: int


def open_parquet(path: Path, file: Path | str | None = None) -> ParquetFile:
    """Opens a parquet file, whose checksums (where it has any) are verified when it is read.

    Args:
      file: its name in error messages; `path` if None.

    Raises:
      MissingFileError: it is missing.
      DatasetError: it is damaged (a killed recording leaves a file without footer).
    """
    file = file or path
    if not path.is_file():
        raise MissingFileError(file, "file", "is missing; copy or record the dataset again.")
    require_content(path, file)
    with reading(file):
        opened = ParquetFile(path, page_checksum_verification=True)
        opened.file_bytes = path.stat().st_size
        _ = opened.schema_arrow.names
    return opened


def reading(file: Path | str) -> AbstractContextManager[None]:
    """Turns pyarrow's errors about a damaged parquet file into one that names it."""
    return naming_damage(
        file,
        "file",
        "is not a readable parquet file ({reason}): it was cut off or damaged; copy or record it "
        "again.",
        caught=(pa.ArrowException, OSError, ValueError, MemoryError, RecursionError),
    )


def read_table(path: Path, file: Path | str | None = None) -> pa.Table:
    """A whole parquet file; messages call it `file`, or `path` if None.

    Raises:
      MissingFileError: it is missing.
      DatasetError: it is damaged.
    """
    file = file or path
    with open_parquet(path, file) as opened:
        return read_columns(opened, opened.schema_arrow.names, file)


def read_columns(
    opened: ParquetFile,
    columns: Sequence[str],
    file: Path | str,
    groups: Iterable[int] | None = None,
) -> pa.Table:
    """The named columns of an open parquet file, or of some of its row groups.

    Raises:
      DatasetError: it is damaged, a column is missing or occurs twice, or the columns unpack to far
        more than such a file can hold.
    """
    there = opened.schema_arrow.names
    missing = [name for name in columns if there.count(name) != 1]
    if missing:
        raise DatasetError(
            file,
            f"column '{missing[0]}'",
            f"is missing or appears twice (the columns are {there}); write the dataset again.",
        )
    with reading(file):
        chosen = list(range(opened.num_row_groups) if groups is None else groups)
        values = _promised(opened, columns, chosen)
        if values > most_values(opened.file_bytes):
            raise _unpacks(file, f"{values} values in a column", opened)
        kinds = {name: opened.schema_arrow.field(name).type for name in columns}
        long = [name for name, kind in kinds.items() if _has_bytes(kind)]
        fixed = [name for name in columns if name not in long]
        tables = [opened.read_row_groups(chosen, fixed)] if fixed or not long else []
        if long:
            tables.append(_read_bytes(opened, long, chosen, file))
        found = {name: table[name] for table in tables for name in table.column_names}
        return pa.table({name: found[name] for name in columns})


def _promised(opened: ParquetFile, columns: Sequence[str], groups: Sequence[int]) -> int:
    """The largest number of values that the footer promises in one of these columns."""
    leaves = _leaves_of(opened.schema_arrow, columns)
    counts = dict.fromkeys([-1, *leaves], 0)
    for group in map(opened.metadata.row_group, groups):
        counts[-1] += group.num_rows
        for leaf in leaves:
            counts[leaf] += group.column(leaf).num_values
    return max(counts.values())


def _read_bytes(
    opened: ParquetFile, columns: Sequence[str], groups: Sequence[int], file: Path | str
) -> pa.Table:
    """Columns of texts or images. A value that the file stores once may occur in every row, so a
    few rows are read at a time, and too many bytes are an error."""
    leaves = _leaves_of(opened.schema_arrow, columns)
    chunks = [opened.metadata.row_group(group).column(leaf) for group in groups for leaf in leaves]
    longest = max((chunk.total_uncompressed_size for chunk in chunks), default=1)
    rows = min(max(1, _BATCH_BYTES // max(1, longest)), _BATCH_ROWS)
    batches, held = [], 0
    for batch in opened.iter_batches(rows, groups, list(columns)):
        batches.append(batch)
        held += batch.nbytes
        if held > most_bytes(opened.file_bytes):
            raise _unpacks(file, f"more than {held} bytes", opened)
    return pa.Table.from_batches(batches) if batches else opened.read_row_groups([], list(columns))


_BATCH_BYTES, _BATCH_ROWS = 1 << 26, 4096


def _leaves_of(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    """Indices of the parquet columns that make up the given columns."""
    found, number = list[int](), 0
    for field in schema:
        width = _leaves(field.type)
        if field.name in columns:
            found += range(number, number + width)
        number += width
    return found


def _leaves(kind: pa.DataType) -> int:
    return sum(_leaves(field.type) for field in _inside(kind)) or 1


def _has_bytes(kind: pa.DataType) -> bool:
    return _is_bytes(kind) or any(_has_bytes(field.type) for field in _inside(kind))


def _inside(kind: pa.DataType) -> list[pa.Field]:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return [kind.field(k) for k in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        is_of(kind)
        for is_of in (types.is_string, types.is_large_string, types.is_binary,
                      types.is_large_binary, types.is_dictionary, types.is_string_view,
                      types.is_binary_view)
    )  # fmt: skip


def _unpacks(file: Path | str, what: str, opened: ParquetFile) -> DatasetError:
    return DatasetError(
        file,
        "rows",
        f"unpack to {what} from {opened.file_bytes} bytes, far more than a robot's data ever does; "
        "copy or record the dataset again.",
    )


def stored_dtype(column: pa.ChunkedArray) -> str:
    """The numpy type's name of a column's values as its file has them; "" if they are no
    numbers."""
    kind = column.type
    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind = kind.field(0).type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return np.dtype(kind.to_pandas_dtype()).name if number else ""


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
        known = name in BOOKKEEPING
        wanted = "every LeRobot dataset has" if known else "meta/info.json declares"
        remedy = f"write the column as {feature['dtype']}{'' if known else ' or correct info.json'}"
        if expected is not None and expected != pa.string() and stored_dtype(column) and not known:
            remedy += f", as `python -m tools.data edit --cast {name} {feature['dtype']}` does"
        raise DatasetError(
            path,
            f"column '{name}'",
            f"holds {column.type}, but {wanted} {feature['dtype']}; {remedy}.",
        )
    shape = tuple(feature["shape"])
    if nulls or len(array) != rows * int(np.prod(shape)):
        raise DatasetError(
            path,
            f"column '{name}'",
            f"has {nulls} empty values and {len(array)} values in all for {rows} rows, expected "
            f"shape {shape} in each row and no empty value; write the column again.",
        )
    with reading(path):
        values = array.to_numpy(zero_copy_only=False)
    return values.reshape((rows,) if name in BOOKKEEPING else (rows, *shape))
