"""Checks of the shapes a checkpoint declares against the bytes of its files.

A few bytes of metadata can declare arrays of terabytes, which exhaust the memory of a process in
libraries that abort; real weights shrink by a tenth when compressed.
"""

from collections.abc import Mapping
from pathlib import Path

_COMPRESSED = 100
_SMALL_BYTES = 64 * 2**20


def check_declared(directory: Path, declared: Mapping[str, int]) -> None:
    """Raises ValueError if the declared arrays (bytes by name) are over a hundred times as large as
    the directory's files (64 MiB are always allowed), or if one of the files is not a regular
    file."""
    stored = 0
    for file in directory.rglob("*"):
        if not file.is_dir():
            check_regular(file)
            stored += file.stat().st_size
    total = sum(declared.values())
    if total > _COMPRESSED * stored + _SMALL_BYTES:
        name = max(declared, key=lambda name: declared[name])
        raise ValueError(
            f"{directory} declares {total:.3g} bytes of arrays, most of them in {name[:80]!r}, "
            f"but its files have only {stored:.3g}; weights do not compress that far, so copy or "
            "download it again."
        )


def check_regular(file: Path) -> None:
    """Raises ValueError unless a file, or what it links to, is a regular file: reading a pipe or a
    device may never end."""
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file; copy or download the checkpoint again.")
