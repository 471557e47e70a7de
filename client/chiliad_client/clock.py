"""Ticks of a control loop: equal periods of a clock that never goes back, numbered from its start,
so that lateness is detected and no tick is handed out twice.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

_ROUNDING = 1e-6
"""Fraction of a tick by which rounding of the clock may make a tick begin early."""


class TickClock(Protocol):
    """Source of time, in seconds; tests use their own."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never decreases."""

    def sleep(self, seconds: float) -> None:
        """Returns after about this many seconds."""


class MonotonicClock:
    """The machine's monotonic clock, which time servers and daylight saving do not change."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Returns after about this many seconds."""
        time.sleep(seconds)


class Pace:
    """Ticks 0, 1, … of 1 / `hz` seconds from now on, each taken at most once. `last` is the tick
    taken last; `missed` counts the ticks that were over before they were taken."""

    def __init__(self, hz: float, clock: TickClock) -> None:
        self._clock, self._hz, self._start = clock, hz, clock.now()
        self.last, self.missed = -1, 0

    def wait(self) -> int:
        """Waits for the beginning of the tick after the last one taken; returns that tick, or a
        later one if it is over."""
        due = self._start + (self.last + 1) / self._hz
        while (left := due - self._clock.now()) > 0:
            self._clock.sleep(left)
        return self._running()

    def take(self) -> int:
        """Takes the current tick; no later call returns it again."""
        tick = self._running()
        self.missed += tick - self.last - 1
        self.last = tick
        return tick

    def _running(self) -> int:
        passed = math.floor((self._clock.now() - self._start) * self._hz + _ROUNDING)
        return max(passed, self.last + 1)
