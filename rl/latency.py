"""How long environments take: distributions that a user names or measures, so that a run can be
tried, or simulated (`rl.events`), with the waiting of simulators that one does not have.

Every draw derives from a generator that the caller seeds. `measure` times a real suite's slots.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from sim.protocol import Outcome, Slots, Start


class Latency(Protocol):
    """A distribution of seconds."""

    @property
    def mean(self) -> float:
        """Seconds."""

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, "n"]:
        """So many of them, seconds; the first are the same however many are drawn."""


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    seconds: float

    @property
    def mean(self) -> float:
        return self.seconds

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, "n"]:
        return np.full(n, self.seconds)


@dataclass(frozen=True)
class LogNormal:
    """`median` seconds; `spread` is the standard deviation of their logarithm."""

    median: float
    spread: float

    @property
    def mean(self) -> float:
        return self.median * float(np.exp(self.spread**2 / 2))

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, "n"]:
        return self.median * np.exp(self.spread * rng.standard_normal(n))


@dataclass(frozen=True)
class Stragglers:
    """As `usual`, but a `share` of them `slower` times as long."""

    usual: Latency
    share: float = 0.05
    slower: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.slower > 0:
            raise ValueError(
                f"Stragglers of share {self.share}, {self.slower} times as slow: expected a share "
                "of 0 to 1 and a positive factor."
            )

    @property
    def mean(self) -> float:
        return self.usual.mean * (1 + self.share * (self.slower - 1))

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, "n"]:
        late, usual = rng.spawn(2)
        factor = np.where(late.random(n) < self.share, self.slower, 1.0)
        return factor * self.usual.draw(usual, n)


@dataclass(frozen=True)
class Measured:
    """Some of these, each as likely."""

    seconds: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.seconds or not min(self.seconds) >= 0:
            raise ValueError(
                f"Measured latencies must be at least one, none negative; got {len(self.seconds)}, "
                f"the least {min(self.seconds, default=None)} s."
            )

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    def draw(self, rng: np.random.Generator, n: int) -> Float[np.ndarray, "n"]:
        return np.asarray(self.seconds)[(rng.random(n) * len(self.seconds)).astype(int)]


@dataclass(frozen=True)
class Latencies:
    """What a slot takes to act one chunk, pictures of its end included, and to begin an episode."""

    chunk: Latency
    reset: Latency


def measure(
    slots: Slots,
    starts: Sequence[Start],
    *,
    execute: int,
    most: int = 200,
    seed: int = 0,
) -> Latencies:
    """Times a suite's slots, one of them at a time, so that none has to share the machine.

    Actions are at random, standard normal times 0.3; a chunk that an episode's end cut short counts
    for a whole one only in proportion, and is left out.

    Args:
      starts: acted one after another until each ended or there are `most` chunks; the first is
        acted for one chunk alone before anything is timed.
      execute: control steps a chunk.

    Raises:
      ValueError: a simulator failed, or no chunk was whole.
    """
    rng, dims = np.random.default_rng(seed), len(slots.spec.action_names)
    chunks: list[float] = []
    resets: list[float] = []

    def answered(since: float) -> tuple[Outcome, float]:
        while not (outcomes := slots.poll()):
            pass
        if outcomes[0].error is not None:
            raise ValueError(f"{slots.spec.name}: {outcomes[0].error}")
        return outcomes[0], time.perf_counter() - since

    def begin(start: Start) -> float:
        since = time.perf_counter()
        slots.begin(0, start)
        return answered(since)[1]

    def act() -> tuple[Outcome, float]:
        actions = np.clip(0.3 * rng.standard_normal((execute, dims)), -1, 1).astype(np.float32)
        since = time.perf_counter()
        slots.send(0, actions)
        return answered(since)

    begin(starts[0])
    act()
    for start in starts:
        if len(chunks) >= most:
            break
        resets.append(begin(start))
        ended = False
        while not ended and len(chunks) < most:
            outcome, seconds = act()
            ended = outcome.ended
            if len(outcome.reward) == execute:
                chunks.append(seconds)
    if not chunks:
        raise ValueError(
            f"{slots.spec.name} ended every episode within its first {execute} steps; choose a "
            "smaller `execute`."
        )
    return Latencies(Measured(tuple(chunks)), Measured(tuple(resets)))


def write(path: Path, measured: Latencies, about: dict[str, Any]) -> None:
    """Measured latencies as JSON: lists of seconds `chunk` and `reset`, and what they are `about`.

    Raises:
      ValueError: they were not measured.
    """
    kinds = {"chunk": measured.chunk, "reset": measured.reset}
    lists: dict[str, list[float]] = {}
    for name, latency in kinds.items():
        if not isinstance(latency, Measured):
            raise ValueError(
                f"{path}: latencies of a {name} are {latency}, expected measured ones."
            )
        lists[name] = [round(seconds, 6) for seconds in latency.seconds]
    path.write_text(json.dumps({**lists, "about": about}) + "\n")


def read(path: Path) -> Latencies:
    """What `write` wrote, or a file of one's own with lists of seconds `chunk` and `reset`.

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
