"""The clock of all benchmarks: seconds of a block, by the clock and of all of this process's cores.
A test ends each benchmark after the second of such blocks, to see that it starts as published."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Took:
    """Seconds by the clock and of all cores together, unknown until a block has ended."""

    wall: float = math.nan
    cpu: float = math.nan


@contextmanager
def timed() -> Iterator[Took]:
    """Times the block."""
    took, wall, cpu = Took(), time.perf_counter(), time.process_time()
    yield took
    took.wall, took.cpu = time.perf_counter() - wall, time.process_time() - cpu
