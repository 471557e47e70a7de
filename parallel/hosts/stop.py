"""Signals to stop: SIGTERM (from a cluster that takes its machine back) and Ctrl-C.

A signal is only noted; the loop acts on it where all hosts can act alike. These handlers replace
that of jax's preemption notifier, which would swallow SIGTERM; they are installed after it.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from parallel.hosts import exits

UNLOGGED = 1000
"""The `number` of a run that stops because its logs cannot be written; no signal has this
number."""


class Stopped(Exception):
    """A run was told to stop."""


class StopSignals:
    """Context manager that stores the number of a SIGTERM or Ctrl-C; a second Ctrl-C interrupts."""

    number: int = 0

    def __enter__(self) -> "StopSignals":
        self._stack = ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._stack.enter_context(handled(self._note, signal.SIGTERM, signal.SIGINT))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

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
    """Context manager (in the main thread) in which SIGTERM ends the program with
    `exits.UNFINISHED`; for the time before and after training, when there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> None:
        _say(b"\nStopped by SIGTERM; there was nothing to save.\n")
        sys.exit(exits.UNFINISHED)

    with handled(leave, signal.SIGTERM):
        yield


@contextmanager
def terminable() -> Iterator[None]:
    """Context manager in which the first SIGTERM raises `exits.Terminated`, and work ends as by
    Ctrl-C. Does nothing outside of the main thread."""
    told: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if len(told) == 1:
            raise exits.Terminated

    if threading.current_thread() is threading.main_thread():
        with handled(terminate, signal.SIGTERM):
            yield
    else:
        yield


@contextmanager
def handled(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Context manager (in the main thread) in which `handler` gets these signals."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _say(what: bytes) -> None:
    """Writes to stderr if it still has a reader: Ctrl-C also ends the `tee` behind a pipe."""
    with suppress(OSError):
        os.write(2, what)
