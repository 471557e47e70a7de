"""One policy for all clients: each request is prepared by itself, and requests that wait at the
same time run as one batch.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
from jaxtyping import Float

from models import Policy
from models.batcher import Batcher, Statistics
from models.files.terminal import logger
from models.flow.realtime_chunking import Chunking
from models.inputs.observation import CONTROLS, Inputs
from models.requests import Request
from models.robot_policy import RobotPolicy
from models.session import RobotSession
from tools.serving.client import Reply
from tools.serving.inputs import ClientMessage, client_inputs, read_message
from tools.serving.limits import Limits
from tools.serving.metrics import Metrics
from tools.serving.state_range import UNUSUAL, distances, training_range

log = logger(__name__)


class Engine(AbstractContextManager["Engine"]):
    """Answers requests with `policy`, up to `policy.sizes[-1]` at once.

    Args:
      deadline: seconds that a request may wait for others to join it.
      capacity: requests that may wait.
      pairs: names that clients use for their observations, see `client_inputs`.
      chunking: how a client's last chunk may be continued (real-time chunking), if at all.
      state_range: see `Limits`.

    Raises:
      ValueError: the policy has no preparation, `pairs` do not fit it, or it was not trained to
        continue chunks as `chunking` says.
    """

    def __init__(
        self,
        policy: Policy,
        metrics: Metrics,
        *,
        deadline: float,
        capacity: int,
        pairs: Sequence[str] = (),
        chunking: Chunking = "none",
        state_range: float = Limits.state_range,
    ) -> None:
        if chunking not in ("none", policy.continues):
            policy = replace(policy, chunking=chunking)
        self._policy, self._chunking, self.metrics = policy, chunking != "none", metrics
        self._robot = robot = RobotPolicy.for_clients(policy)
        self.inputs: Inputs = client_inputs(policy.inputs, pairs)
        remembers = policy.session(continues=self._chunking).remembers
        controls = CONTROLS if self._chunking else CONTROLS[:1] if remembers else ()
        metadata = {
            "robot": robot.name,
            "inputs": self.inputs.expected,
            "actions": {"dtype": "float32", "shape": list(robot.chunk)},
            "chunking": list(controls),
            "picture": policy.model.config.edge,
        }
        if chunking == "trained":
            metadata["most_committed"] = policy.model.config.rtc_max_delay
        self.metadata: Mapping[str, Any] = metadata
        self._answering = policy
        self._state_range = state_range
        self._unusual: WeakSet[RobotSession] = WeakSet()
        """Robots whose state the log already reports as far from the training data."""
        self._lock = threading.Lock()
        self._clients = self._waiting = 0
        self._batcher: Batcher[Request, Reply] = Batcher(
            self._run,
            sizes=policy.sizes,
            deadline=deadline,
            capacity=max(capacity, policy.sizes[-1]),
            outstanding=lambda: self._clients - self._waiting,
        )

    def start(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compiles the least that can answer every request: the smallest batch with the longest
        text. The engine answers with it until `warm` is done. `progress` is called as by
        `Policy.warm`."""
        longest = self._robot.processor.text_limit
        few = self._policy.varied(sizes=self._policy.sizes[:1], shortest=longest)
        self._warm(few, progress)
        self._answering = few

    def warm(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compiles everything that clients can ask for, as `start` does, and answers with it from
        then on."""
        self._warm(self._policy, progress)
        self._answering = self._policy

    def _warm(self, policy: Policy, progress: Callable[[int, int], None]) -> None:
        shown = len(self.inputs.cameras)
        counts = range(max(shown - len(self.inputs.optional), 1), shown + 1)
        for turn, cameras in enumerate(counts):

            def report(done: int, of: int, turn: int = turn) -> None:
                progress(turn * of + done, len(counts) * of)

            policy.warm(guided=self._chunking, cameras=cameras, progress=report)

    def join(self, number: int) -> RobotSession:
        """Adds a client, for whose request a batch may wait."""
        with self._lock:
            self._clients += 1
        return self._policy.session(number, continues=self._chunking)

    def leave(self) -> None:
        """Removes a client; batches no longer wait for it."""
        with self._lock:
            self._clients -= 1
        self._batcher.recheck()

    def read(self, message: Mapping[str, Any], session: RobotSession) -> Request:
        """A client's message as the policy reads it.

        Raises:
          ValueError: it does not fit the policy.
        """
        asked = read_message(self.inputs, message)
        if asked.observation.state is not None:
            self._check_state(asked.observation.state, session)
        self._check_controls(asked)
        (request,) = self._policy.prepare(
            [asked.observation],
            session=session,
            executed=asked.executed,
            committed=asked.committed or 0,
        )
        return request

    def submit(self, request: Request) -> Future[Reply]:
        """The answer, available when the request's batch has run."""
        with self._lock:
            self._waiting += 1
        try:
            future = self._batcher.submit(request, timeout=0)
        except BaseException:
            self._answered()
            raise
        future.add_done_callback(self._answered)
        return future

    @property
    def statistics(self) -> Statistics:
        """Statistics of its batches."""
        return self._batcher.statistics()

    def close(self) -> None:
        """Returns when all submitted requests are answered."""
        self._batcher.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_state(self, state: Float[np.ndarray, " s"], session: RobotSession) -> None:
        robot = self._robot.embodiment
        known = robot.converted(np.asarray(state, np.float64))
        away = distances(robot.state, known)
        d = int(away.argmax())
        self.metrics.state_distance.observe(away[d])
        low, high = training_range(robot.state, d)
        told = f"{state[d]:g}"
        if robot.adapter:
            told += f" ({known[d]:g} in the units of training, by the adapter '{robot.adapter}')"
        if self._state_range and away[d] > self._state_range:
            raise ValueError(
                f"State dim {d} is {told}, {away[d]:.3g} times as far out as the training "
                f"data, which lie about {low:g}..{high:g}; check its units and order."
            )
        if away[d] > UNUSUAL and session not in self._unusual:
            self._unusual.add(session)
            log.warning(
                *("client %d: state dim %d is %s, training data lie about %g..%g",),
                *(session.number, d, told, low, high),
            )

    def _check_controls(self, asked: ClientMessage) -> None:
        given = [name for name in CONTROLS if getattr(asked, name) is not None]
        if not set(given) <= set(self.metadata["chunking"]):
            raise ValueError(
                "This server does not continue chunks; start it with --chunking guided, or "
                f"leave out {' and '.join(given)}."
            )
        if given == ["committed"]:
            raise ValueError(
                "'committed' needs 'executed', the steps already executed of the last chunk."
            )

    def _answered(self, future: Future[Reply] | None = None) -> None:
        with self._lock:
            self._waiting -= 1

    def _run(self, requests: list[Request]) -> list[Reply]:
        began, policy = time.monotonic(), self._answering
        requests = policy.with_subtasks(requests)
        chunks = policy.sample_actions(requests)
        seconds = time.monotonic() - began
        self.metrics.batch_rows.observe(len(requests))
        self.metrics.batch_seconds.observe(seconds)
        if not policy.predicts_subtasks:
            return [Reply(chunk, seconds) for chunk in chunks]
        subtasks = (policy.subtask(request) for request in requests)
        return [Reply(chunk, seconds, text) for chunk, text in zip(chunks, subtasks, strict=True)]
