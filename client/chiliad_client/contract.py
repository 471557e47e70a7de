"""Inputs and outputs of a control loop: its settings, the interfaces of the robot, the server and
the recorder, the command of a tick, and the counts of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Mapping, NamedTuple, Protocol

import numpy as np

from .chunks import Overlap
from .connection import ServerAnswer, ServerSession

Mode = Literal["act", "hold", "stop"]


class RealRobot(Protocol):
    """Robot interface of the loop: anything with these three methods."""

    def observe(self) -> Mapping[str, Any]:
        """Images uint8 [h, w, 3] and numbers [n] by the server's keys, without the prompt."""

    def act(self, action: np.ndarray) -> Any:
        """Sends a command [a] and returns at once; may return what was actually sent, [a]."""

    def hold(self, seen: Mapping[str, Any], last: np.ndarray | None) -> Any:
        """The command [a] that keeps the robot where it is. For absolute targets: `last`, or the
        current position if that is None. For relative targets: zeros."""


class ServerLink(Protocol):
    """Server interface of the loop; `Connection` implements it."""

    url: str

    @property
    def session(self) -> ServerSession | None:
        """The open connection, if there is one; ValueError if there will never be one."""

    def ask(self, message: Mapping[str, Any]) -> int:
        """Sends a request and returns its number; never waits."""

    def answer(self) -> ServerAnswer | None:
        """The next answer, if one has arrived; never waits."""


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a control loop.

    Args:
      hz: ticks per second: the rate that the policy was trained at.
      replan: steps of a chunk to execute before the next is requested; half of it if None.
      overlap: see `chunks.Overlap`.
      chunking: whether the server continues its last chunk; None: if it can.
      max_age: largest age of an observation, in seconds, when its action is sent; None for the
        whole chunk.
      stop_after: seconds without an action, after the first action, until the robot is stopped.

    Raises:
      ValueError: a setting is invalid, or settings contradict each other.
    """

    hz: float
    replan: int | None = None
    overlap: Overlap = "frozen"
    chunking: bool | None = None
    max_age: float | None = None
    stop_after: float = 5.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.hz) and self.hz > 0):
            raise ValueError(f"hz is {self.hz}; expected a number of ticks per second above 0.")
        if self.replan is not None and self.replan < 1:
            raise ValueError(f"replan is {self.replan}; expected a number of steps of at least 1.")
        if self.overlap not in ("frozen", "latest", "average"):
            raise ValueError(f"overlap is '{self.overlap}'; give frozen, latest or average.")
        if self.chunking and self.overlap != "frozen":
            raise ValueError(
                f"overlap is '{self.overlap}', but with chunking the server continues its last "
                "chunk unchanged; use overlap='frozen' or chunking=False."
            )
        if self.max_age is not None and self.max_age * self.hz < 1:
            raise ValueError(
                f"max_age is {self.max_age} s, which is less than one tick at {self.hz} Hz."
            )


class Command(NamedTuple):
    """Command of one tick: `sent` [a] to the robot; `planned` [a] by the policy (None if the tick
    has no action); `age`, the ticks since the observation behind `planned`; and `limited`, the
    limits that changed it."""

    tick: int
    mode: Mode
    sent: np.ndarray
    planned: np.ndarray | None = None
    age: int | None = None
    limited: tuple[str, ...] = ()


class TickRecorder(Protocol):
    """Records what was observed and sent; `EpisodeRecorder` is one."""

    def begin(self, hz: float, prompt: str) -> None:
        """Begins an episode, and ends the current one."""

    def add(self, seen: Mapping[str, Any], command: Command, seconds: float) -> None:
        """Adds one tick, at `seconds` of a clock; never waits."""

    def end(self) -> None:
        """Ends the episode."""


@dataclass(frozen=True)
class DriveReport:
    """Counts of a run. `ticks`: by mode. `missed`: ticks without a command, because the robot or
    this program was slow. `limited`: commands that a limit changed, by limit. `answers`, `refused`,
    `lost`: requests by result. `expired`: answers whose actions were all over or too old on
    arrival, or whose observation precedes the robot's last stop. `late`: answers after the promised
    steps. `delays`: ticks from observation to answer."""

    ticks: Mapping[str, int]
    missed: int
    limited: Mapping[str, int]
    answers: int
    refused: int
    lost: int
    expired: int
    late: int
    delays: tuple[int, ...]

    def __str__(self) -> str:
        ticks = ", ".join(f"{count} {mode}" for mode, count in self.ticks.items() if count)
        limits = ", ".join(f"{count} {name}" for name, count in self.limited.items()) or "none"
        delay = f"{np.mean(self.delays):.1f} (at most {max(self.delays)})" if self.delays else "-"
        return (
            f"Ticks: {ticks or 'none'}; {self.missed} missed. Limited: {limits}. Answers: "
            f"{self.answers}, {self.late} late, {self.expired} expired, {self.refused} refused, "
            f"{self.lost} lost; delay in ticks: {delay}."
        )
