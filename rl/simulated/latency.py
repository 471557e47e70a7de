"""Latencies of environments: distributions that a user names or measures, so that a run can be
tried, or simulated (`rl.simulated.events`), with the waiting of simulators that you do not have.

Every draw derives from a generator that the caller seeds. `measure` times a real suite's slots.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from sim.protocol import Outcome, Slots, Start


class Latency(Protocol):
    """A distribution of seconds."""

    @property
    def mean(self) -> float:
        """Mean, seconds."""

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, " n"]:
        """Draws n latencies, seconds; the first ones are the same however many are drawn."""


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"Constant.seconds is {self.seconds}; expected 0 s or more.")

    @property
    def mean(self) -> float:
        return self.seconds

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, " n"]:
        return np.full(n, self.seconds, float)


@dataclass(frozen=True)
class LogNormal:
    """`median` seconds; `spread` is the standard deviation of their logarithm."""

    median: float
    spread: float

    def __post_init__(self) -> None:
        if not (0 <= self.median < math.inf and 0 <= self.spread < math.inf):
            raise ValueError(
                f"LogNormal.median is {self.median} and spread {self.spread}; expected 0 or more "
                "of each."
            )

    @property
    def mean(self) -> float:
        return self.median * float(np.exp(self.spread**2 / 2))

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, " n"]:
        return self.median * np.exp(self.spread * rng.standard_normal(n))


@dataclass(frozen=True)
class Stragglers:
    """Latencies like `usual`, but a `share` of them `slower` times as long."""

    usual: Latency
    share: float = 0.05
    slower: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not 0 < self.slower < math.inf:
            raise ValueError(
                f"Stragglers.share is {self.share} and slower {self.slower}; expected a share of 0 "
                f"to 1 and a factor above 0."
            )

    @property
    def mean(self) -> float:
        return self.usual.mean * (1 + self.share * (self.slower - 1))

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, " n"]:
        late, usual = rng.spawn(2)
        factor = np.where(late.random(n) < self.share, self.slower, 1.0)
        return factor * self.usual.draw(usual, n)


@dataclass(frozen=True)
class Measured:
    """One of these values, each equally likely."""

    seconds: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        strange = [seconds for seconds in self.seconds if not 0 <= seconds < math.inf]
        if not self.seconds or strange:
            raise ValueError(
                f"Measured has {len(self.seconds)} latencies, among them {strange[:3]} s; expected "
                f"at least one, and only finite numbers that are not negative."
            )

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, " n"]:
        return np.asarray(self.seconds)[(rng.random(n) * len(self.seconds)).astype(int)]


@dataclass(frozen=True)
class Latencies:
    """Seconds that a slot takes for one chunk, with the pictures at its end, and for a reset."""

    chunk: Latency
    reset: Latency


class MeasuredLatency(NamedTuple):
    """Result of `measure`."""

    chunk: Measured
    reset: Measured


def measure(
    slots: Slots, starts: Sequence[Start], *, replan_steps: int, each: int = 10, seed: int = 0
) -> MeasuredLatency:
    """Times a suite's first slot, so that nothing has to share the machine with it.

    Actions are random, standard normal times 0.3. Chunks cut short by an episode's end are left
    out.

    Args:
      starts: acted one after another; the first is acted for one chunk before anything is timed.
      replan_steps: control steps per chunk.
      each: chunks an episode, if it is that long.

    Raises:
      ValueError: a simulator failed, or no chunk was whole.
    """
    rng, dims = np.random.default_rng(seed), len(slots.spec.action_names)
    chunks: list[float] = []

    def answered(since: float) -> tuple[Outcome, float]:
        while not (outcomes := slots.poll()):
            pass
        seconds = time.perf_counter() - since
        if outcomes[0].error is not None:
            raise ValueError(f"{slots.spec.name}: {outcomes[0].error}")
        return outcomes[0], seconds

    def begin(start: Start) -> float:
        since = time.perf_counter()
        slots.begin(0, start)
        return answered(since)[1]

    def act() -> tuple[Outcome, float]:
        actions = np.clip(0.3 * rng.standard_normal((replan_steps, dims)), -1, 1).astype(np.float32)
        since = time.perf_counter()
        slots.send(0, actions)
        return answered(since)

    def episode(start: Start) -> float:
        reset = begin(start)
        for _ in range(each):
            outcome, seconds = act()
            if len(outcome.reward) == replan_steps:
                chunks.append(seconds)
            if outcome.ended:
                break
        return reset

    begin(starts[0])
    act()
    resets = [episode(start) for start in starts]
    if not chunks:
        raise ValueError(
            f"{slots.spec.name} ended every episode within its first {replan_steps} steps; "
            "choose a smaller `replan_steps`."
        )
    return MeasuredLatency(Measured(tuple(chunks)), Measured(tuple(resets)))


def write(path: Path, chunk: Measured, reset: Measured, about: dict[str, Any]) -> None:
    """Writes measured latencies as JSON: lists of seconds, `chunk` and `reset`, and what they are
    `about`."""
    lists = {
        name: [round(seconds, 6) for seconds in measured.seconds]
        for name, measured in (("chunk", chunk), ("reset", reset))
    }
    path.write_text(json.dumps({**lists, "about": about}) + "\n")


def read(path: Path) -> Latencies:
    """Reads a file of `write`, or one of the user's with lists of seconds `chunk` and `reset`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it has no such lists.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; measure one with python -m tools.latency.")
    try:
        found = json.loads(path.read_text())
        chunk, reset = (tuple(map(float, found[name])) for name in ("chunk", "reset"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected JSON with lists of seconds 'chunk' and 'reset', got {error!r}."
        ) from error
    return Latencies(Measured(chunk), Measured(reset))
