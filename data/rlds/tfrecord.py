"""TFRecord files without TensorFlow: locations of their records, and records checked against their
checksums.

A record is its length (uint64), a masked CRC-32C of that, the bytes and a masked CRC-32C of those,
all little-endian (tensorflow/core/lib/io/record_writer.h).
"""

import struct
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from data.errors import DatasetError, MissingFileError


class RecordSpan(NamedTuple):
    """Location of a record's bytes in its file, and their masked CRC-32C as stored."""

    offset: int
    size: int
    checksum: int


def record_spans(path: Path) -> list[RecordSpan]:
    """All records of a file, found by hopping from length to length; their bytes are not read.

    Raises:
      MissingFileError: there is no such file.
      DatasetError: a length is damaged, or the file ends within a record; names the record.
    """
    if not path.is_file():
        raise MissingFileError(path, "file", "is missing; download the dataset again.")
    spans: list[RecordSpan] = []
    with path.open("rb", buffering=0) as file:
        end, total = 0, path.stat().st_size
        while end < total:
            file.seek(end)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise _cut(path, len(spans))
            size, checksum = _HEADER.unpack(header)
            if checksum != masked_crc(header[:8]):
                raise _damaged(path, len(spans), "length")
            offset = end + _HEADER.size
            end = offset + size + _CHECKSUM.size
            if end > total:
                raise _cut(path, len(spans))
            file.seek(offset + size)
            spans.append(RecordSpan(offset, size, *_CHECKSUM.unpack(file.read(_CHECKSUM.size))))
    return spans


def read_record(path: Path, number: int, span: RecordSpan) -> bytes:
    """The bytes of record `number`, which lies at `span`.

    Raises:
      DatasetError: they do not have the checksum that was written with them.
    """
    with path.open("rb") as file:
        file.seek(span.offset)
        data = file.read(span.size)
    if masked_crc(data) != span.checksum:
        raise _damaged(path, number, "content")
    return data


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset so that it is safe for data that contains checksums itself."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


def _damaged(path: Path, number: int, what: str) -> DatasetError:
    return DatasetError(
        path,
        f"record {number}",
        f"its {what} does not have the checksum written with it; the file is damaged, download it "
        "again.",
    )


def _cut(path: Path, number: int) -> DatasetError:
    return DatasetError(
        path, f"record {number}", "is cut off by the end of the file; download it again."
    )
