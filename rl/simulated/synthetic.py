"""Slots that wait instead of computing, as if their environments ran on machines of their own.

Their task is `rl.simulated.points`; how long it takes is drawn from latencies that the user gives
or has measured (`rl.simulated.latency`). Slots need no threads: outcomes wait in a heap until their
time has come.
"""

import heapq
import threading
import time
from collections import Counter
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from rl.simulated.latency import Latencies, Latency
from rl.simulated.points import Point, Points
from sim.protocol import Outcome, Start

_FILM = 160
"""Edge of the pictures of a film, pixels."""


class Clock(Protocol):
    """Time, and a way to wait for it."""

    def now(self) -> float:
        """Seconds, never decreasing."""

    def wait(self, news: threading.Event, seconds: float) -> None:
        """Waits until the event is set, but no longer."""


class _Wall:
    def now(self) -> float:
        return time.monotonic()

    def wait(self, news: threading.Event, seconds: float) -> None:
        news.wait(seconds)


class _Due(NamedTuple):
    at: float
    order: int
    outcome: Outcome


class Synthetic:
    """`sim.protocol.Slots`. Latencies derive from the seed, the start, how often that start was
    begun before, and the step, whatever else happens.

    Args:
      latencies: a chunk's is that of a `send` or `demonstrate`, however many steps it acts.
    """

    lockstep = False

    def __init__(
        self,
        latencies: Latencies,
        count: int,
        *,
        world: Points | None = None,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"count is {count}, expected at least one slot.")
        self._world = world or Points()
        self.spec, self.count = self._world.spec, count
        self._latencies, self._seed = latencies, seed
        self._clock: Clock = clock or _Wall()
        self._points: dict[int, Point] = {}  # of slots whose episode runs
        self._attempts: dict[int, int] = {}  # number of the attempt at it
        self._begun: Counter[Start] = Counter()
        self._pending: dict[int, _Due] = {}
        self._heap: list[_Due] = []
        self._order = 0
        self._news = threading.Event()

    def begin(self, slot: int, start: Start) -> None:
        """Starts an episode; one that runs in the slot is given up.

        Raises:
          ValueError: there is no such slot, task or seed.
        """
        since = self._clock.now()
        if not 0 <= slot < self.count:
            raise ValueError(f"{self.spec.name} has slots 0 … {self.count - 1}, no slot {slot}.")
        if start.task not in self.spec.tasks or start.seed < 0:
            raise ValueError(
                f"{self.spec.name} cannot begin {start}: its tasks are {list(self.spec.tasks)} and "
                "its seeds are not negative."
            )
        point = self._points[slot] = self._world.begin(start.seed)
        self._attempts[slot] = self._begun[start]
        self._begun[start] += 1
        outcome = Outcome(
            slot=slot,
            observation=self._world.observe(point),
            goal=point.goal,
            reward=np.zeros(0, np.float32),
            achieved=np.zeros(len(self.spec.goals), bool),
        )
        self._report(outcome, since, self._latencies.reset, (point.seed, 0, 0))

    def send(self, slot: int, actions: Float[np.ndarray, "t a"], film: bool = False) -> None:
        """Acts T steps, or until the episode ends.

        Raises:
          ValueError: no episode waits in the slot, or the actions have another shape.
        """
        since, actions = self._clock.now(), np.asarray(actions, np.float32)
        dims = len(self.spec.action_names)
        if actions.ndim != 2 or not len(actions) or actions.shape[1] != dims:
            raise ValueError(
                f"{self.spec.name}: expected actions of shape [steps, {dims}] for slot {slot}, "
                f"got {actions.shape}."
            )
        self._act(slot, actions, len(actions), 0.0, film, since)

    def demonstrate(self, slot: int, steps: int, noise: float = 0.0) -> None:
        """Lets the expert act T steps; see `sim.protocol.Slots`.

        Raises:
          ValueError: no episode waits in the slot, or steps < 1.
        """
        if steps < 1:
            raise ValueError(f"{self.spec.name}: steps is {steps}, expected at least one.")
        self._act(slot, None, steps, noise, False, self._clock.now())

    def poll(self, timeout: float | None = None) -> list[Outcome]:
        """Outcomes whose time has come since the last call, in the order of these times: at least
        one if any slot is at work, unless the timeout (seconds) or `wake` comes first."""
        until = float("inf") if timeout is None else self._clock.now() + timeout
        while True:
            now, finished = self._clock.now(), []
            woken = self._news.is_set()
            self._news.clear()
            while self._heap and self._heap[0].at <= now:
                due = heapq.heappop(self._heap)
                if self._pending.get(due.outcome.slot) is due:
                    del self._pending[due.outcome.slot]
                    finished.append(due.outcome)
            if finished or woken or not self._pending or now >= until:
                return finished
            self._clock.wait(self._news, min(self._heap[0].at, until) - now)

    def wake(self) -> None:
        """Makes the waiting poll, or else the next, return; from any thread, at any time."""
        self._news.set()

    def close(self) -> None:
        """Does nothing: there is nothing to end."""

    def _act(
        self,
        slot: int,
        actions: Float[np.ndarray, "t a"] | None,
        steps: int,
        noise: float,
        film: bool,
        since: float,
    ) -> None:
        world, point = self._world, self._points.get(slot)
        if point is None or slot in self._pending:
            raise ValueError(
                f"{self.spec.name}: slot {slot} has no running episode or is busy; begin an "
                "episode, or poll its outcome first."
            )
        begun, rng = point.steps, np.random.default_rng([1, point.seed, point.steps])
        path: list[Point] = []
        wanted: list[np.ndarray] = []
        discs: list[np.ndarray] = []
        success = False
        while len(path) < steps and not success and point.steps < world.max_steps:
            if actions is None:
                wanted.append(world.expert(point))
                action = wanted[-1] + noise * 2 * rng.standard_normal(world.action_dims)
            else:
                action = actions[len(path)]
            point = world.act(point, action)
            path.append(point)
            discs.append(world.reached(point))
            success = bool(discs[-1][point.goal])
        reached = np.array(discs)
        outcome = Outcome(
            slot=slot,
            observation=world.observe(point),
            goal=point.goal,
            reward=reached[:, point.goal].astype(np.float32),
            terminated=success,
            truncated=not success and point.steps >= world.max_steps,
            success=success,
            achieved=np.any(reached, 0),
            actions=None if actions is not None else np.array(wanted),
            film=np.stack([world.draw(p, _FILM) for p in path]) if film else None,
        )
        self._points[slot] = point
        self._report(outcome, since, self._latencies.chunk, (point.seed, begun, 1))
        if outcome.ended:
            del self._points[slot]

    def _report(
        self, outcome: Outcome, since: float, latency: Latency, what: tuple[int, ...]
    ) -> None:
        rng = np.random.default_rng([self._seed, self._attempts[outcome.slot], *what])
        self._order += 1
        due = _Due(since + float(latency.draw(rng, 1)[0]), self._order, outcome)
        self._pending[outcome.slot] = due
        heapq.heappush(self._heap, due)
