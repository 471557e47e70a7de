"""One of several variants of a benchmark: a kernel that does not compile or a batch that does not
fit says why, and the others are measured."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from models.terminal import Console

FULL = "RESOURCE_EXHAUSTED"
"""Word in the error of a program that does not fit its device's memory."""
_LONGEST = 600
"""Characters of an error that are kept: XLA's list every buffer."""


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measured figures, or `error`, the text of what it raised."""
    try:
        return measure()
    except Exception as error:  # whatever a compiler or driver raises
        return failed(error)


def failed(error: Exception) -> dict[str, Any]:
    """The result of a variant that raised this."""
    return {"error": f"{type(error).__name__}: {error}"[:_LONGEST]}


def tell(console: Console, found: Mapping[str, Any]) -> None:
    """Prints what is measured so far as a line of JSON where stdout is for that (`--json`): of a
    benchmark that is stopped `tools.bench.process` reads the last."""
    if console.stderr:
        print(json.dumps(found), flush=True)
