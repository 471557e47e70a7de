"""One of several variants of a benchmark: if a kernel does not compile or a batch does not fit, the
error is its result, and the other variants are still measured."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from models.files.terminal import Console

FULL = "RESOURCE_EXHAUSTED"
"""Word in the error of a program that does not fit its device's memory."""
_LONGEST = 600
"""Characters of an error that are kept; XLA's errors list every buffer."""


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measured figures, or `error`, the text of the exception."""
    try:
        return measure()
    except Exception as error:  # whatever a compiler or driver raises
        return failed(error)


def failed(error: Exception) -> dict[str, Any]:
    """The result of a variant that raised `error`."""
    return {"error": f"{type(error).__name__}: {error}"[:_LONGEST]}


def tell(console: Console, found: Mapping[str, Any]) -> None:
    """Prints what is measured so far as a line of JSON if stdout is for JSON (`--json`). If a
    benchmark is stopped, `tools.bench.process` reads its last such line."""
    if console.stderr:
        print(json.dumps(found), flush=True)
