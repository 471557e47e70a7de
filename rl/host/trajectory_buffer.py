"""Trajectories on their way to the learner: trajectories become tickets, and tickets become steps.

The numbers of a step's tickets are known before any acting, so groups complete by id (RL-VLA3's
streaming GRPO groups by order of arrival instead), and nothing is dropped at a step's end. Every
episode is accounted for.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rl.host.staleness import ALL, GroupMember, Share, numbers_of
from rl.records import Ticket, Trajectory


@dataclass
class Counts:
    """Counts of episodes so far. Each episode that began has finished, was dropped or is still
    acting; each that finished was learnt from, was redrawn or is held for its step."""

    begun: int = 0
    finished: int = 0
    learnt: int = 0
    dropped: int = 0
    """Given up when a run stopped, finished or not; they restart when it resumes."""
    reruns: int = 0
    """Restarts of episodes because their simulator failed."""
    redrawn: int = 0
    """Not learnt from, as all of their group succeeded or all failed; another group followed."""


class TrajectoryBuffer:
    """Gathers finished trajectories, from any thread, for the thread that learns.

    Holds no more than `StalenessControl` lets begin.

    Args:
      tickets: number of tickets in a learner's step.
      group: number of episodes in a ticket.
      counts: those of the run that this one continues. Episodes that it had begun and not learnt
        from are dropped.
      share: the tickets that come to this host.
      redraws: how often a ticket is drawn again, at most, while its group has no signal.
      redraw: called with a ticket and the number of this draw, 1 the first.
    """

    def __init__(
        self,
        tickets: int,
        group: int = 1,
        counts: Counts | None = None,
        share: Share = ALL,
        *,
        redraws: int = 0,
        redraw: Callable[[int, int], None] = lambda ticket, attempt: None,
    ) -> None:
        self._tickets, self._group, self._share = tickets, group, share
        self._redraws, self._redraw = redraws, redraw
        self._changed = threading.Condition()  # guards all that follows
        self._counts = Counts(**asdict(counts)) if counts else Counts()
        self._counts.finished = self._counts.learnt + self._counts.redrawn
        self._counts.dropped = self._counts.begun - self._counts.finished
        self._acting: set[tuple[int, int]] = set()
        self._held: dict[int, dict[int, Trajectory]] = {}
        self._attempts: dict[int, int] = {}
        self._learnt: set[int] = set()
        self._past = 0
        self._error: BaseException | None = None

    def begin(self, place: GroupMember) -> None:
        """An episode has begun.

        Raises:
          RuntimeError: it had begun before.
        """
        with self._changed:
            if place[:2] in self._acting or self._known(place):
                raise RuntimeError(f"Member {place.member} of ticket {place.ticket} began twice.")
            self._acting.add(place[:2])
            self._counts.begun += 1

    def rerun(self, place: GroupMember) -> None:
        """Its simulator failed, and it begins again."""
        with self._changed:
            self._counts.reruns += 1

    def drop(self, place: GroupMember) -> None:
        """An episode is given up, as the run stops."""
        with self._changed:
            self._acting.remove(place[:2])
            self._counts.dropped += 1

    def finish(self, place: GroupMember, trajectory: Trajectory) -> None:
        """An episode has ended.

        Raises:
          RuntimeError: it had not begun, or had ended before.
        """
        with self._changed:
            if place[:2] not in self._acting:
                raise RuntimeError(
                    f"Member {place.member} of ticket {place.ticket} ended, but was not running."
                )
            self._acting.remove(place[:2])
            self._held.setdefault(place.ticket, {})[place.member] = trajectory
            self._counts.finished += 1
            attempt = self._again(place.ticket)
            self._changed.notify_all()
        if attempt:
            self._redraw(place.ticket, attempt)

    def step(self, number: int) -> Iterator[Ticket]:
        """Yields the tickets of a learner's step, each once, as they complete; the caller learns
        from all of them. Waits for the next ticket.

        Raises:
          RuntimeError: an episode was lost or counted twice, or the step was learnt from before.
          BaseException: the error that it was closed with.
        """
        mine = numbers_of(number, self._tickets, self._share)
        missing = set(mine)
        with self._changed:
            if number < self._past or self._learnt & missing:
                raise RuntimeError(f"Step {number} was already learnt from.")
            before = self._counts.learnt
        while missing:
            yield self._next(missing)
        with self._changed:
            self._past = number + 1
            self._learnt -= set(mine)
            learnt = self._counts.learnt - before
        if learnt != len(mine) * self._group:
            raise RuntimeError(
                f"Step {number} has {len(mine)} tickets of {self._group} episodes, but "
                f"{learnt} were learnt from."
            )
        self.check()

    def check(self, at_rest: bool = False) -> None:
        """Checks that every episode is accounted for; `at_rest`: nothing acts any more.

        Raises:
          RuntimeError: one is not.
        """
        with self._changed:
            counts, acting = self._counts, len(self._acting)
            held = sum(map(len, self._held.values()))
            lost = counts.begun != counts.finished + counts.dropped + acting
            known = counts.learnt + counts.redrawn + held
            if lost or counts.finished != known or (at_rest and acting):
                raise RuntimeError(
                    f"Episodes were lost or counted twice: of {counts.begun} begun, "
                    f"{counts.finished} finished, {counts.dropped} were dropped and {acting} are "
                    f"still running; {counts.learnt} were learnt from, {counts.redrawn} redrawn, "
                    f"and {held} are waiting."
                )

    def counts(self) -> Counts:
        """A snapshot."""
        with self._changed:
            return Counts(**asdict(self._counts))

    def close(self, error: BaseException) -> None:
        """Announces that nothing more will come: waiting callers get the error of the first
        `close`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _next(self, missing: set[int]) -> Ticket:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                whole = [i for i in missing if len(self._held.get(i, ())) == self._group]
                if whole:
                    break
                self._changed.wait()
            number = min(whole)
            missing.remove(number)
            members = self._held.pop(number)
            self._learnt.add(number)
            self._counts.learnt += len(members)
            ordered = tuple(members[i] for i in range(self._group))
            return Ticket(number, ordered, self._attempts.pop(number, 0))

    def _again(self, number: int) -> int:
        """Gives a ticket up that is to be drawn again; returns the number of that draw, or 0."""
        members, attempt = self._held[number], self._attempts.get(number, 0) + 1
        if attempt > self._redraws or len(members) < self._group:
            return 0
        if Ticket(number, tuple(members.values())).signal:
            return 0
        self._counts.redrawn += len(self._held.pop(number))
        self._attempts[number] = attempt
        return attempt

    def _known(self, place: GroupMember) -> bool:
        held = self._held.get(place.ticket, {})
        past = place.ticket < self._past * self._tickets
        return place.member in held or place.ticket in self._learnt or past
