"""Costs of the parts of an RL run, recorded while it runs on real threads; from them,
`rl.simulated.events` simulates the same run.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from models.policy import Request
from rl.config import ObjectiveConfig
from rl.host.actor import Answer, FlowActor
from rl.host.experience import MicroBatch, micro_batches
from rl.learner import FlowLearner
from rl.records import Ticket
from sim.protocol import Observation, Slots, Start


class TimedParts:
    """`rl.host.rollout.Actor` and `rl.host.loop.Learner` that record how long everything takes,
    provided that computing is not left to JAX's own threads (`jax_cpu_enable_async_dispatch`)."""

    def __init__(self, actor: FlowActor, learner: FlowLearner) -> None:
        self.sizes = actor.sizes
        self._actor, self._learner = actor, learner
        self.preparing: list[float] = []
        self.drawing: dict[int, list[float]] = defaultdict(list)
        self.drawn: float | None = None
        """Time of the last batch, if none of its slots has been sent its actions yet."""
        self.adding: list[float] = []

    def forget(self) -> None:
        """All but the last of each."""
        for times in (self.preparing, self.adding, *self.drawing.values()):
            del times[:-1]

    @property
    def params(self) -> Any:
        return self._learner.state.params

    def prepare(self, observation: Observation, prompt: str, key: tuple[int, int]) -> Request:
        since = time.perf_counter()
        found = self._actor.prepare(observation, prompt, key)
        self.preparing.append(time.perf_counter() - since)
        return found

    def answer(self, params: Any, requests: Sequence[Request]) -> Sequence[Answer]:
        since = time.perf_counter()
        found = self._actor.answer(params, requests)
        size = next(size for size in self.sizes if size >= len(requests))
        self.drawn = time.perf_counter()
        self.drawing[size].append(self.drawn - since)
        return found

    def batches(
        self, tickets: Iterator[Ticket], objective: ObjectiveConfig, micro: int
    ) -> Iterator[MicroBatch]:
        """`micro_batches`; the time of packing counts towards the gradient, waiting for tickets
        does not."""
        waited = 0.0

        def waiting() -> Iterator[Ticket]:
            nonlocal waited
            since = time.perf_counter()
            for ticket in tickets:
                waited += time.perf_counter() - since
                yield ticket
                since = time.perf_counter()
            waited += time.perf_counter() - since

        made = micro_batches(waiting(), self._actor.policy.rows, objective, micro)
        while True:
            since, waited = time.perf_counter(), 0.0
            part = next(made, None)
            if part is None:
                return
            packing = time.perf_counter() - since - waited
            yield part
            self.adding[-1] += packing

    def add(self, part: MicroBatch) -> None:
        since = time.perf_counter()
        self._learner.add(part.experience, part.tickets)
        self.adding.append(time.perf_counter() - since)

    def update(self) -> dict[str, float]:
        return self._learner.update()


class TimedSlots:
    """Slots that record how long sending them a command takes, and how long after a batch that
    begins."""

    def __init__(self, slots: Slots, timed: TimedParts) -> None:
        self._slots, self._timed = slots, timed
        self.telling: list[float] = []
        self.waking: list[float] = []

    def forget(self) -> None:
        """All but the last of each."""
        for times in (self.telling, self.waking):
            del times[:-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def begin(self, slot: int, start: Start) -> None:
        since = time.perf_counter()
        self._slots.begin(slot, start)
        self.telling.append(time.perf_counter() - since)

    def send(self, slot: int, actions: Float[np.ndarray, "t a"]) -> None:
        since = time.perf_counter()
        if self._timed.drawn is not None:
            self.waking.append(since - self._timed.drawn)
            self._timed.drawn = None
        self._slots.send(slot, actions)
        self.telling.append(time.perf_counter() - since)
