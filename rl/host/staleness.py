"""Admission of episodes: bounds how far acting runs ahead of learning.

AReaL (arXiv 2505.24298) admits by capacity, and its staleness is a mean; here the bound is hard. A
ticket, whose number determines its step, may begin only if its step's learner will be at most
`staleness` updates ahead of the policies that act in it, so nothing is discarded.
"""

import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

from sim.protocol import Start

Share = tuple[int, int]
"""The tickets of one host of several, (index, count): those whose number is index modulo count."""
ALL: Share = (0, 1)


class GroupMember(NamedTuple):
    """An episode to act: member `member` of the group that is ticket `ticket`."""

    ticket: int
    member: int
    start: Start


def numbers_of(step: int, tickets: int, share: Share = ALL) -> list[int]:
    """Numbers of the tickets of a learner's step that a host acts, in order."""
    index, count = share
    first = step * tickets
    return [number for number in range(first, first + tickets) if number % count == index]


class StalenessControl:
    """Hands out episodes in the order of their tickets, each once; callable from any thread. A
    ticket that is drawn again comes first, as its step waits for it.

    Ticket i may begin once the policy has had ⌊i / tickets⌋ - staleness updates, and ends before
    its step's update, so no more than (staleness + 1)·tickets are ever under way.

    Args:
      starts: (ticket, attempt) -> the start of its group; attempts after the first are those of
        `redraw`. The same for the same numbers.
      tickets: number of tickets in a learner's step.
      group: number of episodes in a ticket.
      steps: number of steps of the whole run; no ticket of a later step is handed out.
      version: number of updates that the policy has had; the first tickets are those of that step.
      share: the tickets that are handed out.
      redraws: tickets may be drawn again, so there may be more episodes until the last update.
      clock: returns seconds that never decrease.

    Attributes:
      version: number of updates of the policy that actors have, or can have at once.
    """

    def __init__(
        self,
        starts: Callable[[int, int], Start],
        *,
        tickets: int,
        group: int = 1,
        staleness: int,
        steps: int,
        version: int = 0,
        waited: float = 0.0,
        share: Share = ALL,
        redraws: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if tickets < 1 or group < 1 or staleness < 0:
            raise ValueError(
                f"tickets = {tickets}, group = {group} and staleness = {staleness}: expected at "
                "least one ticket a step, one episode a ticket and a staleness of 0 or more."
            )
        self._starts, self._tickets, self._group = starts, tickets, group
        self._staleness, self._steps, self._clock = staleness, steps, clock
        self._share, self._redraws = share, redraws
        self._changed = threading.Lock()  # guards all that follows
        self.version = version
        self._admitted = version
        self._open: list[GroupMember] = []
        self._since: dict[Hashable, float] = {}
        self._waited = waited
        self._error: BaseException | None = None

    def take(self, who: Hashable, tasks: Collection[str] | None = None) -> GroupMember | None:
        """The next episode that may begin, of these tasks if any are named; None if there is none
        now. `who` asks again after `advance`, and its time until then counts as waiting.

        Raises:
          BaseException: the error that it was closed with.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            now = self._clock()
            self._waited += now - self._since.pop(who, now)
            self._admit()
            for i, place in enumerate(self._open):
                if tasks is None or place.start.task in tasks:
                    return self._open.pop(i)
            if not self._ended:
                self._since[who] = now
            return None

    def advance(self, version: int) -> None:
        """Announces that actors have this version from now on, or can have it at once.

        Raises:
          ValueError: it is not newer.
        """
        with self._changed:
            if version <= self.version:
                raise ValueError(f"Version {version} is not newer than version {self.version}.")
            self.version = version

    def redraw(self, ticket: int, attempt: int) -> None:
        """Lets the episodes of a ticket begin again, from the start of this attempt."""
        with self._changed:
            self._open = self._group_of(ticket, attempt) + self._open

    def oldest(self, ticket: int) -> int:
        """Version of the oldest policy that may act in a ticket."""
        return max(ticket // self._tickets - self._staleness, 0)

    @property
    def ended(self) -> bool:
        """True if there will be no more episodes: a refusal from now on is final."""
        with self._changed:
            return self._ended

    @property
    def waited(self) -> float:
        """Seconds that callers have been kept waiting, in total."""
        with self._changed:
            now = self._clock()
            return self._waited + sum(now - since for since in self._since.values())

    def close(self, error: BaseException) -> None:
        """Hands out nothing more: callers get the error of the first `close`."""
        with self._changed:
            self._error = self._error or error

    def state(self) -> dict[str, Any]:
        """Keyword arguments for another `StalenessControl` that continues; episodes of tickets that
        were not learnt from begin again."""
        return {"version": self.version, "waited": self.waited}

    @property
    def _ended(self) -> bool:
        return self.version + (0 if self._redraws else self._staleness + 1) >= self._steps

    def _admit(self) -> None:
        steps = min(self.version + self._staleness + 1, self._steps)
        for step in range(self._admitted, steps):
            for number in numbers_of(step, self._tickets, self._share):
                self._open += self._group_of(number, 0)
        self._admitted = max(self._admitted, steps)

    def _group_of(self, ticket: int, attempt: int) -> list[GroupMember]:
        start = self._starts(ticket, attempt)
        return [GroupMember(ticket, i, start) for i in range(self._group)]
