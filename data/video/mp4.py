"""Check of an mp4's own count of its frames against the size of the file, before FFmpeg trusts it.

An mp4's index may list a billion frames in twenty bytes, and FFmpeg takes 24 bytes of memory for
each. Only headers of boxes are read (ISO/IEC 14496-12).
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import av
from av.container import InputContainer

from data.errors import DatasetError, require_content

_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_COUNT_AT = {b"stsz": 8, b"stz2": 8, b"trun": 4}
"""Offset after its header at which a box has its number of frames."""
_MOST_BOXES = 1 << 20
_LENIENT: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
)
"""PyAV 18 fails on a title that is not UTF-8 unless set to replace it; 19 accepts any."""


def open_video(path: Path) -> InputContainer:
    """A video file, opened for reading after its index has been checked against its size.

    Raises:
      DatasetError: as `require_index_fits`.
      av.error.FFmpegError: FFmpeg cannot open it.
    """
    require_content(path)
    require_index_fits(path)
    return av.open(str(path), **_LENIENT)


def unreadable(path: Path) -> DatasetError:
    """An error about a file that FFmpeg cannot open as a video."""
    return DatasetError(
        path,
        "file",
        "is not a readable video (its index may be missing or damaged): it was probably cut off; "
        "copy or encode it again.",
    )


def require_index_fits(path: Path) -> None:
    """Checks an mp4's index against its file; a file of another kind passes.

    Raises:
      DatasetError: it lists more frames than the file has bytes, or hides its index by compression.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(8)[4:] != b"ftyp":
            return
        listed = 0
        for kind, at, end in _boxes(file, size):
            if kind == b"cmov":
                raise DatasetError(path, "index", "is compressed; encode the video again.")
            if kind in _COUNT_AT and end - at >= _COUNT_AT[kind] + 4:
                file.seek(at + _COUNT_AT[kind])
                listed += int.from_bytes(file.read(4), "big")
        if listed > size:
            raise DatasetError(
                path,
                "index",
                f"lists {listed} frames in a file of {size} bytes; it is damaged, copy or encode "
                "it again.",
            )


def _boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of the content of every box that matters, outer boxes first."""
    left = [(0, size)]
    for _ in range(_MOST_BOXES):
        if not left:
            return
        at, end = left.pop()
        file.seek(at)
        header = file.read(16)
        if end - at < 8 or len(header) < 8:
            continue
        length, kind = struct.unpack(">I4s", header[:8])
        start = at + 8
        if length == 1 and len(header) == 16:
            length, start = int.from_bytes(header[8:], "big"), at + 16
        inner = end if length == 0 else min(end, at + length)
        if inner < start:
            continue
        left.append((inner, end))
        if kind in _CONTAINERS:
            left.append((start, inner))
        yield kind, start, inner
