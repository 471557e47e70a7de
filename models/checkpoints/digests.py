"""Digests that tell a damaged checkpoint from a sound one before any of its arrays is read.

Array files carry no checksums of their own: of 60 flipped bits in Orbax's files, none was noticed.
`digests.json` lists every file with its size and CRC-32C with zlib's CRC-32, which together are one
64-bit CRC: it detects every flipped bit, every burst of up to 64 bits, and all but one case in 2^64
of other damage, at 2.6 GB/s on one core (SHA-256: 0.4 to 1.5); forgery is not a concern here.
"""

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from models.checkpoints.declared import check_regular
from models.files.on_disk import to_disk
from models.files.whole_text import read_whole

NAME = "digests.json"
Digests = dict[str, tuple[int, str]]
"""Size in bytes and digest (16 hexadecimal digits) of every file, by its path in the folder."""

_PIECE_BYTES = 4 * 2**20
_KEPT_BY_NFS = re.compile(r"\.nfs[0-9a-f]+")
"""Names that NFS gives removed files for as long as a process still reads them."""
_THREADS = min(8, os.cpu_count() or 1)


def names(folder: Path) -> list[str]:
    """All files under a folder except its digests, by their paths in it, without removed files that
    NFS keeps for their readers."""
    found = (path for path in folder.rglob("*") if not path.is_dir())
    there = (path for path in found if not _KEPT_BY_NFS.fullmatch(path.name))
    return sorted({path.relative_to(folder).as_posix() for path in there} - {NAME})


def digest_files(folder: Path, files: Iterable[str]) -> Digests:
    """Sizes and digests of what the files hold; on return, the files are on disk, not only in
    memory.

    Raises:
      OSError: a file cannot be read or written to the disk.
      ValueError: one is no regular file.
    """

    def one(name: str) -> tuple[int, str]:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            return _digest(file)

    files = list(files)
    for name in files:
        check_regular(folder / name)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(files, pool.map(one, files), strict=True))


def share(sizes: Mapping[str, int], index: int, count: int) -> list[str]:
    """The files that reader `index` of `count` reads, of about as many bytes as the others'."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[index::count]


def write_digests(folder: Path, digests: Digests) -> None:
    """Writes `digests.json`; it and every directory under the folder are on disk on return."""
    with (folder / NAME).open("wb") as file:
        file.write(_encode(digests))
        file.flush()
        os.fsync(file.fileno())
    for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        to_disk(directory)


def is_sealed(folder: Path) -> bool:
    """True if a checkpoint lists the digests of its files."""
    return (folder / NAME).is_file()


def damage(folder: Path, *, skip: str | None = None, index: int = 0, count: int = 1) -> list[str]:
    """Damage of a checkpoint, one sentence for each file; empty if it holds what was saved.

    Args:
      skip: prefix of the paths of files that are checked by size only ("": all files).
      index, count: which of several readers this is. Each reads its share of the files; everything
        else is checked by all.

    Raises:
      FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; it may have been removed meanwhile.")
    if not is_sealed(folder):
        return [f"{folder / NAME} is missing."]
    saved = _decode(read_whole(folder / NAME))
    if saved is None:
        return [f"{folder / NAME} is damaged: it does not match its own digest."]
    there = set(names(folder))
    mine = share({name: size for name, (size, _) in saved.items()}, index, count)
    read = {name for name in mine if skip is None or not name.startswith(skip)}

    def measured(file: Path, name: str) -> tuple[int, str]:
        expected_size, expected = saved[name]
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if status.st_size != expected_size or name not in read:
            return status.st_size, expected
        with file.open("rb") as opened:
            return _digest(opened)

    def compare(name: str) -> str | None:
        expected_size, expected = saved[name]
        file = folder / name
        try:
            size, found = _read_again_if_stale(lambda: measured(file, name))
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}."
        if size != expected_size:
            return f"{file} has {size} bytes, but was saved with {expected_size}."
        if found != expected:
            return f"{file} has digest {found}, but was saved with {expected}."
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        changed = [
            sentence for sentence in pool.map(compare, sorted(there & set(saved))) if sentence
        ]
    missing = [f"{folder / name} is missing." for name in sorted(set(saved) - there)]
    new = [
        f"{folder / name} was not saved with the checkpoint." for name in sorted(there - set(saved))
    ]
    return missing + new + changed


def _read_again_if_stale(read: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Reads again after ESTALE, which NFS returns for a file that was open, or known, before its
    server changed it; the second read finds what is there now."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return read()


def _digest(file: BinaryIO) -> tuple[int, str]:
    size = first = second = 0
    while piece := file.read(_PIECE_BYTES):
        size += len(piece)
        first, second = google_crc32c.extend(first, piece), zlib.crc32(piece, second)
    return size, f"{first:08x}{second:08x}"


def _encode(digests: Digests) -> bytes:
    """Canonical text of the digests, so that any changed byte shows."""
    files = {name: list(digests[name]) for name in sorted(digests)}
    own = _digest(BytesIO(json.dumps(files).encode()))[1]
    text = {"digest": "crc32c, crc32", "files": files, "digest of files": own}
    return (json.dumps(text, indent=1) + "\n").encode()


def _decode(text: bytes) -> Digests | None:
    """The digests, None unless `text` is what `_encode` makes of them."""
    try:
        files = json.loads(text)["files"]
        digests = {name: (size, value) for name, (size, value) in files.items()}
        return digests if _encode(digests) == text else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
