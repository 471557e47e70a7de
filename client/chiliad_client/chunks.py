"""Action chunks laid out by tick: which action belongs to which tick of the control loop, how
chunks that cover the same tick are combined, and what real-time chunking may continue (arXiv
2506.07339). Pure functions of frozen values; only the loop has state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

Overlap = Literal["frozen", "latest", "average"]
"""Rule for a tick that several chunks cover. "frozen": the older chunk's action for ticks promised
to it when the newer was requested, then the newer's. "latest": the newest's. "average": the
mean."""

MOST_STEPS = 10_000
"""Longest chunk that is taken in; merging it takes well under a tick."""
REMEMBERED = 10
"""Recent delays, of which the largest is the expected one."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """`actions` [h, a] for ticks `start`, `start` + 1, …, computed from the observation at tick
    `observed`."""

    start: int
    observed: int
    actions: np.ndarray

    @property
    def end(self) -> int:
        """First tick after the chunk."""
        return self.start + len(self.actions)


class Planned(NamedTuple):
    """Action [a] of a tick, and the tick of the newest observation behind it."""

    action: np.ndarray
    observed: int


@dataclass(frozen=True, eq=False)
class ActionPlan:
    """Actions of ticks `first`, `first` + 1, …: `actions` [n, a]; `observed`, int [n], the tick of
    the newest observation behind each; `chunks`, int [n], how many chunks each is the mean of."""

    first: int = 0
    actions: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    observed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    chunks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def end(self) -> int:
        """First tick without an action."""
        return self.first + len(self.actions)

    def at(self, tick: int) -> Planned | None:
        """The action planned for exactly this tick, if any; never another tick's, however late the
        loop is."""
        if not self.first <= tick < self.end:
            return None
        i = tick - self.first
        return Planned(self.actions[i], int(self.observed[i]))

    def merged(self, chunk: Chunk, now: int, overlap: Overlap, frozen_until: int = 0) -> ActionPlan:
        """The plan from tick `now` on with a new chunk merged in. It ends where the chunk ends, and
        is unchanged if the chunk is over. `frozen_until`: first tick that is not promised.

        Raises:
          ValueError: the chunk begins after `now`.
        """
        if chunk.start > now:
            raise ValueError(f"The chunk begins at tick {chunk.start}, after tick {now}.")
        if chunk.end <= now:
            return self
        ticks = np.arange(now, chunk.end)
        actions = np.array(chunk.actions[now - chunk.start :], np.float64)
        observed = np.full(len(ticks), chunk.observed, np.int64)
        chunks = np.ones(len(ticks), np.int64)
        shared = (ticks >= self.first) & (ticks < self.end)
        if overlap == "frozen":
            shared &= ticks < frozen_until
        if overlap == "latest" or not shared.any():
            return ActionPlan(now, actions, observed, chunks)
        old = ticks[shared] - self.first
        if overlap == "frozen":
            actions[shared], observed[shared] = self.actions[old], self.observed[old]
            return ActionPlan(now, actions, observed, chunks)
        count = self.chunks[old] + 1
        actions[shared] = self.actions[old] + (actions[shared] - self.actions[old]) / count[:, None]
        chunks[shared] = count
        return ActionPlan(now, actions, observed, chunks)


@dataclass(frozen=True)
class Delays:
    """Recent delays, in ticks from an observation to the first tick that could use its answer."""

    latest: tuple[int, ...] = ()

    def and_then(self, delay: int) -> Delays:
        """These delays and one more."""
        return Delays((*self.latest, delay)[-REMEMBERED:])

    @property
    def expected(self) -> int:
        """The largest recent delay, as in the paper. 1 before any is known, because an answer never
        arrives at the tick of its request."""
        return max(self.latest, default=1)


class Continuation(NamedTuple):
    """Steps of the server's last chunk: `executed` before this observation, and `committed` to be
    executed until the answer."""

    executed: int
    committed: int


def continuation(
    last: Chunk | None, tick: int, delay: int, most: int | None = None
) -> Continuation | None:
    """Continuation of the server's last chunk for a request at this tick; None if there is no chunk
    or it does not cover this tick.

    Args:
      delay: ticks until the answer is expected.
      most: largest number of steps that the server commits, if it declares one.
    """
    if last is None or not last.start <= tick < last.end:
        return None
    committed = min(delay, last.end - tick)
    return Continuation(tick - last.start, committed if most is None else min(committed, most))


def chunk_fault(actions: Any, dims: int) -> str | None:
    """Reason, in words, why an answer's actions are not a chunk [h, dims] of finite numbers, if
    any."""
    if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f" or actions.ndim != 2:
        kind = getattr(actions, "dtype", type(actions).__name__)
        return f"are {kind} {list(getattr(actions, 'shape', []))}, not floats [steps, {dims}]"
    if actions.shape[1] != dims or not len(actions):
        return f"have the shape {list(actions.shape)}, not [steps, {dims}]"
    if len(actions) > MOST_STEPS:
        return f"have {len(actions)} steps, more than {MOST_STEPS}"
    if not np.isfinite(actions).all():
        return "hold NaN or infinity"
    return None
