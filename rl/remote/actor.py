"""A policy that acts on another host as if it were local.

Versions go through Ray's object store: untrained leaves are stored once, and each version's trained
leaves are stored once for all workers, which fetch them from there. An answer derives only from
parameters, observation and key, so a worker that dies or hangs is replaced and asked again.
"""

import os
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from models.layers.functional import fill
from models.requests import Request
from models.session import RobotSession
from rl.host import rollout
from rl.remote.cluster import STARTING, Lost, RayWorker, load_ray, unstarted
from sim.protocol import Observation

ATTEMPTS = 4
"""Attempts of the same request to a worker before the run ends."""


class WarmActor(rollout.Actor, Protocol):
    """An actor that can get ready before it is asked."""

    def warm(self, params: Any) -> None:
        """Compiles what `answer` needs."""


class Stored(NamedTuple):
    """Parameters in Ray's store: leaves that are not trained, and a version's trained leaves."""

    base: Any
    moving: Any


def store(params: Any) -> Any:
    """Puts parameters into Ray's store; `Weights` takes this as its `stage`."""
    return load_ray().put(jax.device_get(params))


class Answerer:
    """The actor's end on the other host."""

    def __init__(self) -> None:
        self._actor: WarmActor | None = None
        self._base: Any = None
        self._params: Any = None
        self._held = ("", "")

    def start(self, make: Callable[[], WarmActor]) -> tuple[str, int]:
        """Builds the actor that answers; returns its host and process id."""
        self._actor = make()
        return socket.gethostname(), os.getpid()

    def hold(self, stored: Stored) -> None:
        """Takes a version over; for the first one, also compiles.

        Raises:
          Lost: `start` was not called in this process.
        """
        if self._actor is None:
            raise unstarted()
        base, moving = (ref.hex() for ref in stored)
        if (base, moving) == self._held:
            return
        ray, fresh = load_ray(), self._params is None
        if base != self._held[0]:
            self._base = jax.device_put(ray.get(stored.base))
        self._params = None
        self._params = fill(jax.device_put(ray.get(stored.moving)), self._base)
        self._held = base, moving
        if fresh:
            self._actor.warm(self._params)

    def answer(self, stored: Stored, requests: bytes) -> bytes:
        """Answers like `rl.host.rollout.Actor`, pickled, so that keeping an answer does not keep
        Ray's memory."""
        self.hold(stored)
        assert self._actor is not None
        return pickle.dumps(self._actor.answer(self._params, pickle.loads(requests)))


class RemoteActor:
    """`rl.host.rollout.Actor` of a worker on whichever host has room; its parameters are `Stored`.

    `start` begins to build the actor there, and `ready` waits for it; nothing waits for the first
    `hold`, so several workers start and compile at the same time.

    Args:
      patience: seconds in which it must answer.

    Attributes:
      restarts: number of times that the worker was replaced.
    """

    def __init__(
        self, name: str, *, cpus: float = 1.0, gpus: float = 0.0, patience: float = 300.0
    ) -> None:
        self.restarts = 0
        self._name, self._patience = name, patience
        self._worker = RayWorker(name, Answerer, cpus=cpus, gpus=gpus)

    def start(self, make: Callable[[], WarmActor], local: rollout.Actor) -> None:
        """Begins to build the actor that answers there.

        Args:
          make: makes the actor; called there.
          local: prepares observations here; the actor has the same sizes.
        """
        self._make, self.sizes, self._local = make, local.sizes, local
        self._starting = self._worker.start(make)
        self._up = False

    def ready(self) -> None:
        """Waits until the worker is there.

        Raises:
          ValueError: there is no room for it, or it does not start.
        """
        host, self.process = self._worker.started(self._starting)
        self._worker.name = f"{self._name} ({host}, process {self.process})"

    def session(self) -> RobotSession:
        """A session on this host."""
        return self._local.session()

    def prepare(
        self, observation: Observation, prompt: str, key: tuple[int, int], session: RobotSession
    ) -> Request:
        """Prepares the observation on this host."""
        return self._local.prepare(observation, prompt, key, session)

    def hold(self, moving: Any, base: Any) -> Stored:
        """Gives the worker a version in Ray's store; `WeightsReader` takes this as its `join`.

        Raises:
          ValueError: there is no worker in time.
          BaseException: what was raised there, see `RayWorker.result`.
        """
        stored = Stored(base, moving)
        if self._up:
            self._ask("hold", STARTING, stored)
        else:
            self._worker.call("hold", stored)
        return stored

    def answer(self, params: Stored, requests: Sequence[Request]) -> Sequence[Any]:
        """Answers like `rl.host.rollout.Actor`.

        Raises:
          BaseException: as `hold`.
        """
        return pickle.loads(self._ask("answer", self._patience, params, pickle.dumps(requests)))

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _ask(self, method: str, seconds: float, stored: Stored, *given: bytes) -> Any:
        worker = self._worker
        for _ in range(ATTEMPTS):
            try:
                if not self._up:
                    self.ready()
                    worker.result(worker.call("hold", stored), STARTING)
                    self._up = True
                return worker.result(worker.call(method, stored, *given), seconds)
            except Lost as lost:
                why = lost
                self._up = False
                self._starting = worker.start(self._make)
                self.restarts += 1
        raise ValueError(
            f"{worker.name} {why}, {ATTEMPTS} times in a row; see its log in Ray's session."
        )
