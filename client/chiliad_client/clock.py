"""Ticks of a control loop: equal periods of a clock that never goes back, numbered from its start,
so that what comes late is known to be late and no tick is ever given twice.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

_ROUNDING = 1e-6
"""Part of a tick that rounding of the clock may make it begin early."""


class TickClock(Protocol):
    """Source of time, in seconds; tests have one of their own."""

    def now(self) -> float:
        """Seconds since some moment; never fewer than before."""

    def sleep(self, seconds: float) -> None:
        """Returns after about so long."""


class MonotonicClock:
    """The machine's monotonic clock: no time server or daylight saving moves it."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Returns after about so long."""
        time.sleep(seconds)


class Pace:
    """Ticks 0, 1, … of 1 / `hz` seconds from now on, each of which is taken at most once. `last` is
    the one that was taken last, `missed` counts those that nobody took before they were over."""

    def __init__(self, hz: float, clock: TickClock) -> None:
        self._clock, self._hz, self._start = clock, hz, clock.now()
        self.last, self.missed = -1, 0

    def wait(self) -> int:
        """The tick after the last that was taken, at its beginning; a later one if that is over."""
        due = self._start + (self.last + 1) / self._hz
        while (left := due - self._clock.now()) > 0:
            self._clock.sleep(left)
        return self._running()

    def take(self) -> int:
        """The tick under way, which nobody takes again."""
        tick = self._running()
        self.missed += tick - self.last - 1
        self.last = tick
        return tick

    def _running(self) -> int:
        passed = math.floor((self._clock.now() - self._start) * self._hz + _ROUNDING)
        return max(passed, self.last + 1)
