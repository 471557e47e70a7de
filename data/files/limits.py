"""Limits on what a dataset's files unpack to. They are generous for real files and small compared
with what a file of one kilobyte can ask for: an image of 60,000 by 60,000 pixels, a column of 2^31
rows.

Sizes that files declare are checked against them before any memory is allocated.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from data.errors import DatasetError

MOST_PIXELS = 1 << 26
"""Most pixels of an image: 64 megapixels, 8192 by 8192."""
MOST_FRAMES = 1 << 31
"""Most frames of an episode."""

_FREE_VALUES, _VALUES_PER_BYTE = 1 << 24, 16
_FREE_BYTES, _BYTES_PER_BYTE = 1 << 28, 16


def require_pixels(width: int, height: int) -> None:
    """Raises ValueError if an image is larger than `MOST_PIXELS`."""
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"it has {width}x{height} pixels, more than the limit of {MOST_PIXELS >> 20} "
            "megapixels; make it smaller"
        )


def most_values(file_bytes: int) -> int:
    """Numbers that a column of a file of this size may hold."""
    return _FREE_VALUES + _VALUES_PER_BYTE * file_bytes


def most_bytes(file_bytes: int) -> int:
    """Bytes of texts and images that a column of a file of this size may hold."""
    return _FREE_BYTES + _BYTES_PER_BYTE * file_bytes


def room_for(file: Path | str, count: int, shape: Sequence[int]) -> UInt8[np.ndarray, "t h w 3"]:
    """Allocates memory for the images of an episode.

    Raises:
      DatasetError: there is not enough memory.
    """
    try:
        return np.empty((count, *shape), np.uint8)
    except (MemoryError, ValueError):
        raise DatasetError(
            file,
            "frames",
            f"{count} images of {shape[1]}x{shape[0]} pixels do not fit into memory; leave the "
            "episode out or make the images smaller.",
        ) from None
