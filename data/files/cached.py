"""Results cached on disk for later starts, each with its checksum, so that a damaged file is an
error that names it, and never another result. JSON stays readable: the value is under "content"."""

import fcntl
import hashlib
import json
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from jaxtyping import UInt8

from data.errors import DatasetError
from models.files.whole_text import replacing

_CRC_BYTES = 4


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON value, whole or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(_encoded(value))


def read_json(path: Path) -> Any:
    """Reads the value that `write_json` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      DatasetError: the file is damaged.
    """
    content = path.read_bytes()
    try:
        value = json.loads(content)["content"]
        if _encoded(value) == content:
            return value
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise _damaged(path)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes the bytes and their CRC-32C, whole or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.write(google_crc32c.value(content).to_bytes(_CRC_BYTES, "little"))


def read_bytes(path: Path) -> UInt8[np.ndarray, " n"]:
    """Maps what `write_bytes` wrote into memory.

    Raises:
      FileNotFoundError: there is no such file.
      DatasetError: the file is damaged.
    """
    with path.open("rb") as file:
        if path.stat().st_size <= _CRC_BYTES:
            raise _damaged(path)
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    content, crc = whole[:-_CRC_BYTES], whole[-_CRC_BYTES:]
    if google_crc32c.value(content) != int.from_bytes(crc.tobytes(), "little"):
        raise _damaged(path)
    return content


def make_folder(folder: Path, make: Callable[[Path], object]) -> None:
    """Makes a folder, whole or not at all, if there is none. Processes that need it at the same
    time wait for the one that makes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
                make(Path(scratch) / "made")
                (Path(scratch) / "made").rename(folder)


def _encoded(value: Any) -> bytes:
    text = json.dumps(value)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "content": {text}}}\n'.encode()


def _damaged(path: Path) -> DatasetError:
    return DatasetError(
        path,
        "checksum",
        "does not hold the bytes it was written with; delete the file, and it is made again.",
    )
