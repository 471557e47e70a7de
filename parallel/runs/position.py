"""Position of a run besides its state, as its checkpoints hold it: made, and checked before a run
goes on from it.

Digests tell damage, not sense: a position that a hand or another program wrote, and sealed, would
skip a billion batches, or end a run hours later without a word of the checkpoint.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.hosts import exits

Json = Any
LARGEST = 2**31
"""Limit of counters: steps, batches, episodes."""


class NoPosition(ValueError):
    """A checkpoint whose position no run left."""

    exit_code = exits.REFUSED

    def __init__(self, path: Path, why: ValueError) -> None:
        super().__init__(
            f"{path}, position: {why}; copy the checkpoint again, or rename it, and --resume goes "
            f"on from the one before."
        )


def at_data(data: Json, offset: int, bad_steps: Json, owed: bool = False) -> Json:
    """A training run's position: the data's own, how many batches it is ahead of the steps, the
    record of `Spikes`, and, where it is so, that a stop left the evaluation after it unmade."""
    found = {"data": data, "offset": offset, "bad_steps": bad_steps}
    return found | {"owed": True} if owed else found


def check_at_data(found: Json) -> None:
    """Raises ValueError, with the field, unless `at_data` made it; the data's own position and the
    record of `Spikes` are checked by those who read them."""
    for name in at_data(None, 0, None):
        entry(found, name)
    count(found, "offset")


def count(found: Json, name: str, most: int = LARGEST) -> int:
    """The number of something at `name`.

    Raises:
      ValueError: it is missing, no whole number, negative or more than `most`.
    """
    value = entry(found, name)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {shown(value)}, expected a whole number from 0 to {most}")
    return value


def entry(found: Json, name: str) -> Json:
    """Value of an object at `name`.

    Raises:
      ValueError: it has nothing there, or is no object.
    """
    if not isinstance(found, Mapping) or name not in found:
        raise ValueError(f"{name} is missing from {shown(found)}")
    return found[name]


def shown(value: Json) -> str:
    """A value as messages show it."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
