"""Single bits of a file, flipped one after the other."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.store.store import _open


def flips(file: Path, number: int, where: np.ndarray | None = None) -> Iterator[int]:
    """Places of a file (among those `where` holds), each while one bit of it is flipped."""
    whole = np.fromfile(file, np.uint8)
    rng = np.random.default_rng(len(whole))
    allowed = np.arange(len(whole)) if where is None else np.flatnonzero(where)
    for at in rng.choice(allowed, min(number, len(allowed)), replace=False).tolist():
        bit = 1 << int(rng.integers(8))
        try:
            put(file, at, whole[at] ^ bit)
            yield at
        finally:
            put(file, at, whole[at])


def put(file: Path, at: int, value: int) -> None:
    """Changes one byte of a file where it lies."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([value]))
    _open.clear()
