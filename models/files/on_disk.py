"""Waiting until written data would survive a loss of power."""

import os
from pathlib import Path


def to_disk(path: Path) -> None:
    """Returns when a file's content, or a directory's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
