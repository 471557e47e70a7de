"""Signals to stop: SIGTERM (from a cluster that takes its machine back) and Ctrl-C.

A signal is only noted; the loop acts on it where all hosts can act alike. These handlers replace
that of jax's preemption notifier, which would swallow SIGTERM; they are installed after it.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

UNLOGGED = 1000
"""The `number` of a run that stops because its logs cannot be written; no signal has this
number."""


class StopSignals:
    """Context manager that stores the number of a SIGTERM or Ctrl-C; a second Ctrl-C interrupts."""

    number: int = 0

    def __enter__(self) -> "StopSignals":
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """True if this process was told to stop."""
        return self.number != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number not in (0, UNLOGGED) and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        _say(b"\nSaving what was learnt and stopping; Ctrl-C aborts instead.\n")


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Context manager (in the main thread) in which SIGTERM ends the program with exit code 0; for
    the time before and after training, when there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> None:
        _say(b"\nStopped by SIGTERM; there was nothing to save.\n")
        sys.exit(0)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(what: bytes) -> None:
    """Writes to stderr if it still has a reader: Ctrl-C also ends the `tee` behind a pipe."""
    with suppress(OSError):
        os.write(2, what)
