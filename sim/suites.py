"""Benchmark suites by name: their tasks, and how to open slots in which to act them.

A user's own suite is a `Suite` in a file of theirs (`--suite path/to/file.py:NAME`) or an entry
point of the group "chiliad.suites" in a package of theirs, as presets are.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sim.protocol import Slots


@dataclass(frozen=True)
class Suite:
    """`open(tasks, count, size)` makes so many slots for some of its tasks, whose observed pictures
    have `size` pixels an edge. Tasks that cannot share slots (`together` is false) are opened one
    at a time."""

    name: str
    tasks: tuple[str, ...]
    episodes: int
    """Starts a task, as the suite's authors count them: seeds 0 … episodes - 1 of `first_seed`."""
    open: Callable[[tuple[str, ...], int, int], Slots]
    first_seed: int = 0
    together: bool = True
