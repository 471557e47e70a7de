"""Position of a run, apart from its training state: made for its checkpoints, and checked before a
run resumes from it.

Digests detect damage, not nonsense: a position that another program wrote and sealed could skip a
billion batches, or end a run hours later without any mention of the checkpoint.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.hosts import exits

Json = Any
LARGEST = 2**31
"""Upper limit of counters: steps, batches, episodes."""


class NoPosition(ValueError):
    """A checkpoint whose position was not written by a run."""

    exit_code = exits.REFUSED

    def __init__(self, path: Path, why: ValueError) -> None:
        super().__init__(
            f"{path}, position: {why}; copy the checkpoint again, or rename it so that --resume "
            f"continues from the one before."
        )


def at_data(data: Json, offset: int, bad_steps: Json, pending: bool = False) -> Json:
    """A training run's position: the position in the data, the number of batches by which the data
    is ahead of the steps, the record of `Spikes` and, as "owed", whether the evaluation of this
    step is `pending`, because a stop prevented it."""
    found = {"data": data, "offset": offset, "bad_steps": bad_steps}
    return found | {"owed": True} if pending else found


def check_at_data(found: Json) -> None:
    """Raises ValueError, with the field, unless `at_data` made it. The position in the data and the
    record of `Spikes` are checked by their readers."""
    for name in at_data(None, 0, None):
        entry(found, name)
    count(found, "offset")


def count(found: Json, name: str, most: int = LARGEST) -> int:
    """The number of something at `name`.

    Raises:
      ValueError: it is missing, not a whole number, negative or more than `most`.
    """
    value = entry(found, name)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {shown(value)}, expected a whole number from 0 to {most}")
    return value


def entry(found: Json, name: str) -> Json:
    """Value of an object at `name`.

    Raises:
      ValueError: it has no such entry, or is not an object.
    """
    if not isinstance(found, Mapping) or name not in found:
        raise ValueError(f"{name} is missing from {shown(found)}")
    return found[name]


def shown(value: Json) -> str:
    """A value as messages show it."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
