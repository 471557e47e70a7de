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
MOST_TEXT = 1 << 22
"""Most bytes of a text that describes something: an instruction, YAML, an array's attributes."""
MOST_JSON = 1 << 26
"""Most bytes of a file of JSON."""

_FREE_VALUES, _VALUES_PER_BYTE = 1 << 24, 16
_FREE_BYTES, _BYTES_PER_BYTE, _ON_DISK_PER_BYTE = 1 << 28, 16, 256
_FREE_FRAMES, _FRAMES_PER_MESSAGE = 1 << 20, 16


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


def most_frames(messages: int) -> int:
    """Frames that an episode of so many messages may have."""
    return _FREE_FRAMES + _FRAMES_PER_MESSAGE * messages


def require_budget(
    file: Path | str, place: str, asked: int, file_bytes: int, *, on_disk: bool = False
) -> None:
    """Checks the bytes that something takes by its own declaration, before it is read: a chunk, a
    row, a message.

    Args:
      on_disk: it is unpacked to a file, not in memory.

    Raises:
      DatasetError: a file of `file_bytes` may not ask for so many.
    """
    per_byte = _ON_DISK_PER_BYTE if on_disk else _BYTES_PER_BYTE
    if asked > _FREE_BYTES + per_byte * file_bytes:
        raise DatasetError(
            file,
            place,
            f"unpacks to {asked:,} bytes, far more than a file of {file_bytes:,} bytes may ask "
            "for; copy it again, or leave it out.",
        )


def require_text(file: Path | str, place: str, size: int, most: int = MOST_TEXT) -> None:
    """Raises DatasetError if a text has more bytes than one that describes something."""
    if size > most:
        raise DatasetError(
            file, place, f"has {size:,} bytes of text, more than the limit of {most:,}; shorten it."
        )


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
