"""Damages a copy of a dataset at random, in the ways that disks, killed jobs, careless scripts, old
converters and attackers do. The same seed damages in the same way."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.columns import BOOKKEEPING

Random = np.random.Generator


def mutate(root: Path, seed: int) -> str:
    """Damages one file (or two) of the dataset at `root`; says how."""
    rng = np.random.default_rng(seed)
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    folders = sorted({path.relative_to(root).parts[0] for path in files})
    folder = _one_of(rng, folders)
    path = _one_of(rng, [p for p in files if p.relative_to(root).parts[0] == folder])
    others = [p for p in files if p != path and p.suffix == path.suffix]
    others = others or [p for p in files if p != path]
    kinds: list[Callable[..., str]] = [*_BYTES, *_FILES]
    if path.suffix in _STRUCTURED:
        kinds += 3 * _STRUCTURED[path.suffix]
    kind = _one_of(rng, kinds)
    try:
        how = kind(rng, path, _one_of(rng, others)) if kind in _FILES else kind(rng, path)
    except (pa.ArrowException, IndexError):  # there is nothing in it to change that way
        kind, how = truncate, truncate(rng, path)
    return f"{path.relative_to(root)}: {kind.__name__}{how and ' '}{how}"


def flip_bits(rng: Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    places = rng.integers(0, len(data), _one_of(rng, (1, 1, 1, 2, 8)))
    for at in places:
        data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    return f"at {places.tolist()}"


def zero_block(rng: Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    at, size = _block(rng, len(data))
    data[at : at + size] = bytes(size)
    path.write_bytes(data)
    return f"{at}+{size}"


def splice_block(rng: Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    at, size = _block(rng, len(data))
    source = int(rng.integers(len(data) - size + 1))
    data[at : at + size] = data[source : source + size]
    path.write_bytes(data)
    return f"{source}+{size} to {at}"


def truncate(rng: Random, path: Path) -> str:
    left = int(rng.integers(path.stat().st_size))
    os.truncate(path, left)
    return f"to {left}"


def insert_block(rng: Random, path: Path) -> str:
    data = path.read_bytes()
    at, size = _block(rng, len(data))
    path.write_bytes(data[:at] + rng.bytes(size) + data[at:])
    return f"{at}+{size}"


def drop_block(rng: Random, path: Path) -> str:
    data = path.read_bytes()
    at, size = _block(rng, len(data))
    path.write_bytes(data[:at] + data[at + size :])
    return f"{at}+{size}"


def delete(_: Random, path: Path, __: Path) -> str:
    path.unlink()
    return ""


def empty(_: Random, path: Path, __: Path) -> str:
    path.write_bytes(b"")
    return ""


def swap(_: Random, path: Path, other: Path) -> str:
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return f"with {other.name}"


def overwrite(_: Random, path: Path, other: Path) -> str:
    shutil.copyfile(other, path)
    return f"with {other.name}"


def become_folder(_: Random, path: Path, __: Path) -> str:
    path.unlink()
    path.mkdir()
    return ""


def delete_folder(_: Random, path: Path, __: Path) -> str:
    shutil.rmtree(path.parent)
    return path.parent.name


def nest_deep(rng: Random, path: Path) -> str:
    """Lists within lists in place of the first value that a key has."""
    depth, text = int(10 ** rng.uniform(2, 6)), path.read_text()
    head, colon, rest = text.partition(":")
    path.write_text(f"{head}{colon}{'[' * depth}{']' * depth}{rest[rest.find(',') :]}")
    return f"{depth}"


def lengthen_numbers(rng: Random, path: Path) -> str:
    """Thousands of digits behind a number."""
    text = path.read_text()
    numbers = list(re.finditer(r"\d(?=[\s,}\]])", text))
    at = numbers[int(rng.integers(len(numbers)))].end() if numbers else len(text)
    path.write_text(text[:at] + "7" * (digits := _one_of(rng, (19, 400, 5000))) + text[at:])
    return f"by {digits} at {at}"


def change_json(rng: Random, path: Path) -> str:
    found = json.loads(path.read_text())
    how = _change(rng, found)
    path.write_text(json.dumps(found))
    return how


def change_line(rng: Random, path: Path) -> str:
    lines = path.read_text().splitlines()
    at = int(rng.integers(len(lines)))
    found = json.loads(lines[at])
    how = _change(rng, found)
    lines[at] = json.dumps(found)
    path.write_text("\n".join(lines) + "\n")
    return f"line {at} {how}"


def drop_line(rng: Random, path: Path) -> str:
    lines = path.read_text().splitlines()
    at = int(rng.integers(len(lines)))
    path.write_text("\n".join(lines[:at] + lines[at + 1 :]) + "\n")
    return f"{at}"


def double_line(rng: Random, path: Path) -> str:
    lines = path.read_text().splitlines()
    at = int(rng.integers(len(lines)))
    path.write_text("\n".join([*lines[: at + 1], *lines[at:]]) + "\n")
    return f"{at}"


def change_cell(rng: Random, path: Path) -> str:
    table = pq.read_table(path)
    names = [n for n in table.column_names if n in BOOKKEEPING or n.startswith(_PLACES)]
    name = _one_of(rng, names)
    values = table[name].to_pylist()
    at = int(rng.integers(len(values)))
    choices: tuple[Any, ...] = (None, -1, 2**31, 0, 1, 7, 2**40, 2**63 - 1, -(2**63))
    if name == "task_index":  # another task that there is would be none the less right
        choices = choices[:3]
    if not pa.types.is_integer(table[name].type):
        choices = (None, -1.0, math.nan, math.inf, 1e300, 1e15, 0.3)
    values[at] = _one_of(rng, choices)
    _write(path, table, name, pa.array(values, table[name].type))
    return f"{name}[{at}] to {values[at]}"


def empty_cells(rng: Random, path: Path) -> str:
    """Nothing, or no number, in all rows of a column."""
    table = pq.read_table(path)
    name = _one_of(rng, table.column_names)
    kind = table[name].type
    is_place = pa.types.is_floating(kind) and (name in BOOKKEEPING or name.startswith(_PLACES))
    value = _one_of(rng, (None, math.nan)) if is_place else None
    _write(path, table, name, pa.array([value] * len(table), kind))
    return f"{name} to {value}"


def change_type(rng: Random, path: Path) -> str:
    table = pq.read_table(path)
    names = [n for n in table.column_names if _is_number(table[n].type)]
    name = _one_of(rng, names)
    kind = _one_of(rng, (pa.float64(), pa.int32(), pa.int64(), pa.string(), pa.uint8()))
    values = table[name].cast(kind, safe=False)
    _write(path, table, name, values)
    return f"{name} to {kind}"


def drop_column(rng: Random, path: Path) -> str:
    table = pq.read_table(path)
    name = _one_of(rng, table.column_names)
    pq.write_table(table.drop([name]), path)
    return name


def drop_rows(rng: Random, path: Path) -> str:
    table = pq.read_table(path)
    at, count = _block(rng, table.num_rows)
    rows = [*range(at), *range(at + count, table.num_rows)]
    pq.write_table(table.take(rows), path)
    return f"{at}+{count}"


def double_rows(rng: Random, path: Path) -> str:
    table = pq.read_table(path)
    at, count = _block(rng, table.num_rows)
    pq.write_table(pa.concat_tables([table, table.slice(at, count)]), path)
    return f"{at}+{count}"


def shuffle_rows(rng: Random, path: Path) -> str:
    table = pq.read_table(path)
    pq.write_table(table.take(rng.permutation(table.num_rows)), path)
    return ""


_PLACES = ("length", "data/", "dataset_", "videos/")
_BYTES = [flip_bits, zero_block, splice_block, truncate, insert_block, drop_block]
_FILES: list[Callable[..., str]] = [
    delete, delete_folder, empty, swap, overwrite, become_folder,
]  # fmt: skip
_STRUCTURED: dict[str, list[Callable[..., str]]] = {
    ".json": [change_json, change_json, change_json, nest_deep, lengthen_numbers],
    ".jsonl": [change_line, change_line, drop_line, double_line, nest_deep, lengthen_numbers],
    ".parquet": [
        change_cell,
        change_cell,
        change_type,
        drop_column,
        drop_rows,
        double_rows,
        shuffle_rows,
        empty_cells,
    ],
}
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**31, 2**63, -(2**70), 10**400, 1e308, math.nan, math.inf, 0.5, "",
    "text", "{}", "../x", "a/../../x", "a\x00b", "\x1b[31m", "\ud800", "x" * 5000,
    "{episode_index:d}{no}", "{episode_index:>500000000}", "{video_key.__class__}", "string",
    "float128", "(2,)f4", [], {}, [1], [None], [2**31 - 1] * 20, [[[]]], {"a": 1}, {"": None},
)  # fmt: skip


def _change(rng: Random, value: Any) -> str:
    """Changes a value somewhere within a JSON object, or removes it."""
    path = []
    while isinstance(value, dict | list) and value:
        inside, key = (
            value,
            _one_of(rng, list(value if isinstance(value, dict) else range(len(value)))),
        )
        path.append(str(key))
        value = inside[key]
        if rng.random() < 0.3:
            break
    if rng.random() < 0.25:
        del inside[key]
        return f"{'/'.join(path)} removed"
    inside[key] = _one_of(rng, _VALUES)
    return f"{'/'.join(path)} to {inside[key]!r}"


def _write(path: Path, table: pa.Table, name: str, values: pa.Array) -> None:
    pq.write_table(table.set_column(table.column_names.index(name), name, values), path)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _block(rng: Random, size: int) -> tuple[int, int]:
    """Start and length of a block, short ones as likely as long ones."""
    length = int(min(size, 2 ** rng.uniform(0, math.log2(size + 1))))
    return int(rng.integers(size - length + 1)), length


def _one_of(rng: Random, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]
