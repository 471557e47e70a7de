"""Keeps large files that are read repeatedly open; bucket files in a cache that may have a limit,
beyond which the least recently used are removed.

The limit, CHILIAD_CACHE_LIMIT, holds for all processes of the machine together: space is reserved
before a file is fetched. A file may be removed while another process has it open; that process can
still read it, and releases it at its next fetch. Without the variable, all files stay.
"""

import fcntl
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.files.folder import BucketFolder, Folder
from models.files.user_cache import user_cache

VARIABLE = "CHILIAD_CACHE_LIMIT"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_LOCK, _RESERVED = ".lock", ".reserved"
_MOST_OPEN = 512
_RECENT = 1_000_000_000
"""Nanoseconds within which a file's use is recorded only once."""


class OpenShards:
    """Files of folders, opened by `open`: the last few hundred of a process. For any number of
    threads."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Any, ...], tuple[Any, Path, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, folder: Folder, key: str, name: str, open: Callable[[Path], Any]) -> Any:
        """The file `name` of a folder, opened; `key` identifies the folder's content.

        Raises:
          ValueError: the file is larger than the cache's limit.
          MissingFileError, DatasetError: it is not there, or cannot be fetched.
        """
        at = (folder, key, name)
        limit = cache_limit() if isinstance(folder, BucketFolder) else None
        with self._lock:
            found = self._open.get(at)
            if found is not None:
                self._open.move_to_end(at)
        if found is not None and (limit is None or _use(found[1], found[2])):
            return found[0]
        if limit is not None:
            self._drop_gone()
        with at_hand(folder, name) as path:
            if limit is not None:
                self._drop_gone()
            opened = open(path)
            with self._lock:
                self._open[at] = opened, path, path.stat().st_ino
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
        return opened

    def clear(self) -> None:
        """Closes all files."""
        with self._lock:
            self._open.clear()

    def _drop_gone(self) -> None:
        """Releases files that another process, or this one, has removed."""
        with self._lock:
            for at, (_, path, _) in list(self._open.items()):
                if not path.exists():
                    del self._open[at]


@contextmanager
def at_hand(folder: Folder, name: str) -> Iterator[Path]:
    """A file for the duration of a block. A bucket's file is fetched into the limited cache, if
    there is a limit."""
    limit = cache_limit() if isinstance(folder, BucketFolder) else None
    if limit is None or not isinstance(folder, BucketFolder):
        yield folder.local(name)
        return
    place = replace(folder, cache=user_cache("shards"))
    while True:
        path = place.fetch(name, lambda size: _reserved(place, name, size, limit))
        with _locked(place.cache, fcntl.LOCK_SH):
            if _use(path, None):
                yield path
                return


def cache_limit() -> int | None:
    """Bytes that shards of buckets may take, from CHILIAD_CACHE_LIMIT, such as 200GB; None if
    unset.

    Raises:
      ValueError: the variable is not a size.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", said.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{VARIABLE} is '{said}'; give a size such as 500MB or 200GB.")
    return int(float(match[1]) * _UNITS[match[2]])


def require_room(folder: Folder, name: str, size: int) -> None:
    """Raises ValueError if a file of a bucket is larger than the cache's limit."""
    limit = cache_limit()
    if limit is not None and isinstance(folder, BucketFolder) and size > limit:
        raise ValueError(
            f"{folder.path(name)}: has {size} bytes, more than the {limit} that {VARIABLE} allows "
            "the cache; raise it."
        )


@contextmanager
def _reserved(folder: BucketFolder, name: str, size: int, limit: int) -> Iterator[None]:
    """Space for a file in the cache, reserved while it is fetched."""
    require_room(folder, name, size)
    claim = folder.cache / f"{os.getpid()}-{threading.get_ident()}-{time.time_ns()}{_RESERVED}"
    with _locked(folder.cache, fcntl.LOCK_EX):
        _make_room(folder.cache, limit - size)
        held = claim.open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
        held.truncate(size)  # allocates no blocks; only its size counts
    try:
        yield
    finally:  # not while another process counts: it may have missed the new file
        with _locked(folder.cache, fcntl.LOCK_EX):
            claim.unlink(missing_ok=True)
        held.close()


def _make_room(cache: Path, most: int) -> None:
    """Removes the least recently used files until all take no more than `most` bytes, or only those
    that are being fetched are left."""
    kept: list[tuple[int, int, Path]] = []
    total = 0
    for path in cache.rglob("*"):
        with suppress(FileNotFoundError):
            about = path.stat()
            if path.suffix == _RESERVED:
                if _is_abandoned(path):
                    path.unlink()
                else:
                    total += about.st_size
            elif path.suffix == ".partial":
                if time.time() - about.st_mtime > 3600:
                    path.unlink()
            elif path.is_file() and not path.name.endswith(_LOCK):
                kept.append((about.st_atime_ns, about.st_size, path))
                total += about.st_size
    for _, size, path in sorted(kept):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size


def _is_abandoned(claim: Path) -> bool:
    """True if the process that reserved room has ended."""
    with claim.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _use(path: Path, number: int | None) -> bool:
    """Records that a file is used now; False if it is gone, or no longer has this inode number."""
    try:
        about = path.stat()
        if number is not None and about.st_ino != number:
            return False
        now = time.time_ns()
        if now - about.st_atime_ns > _RECENT:
            os.utime(path, ns=(now, about.st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _locked(cache: Path, how: int) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / _LOCK).open("w") as lock:
        fcntl.flock(lock, how)
        yield
