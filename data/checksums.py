"""Sums that tell a damaged dataset from a sound one.

Videos and most parquet files carry no checksums, so a flipped bit may read as another picture or
number and nothing in the format can tell. `meta/checksums.json` says size and SHA-256 of every
file; readers that do not know it ignore it. Datasets that this project writes have it, and any
other can be given it.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import DatasetError
from data.files import Folder

CHECKSUMS = "meta/checksums.json"


def write_checksums(root: Path) -> None:
    """Says in `meta/checksums.json` of the local dataset at `root` what its files hold now."""
    folder = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
    files = {name: path for name, path in folder.items() if _is_covered(name) and path.is_file()}
    sums = {name: [path.stat().st_size, sha256(path)] for name, path in files.items()}
    (root / CHECKSUMS).write_text(json.dumps({"sha256": sums}, indent=1) + "\n")


def damaged_files(folder: Folder) -> Iterator[DatasetError]:
    """Files that are missing, changed or new since the checksums were written; none, if they never
    were. Reads every file of the dataset."""
    if not folder.exists(CHECKSUMS):
        return
    sums = _read(folder)
    there = {n for top in _FOLDERS for n in folder.list(f"{top}/**/*") if _is_covered(n)}
    for name in sorted(there | set(sums)):
        if name not in there:
            what = "is missing"
        elif name not in sums:
            what = "is newer than the checksums"
        elif folder.size(name) != sums[name][0]:
            what = f"has {folder.size(name)} bytes of the {sums[name][0]} it was written with"
        elif sha256(folder.local(name)) != sums[name][1]:
            what = "does not hold the bytes it was written with"
        else:
            continue
        yield DatasetError(
            folder.path(name),
            "checksum",
            f"the file {what}; copy it again or, if it was changed on purpose, delete {CHECKSUMS}.",
        )


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_FOLDERS = ("meta", "data", "videos", "images")


def _is_covered(name: str) -> bool:
    return name.partition("/")[0] in _FOLDERS and name != CHECKSUMS


def _read(folder: Folder) -> dict[str, Any]:
    try:
        sums = json.loads(folder.local(CHECKSUMS).read_text())["sha256"]
        if all(isinstance(of, list) and len(of) == 2 for of in sums.values()):
            return sums
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise DatasetError(
        folder.path(CHECKSUMS),
        "sha256",
        "does not list the files with their sizes and sums; delete it and write it again.",
    )
