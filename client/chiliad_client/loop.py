"""The control loop: at every tick of a fixed rate it observes, takes in the server's answers, sends
the robot exactly one command within its limits, and requests the next chunk in time. It never waits
for the server: while there is no action for a tick it holds the robot, and after a longer silence
it stops the robot if the user gives a `stop` function.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from .chunks import ActionPlan, Chunk, Delays, chunk_fault, continuation
from .clock import MonotonicClock, Pace, TickClock
from .compatibility import check_actions, check_inputs, continues
from .connection import ServerAnswer, ServerSession
from .contract import (
    Command,
    DriveReport,
    LoopSettings,
    Mode,
    RealRobot,
    ServerLink,
    TickRecorder,
)
from .limits import SafetyLimits

log = logging.getLogger("chiliad_client")

Stop = Callable[[Mapping[str, Any], np.ndarray], Any]
_RETRY_SECONDS = 1.0
"""Pause after a refused request."""


class _Asked(NamedTuple):
    """A request in flight. `idle`: ticks so far for which the plan had no action."""

    number: int
    tick: int
    committed: int
    idle: int


@dataclass(eq=False)
class ControlLoop:
    """Drives a robot with a server's answers.

    Args:
      stop: command [a] of each tick after a silence of `stop_after`, given the observation and the
        last command; if None, the robot is held throughout the silence.
      clock: source of time.

    Raises:
      ValueError: only in `run` and `step`, if robot and server do not agree.
    """

    robot: RealRobot
    server: ServerLink
    prompt: str
    settings: LoopSettings
    limits: SafetyLimits = field(default_factory=SafetyLimits)
    stop: Stop | None = None
    recorder: TickRecorder | None = None
    clock: TickClock = field(default_factory=MonotonicClock)

    def __post_init__(self) -> None:
        self._delays = Delays()
        self._totals: Counter[str] = Counter()
        self._limited: Counter[str] = Counter()
        self._measured: list[int] = []
        self._missed, self._pace = 0, Pace(self.settings.hz, self.clock)
        self._begin()

    def _begin(self) -> None:
        """Forgets the previous episode, and everything about its server session."""
        self._missed += self._pace.missed
        self._pace = Pace(self.settings.hz, self.clock)
        self._plan = ActionPlan()
        self._seen: Mapping[str, Any] = {}
        self._last: np.ndarray | None = None
        self._session: ServerSession | None = None
        self._asked: _Asked | None = None
        self._newest: Chunk | None = None
        self._continued: Chunk | None = None
        self._continues = self._answered = False
        self._idle, self._idling, self._retry = 0, True, 0
        self._acted: int | None = None
        self._halted = -1
        self._stopped = self._ended = False
        self._told: str | None = None

    def run(
        self,
        seconds: float | None = None,
        until: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> DriveReport:
        """Drives an episode until so many seconds have passed, `until` returns True for an
        observation, or `end` is called. Its last command holds the robot, whatever ended it.

        Raises:
          ValueError: robot and server do not agree, or the robot is outside its limits.
          Exception: any error that the robot raises.
        """
        self._begin()
        ticks = math.inf if seconds is None else math.ceil(seconds * self.settings.hz)
        try:
            while not self._ended and (tick := self._pace.wait()) < ticks:
                self._step(tick)
                if until is not None and until(self._seen):
                    break
            self._step(self._pace.wait(), ending=True)
        except BaseException:
            try:
                self._hold_at_once()
            except Exception:
                log.exception("no command to hold the robot could be sent")
            raise
        finally:
            if self.recorder is not None:
                self.recorder.end()
        return self.report

    def step(self) -> Command:
        """Waits for the next tick and sends its command; an alternative to `run` that the caller
        ends."""
        return self._step(self._pace.wait())

    def end(self) -> None:
        """Ends `run` after the current tick; may be called from any thread."""
        self._ended = True

    def say(self, prompt: str) -> None:
        """Sets the prompt of the next request; may be called from any thread."""
        self.prompt = prompt

    def resume(self) -> None:
        """Lets a stopped robot act again; may be called from any thread."""
        self._acted, self._stopped = None, False

    @property
    def report(self) -> DriveReport:
        """Counts so far, of all runs."""
        totals = self._totals
        return DriveReport(
            ticks={mode: totals[mode] for mode in ("act", "hold", "stop")},
            missed=self._missed + self._pace.missed,
            limited=dict(self._limited),
            answers=totals["answers"],
            refused=totals["refused"],
            lost=totals["lost"],
            expired=totals["expired"],
            late=totals["late"],
            delays=tuple(self._measured),
        )

    def _step(self, begun: int, ending: bool = False) -> Command:
        self._seen = seen = dict(self.robot.observe())
        rest = self._rest()
        if self._last is None:
            self.limits.check(rest, seen)
        before, tick = self._pace.last, self._pace.take()
        idle = self._idle = self._idle + self._idling * (begun - before - 1)
        self._idle += self._idling * (tick - begun)
        self._hear(tick, rest)
        command = self._command(tick, rest, ending)
        self._send(command)
        if not ending:
            self._ask(begun, idle)
        self._record(command)
        return command

    def _rest(self) -> np.ndarray:
        """The action [a] that holds the robot."""
        rest = np.array(self.robot.hold(self._seen, self._last), np.float64)
        shape = rest.shape if self._last is None else self._last.shape
        if rest.ndim != 1 or not rest.size or rest.shape != shape or not np.isfinite(rest).all():
            raise ValueError(
                f"The robot's `hold` returned {rest!r:.80}; return the numbers [a] of an action "
                "that keeps it where it is."
            )
        return rest

    def _hear(self, tick: int, rest: np.ndarray) -> None:
        """Takes in the server's answers, and checks a new session's metadata."""
        while (answer := self.server.answer()) is not None:
            if self._asked is not None and answer.number == self._asked.number:
                asked, self._asked = self._asked, None
                self._take(answer, asked, tick, len(rest))
        session = self.server.session
        if _number(session) == _number(self._session):
            return
        self._totals["lost"] += self._asked is not None
        self._session, self._asked, self._continued = session, None, None
        if session is not None:
            url, told = self.server.url, session.metadata
            check_inputs(url, told, {**self._seen, "prompt": self.prompt})
            check_actions(url, told, len(rest))
            wanted = self.settings.chunking if self.settings.overlap == "frozen" else False
            self._continues = continues(url, told, wanted)

    def _take(self, answer: ServerAnswer, asked: _Asked, tick: int, dims: int) -> None:
        """Merges an answer into the plan. Its first action is for the tick of its request, moved
        later by the ticks for which the robot has been held since, because nothing moved then. An
        observation from before the robot's last stop says nothing about where it is now."""
        if answer.refusal is not None:
            self._refuse(answer.refusal, tick)
            return
        fault = chunk_fault(answer.content.get("actions"), dims)
        if fault is not None:
            raise ValueError(
                f"{self.server.url} answered {sorted(answer.content)}, whose actions {fault}; "
                "does it serve a policy for this robot?"
            )
        self._answered = True
        self._totals["answers"] += 1
        delay = tick - asked.tick
        self._delays = self._delays.and_then(delay)
        self._measured.append(delay)
        chunk = Chunk(asked.tick + self._idle - asked.idle, asked.tick, answer.content["actions"])
        self._continued = None
        before = asked.tick <= self._halted
        if before or chunk.end <= tick or self._is_old(tick, chunk.observed):
            self._totals["expired"] += 1
            return
        promised = asked.tick + asked.committed
        self._totals["late"] += tick - chunk.start > asked.committed
        self._plan = self._plan.merged(chunk, tick, self.settings.overlap, promised)
        self._newest = self._continued = chunk

    def _refuse(self, why: str, tick: int) -> None:
        self._totals["refused"] += 1
        self._retry = tick + math.ceil(_RETRY_SECONDS * self.settings.hz)
        if not self._answered:
            raise ValueError(f"{self.server.url} refused the first request: {why}")
        log.warning("%s refused a request: %s", self.server.url, why)

    def _command(self, tick: int, rest: np.ndarray, ending: bool) -> Command:
        """The one command of a tick, within the limits."""
        planned = self._plan.at(tick)
        if planned is not None and self._is_old(tick, planned.observed):
            planned = None
        silent = self._acted is not None and planned is None and self.stop is not None
        if silent and tick - (self._acted or 0) > self.settings.stop_after * self.settings.hz:
            self._stopped = True
            self._plan, self._newest = ActionPlan(), None
        mode: Mode = "stop" if self._stopped and not ending else "hold"
        wanted = rest
        if self._stopped and self.stop is not None and not ending:
            wanted = np.array(self.stop(self._seen, rest if self._last is None else self._last))
        elif planned is not None and not ending:
            mode, wanted = "act", planned.action
        if wanted.shape != rest.shape:
            raise ValueError(
                f"`stop` returned shape {list(wanted.shape)}, but `hold` returned "
                f"{list(rest.shape)}; both must return an action of the robot."
            )
        sent, by = self.limits.applied(wanted, rest, self._seen)
        if mode != "act" or planned is None:
            return Command(tick, mode, sent, limited=by)
        return Command(tick, mode, sent, wanted, tick - planned.observed, by)

    def _send(self, command: Command) -> None:
        done = self.robot.act(command.sent.copy())
        self._last = command.sent
        if done is not None:
            self._last = _truly_sent(done, command.sent.shape)
        self._idling = command.mode != "act"
        self._totals[command.mode] += 1
        self._limited.update(command.limited)
        if self._idling:
            self._idle += 1
            self._continued = None
            self._halted = command.tick if command.mode == "stop" else self._halted
        else:
            self._acted = command.tick

    def _ask(self, tick: int, idle: int) -> None:
        """Requests the next chunk for the observation of this tick, if it is time."""
        if self._session is None or self._asked or self._stopped or tick < self._retry:
            return
        delay = self._delays.expected
        if self._newest is not None and self._plan.end > tick + delay:
            enough = self.settings.replan or max(1, len(self._newest.actions) // 2)
            if tick - self._newest.start < enough:
                return
        message = {**self._seen, "prompt": self.prompt}
        committed = delay
        if self._continues:
            most = self._session.metadata.get("most_committed")
            known = most if isinstance(most, int) else None
            further = continuation(self._continued, tick, delay, known)
            if further is not None:
                committed = further.committed
                message.update(further._asdict())
        number = self.server.ask(message)
        self._asked = _Asked(number, tick, committed, idle)

    def _record(self, command: Command) -> None:
        """Records one more tick of the episode; a new prompt begins a new episode."""
        if self.recorder is None or self._last is None:
            return
        if self._told != self.prompt:
            self._told = self.prompt
            if hasattr(self.recorder, "describe"):
                self.recorder.describe(self.robot)
            self.recorder.begin(self.settings.hz, self.prompt)
        self.recorder.add(self._seen, command._replace(sent=self._last), self.clock.now())

    def _is_old(self, tick: int, observed: int) -> bool:
        limit = self.settings.max_age
        return limit is not None and tick - observed > limit * self.settings.hz

    def _hold_at_once(self) -> None:
        """Holds the robot after an error, without its box if `forward` itself fails."""
        if self._last is None:
            return
        rest, limits = self._rest(), self.limits
        try:
            held = limits.applied(rest, rest, self._seen)
        except Exception:
            log.exception("the robot is held without its box, because `forward` failed")
            held = replace(limits, box=None, forward=None).applied(rest, rest, self._seen)
        self.robot.act(held.action)


def _truly_sent(done: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The action that a robot's `act` reports as sent, in place of one of this shape."""
    try:
        sent = np.array(done, np.float64)
    except (TypeError, ValueError):
        sent = np.array(np.nan)
    if sent.shape != shape or not np.isfinite(sent).all():
        raise ValueError(
            f"The robot's `act` returned {done!r:.80} for an action of {shape[0]} numbers; return "
            "what was sent, or nothing."
        )
    return sent


def _number(session: ServerSession | None) -> int:
    return 0 if session is None else session.number


def drive(
    robot: RealRobot,
    server: ServerLink,
    prompt: str,
    *,
    hz: float,
    seconds: float | None = None,
    until: Callable[[Mapping[str, Any]], bool] | None = None,
    limits: SafetyLimits | None = None,
    stop: Stop | None = None,
    recorder: TickRecorder | None = None,
    **settings: Any,
) -> DriveReport:
    """Drives one episode; see `ControlLoop`, its `run`, and `LoopSettings` for the rest.

    Raises:
      ValueError, Exception: as `ControlLoop.run`.
    """
    loop = ControlLoop(
        robot,
        server,
        prompt,
        LoopSettings(hz, **settings),
        limits or SafetyLimits(),
        stop,
        recorder,
    )
    return loop.run(seconds, until)
