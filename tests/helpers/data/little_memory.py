"""A process that may take only so much memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOM = 1 << 30


@contextmanager
def little_memory() -> Iterator[None]:
    """No more than a gigabyte beyond what this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
