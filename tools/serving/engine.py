"""One policy for all clients: each request is prepared by itself, and whatever waits together runs
as one batch.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from models import Policy
from models.batcher import Batcher
from models.policy import Request
from tools.serving.inputs import CONTROLS, Inputs, inputs_of
from tools.serving.metrics import Metrics
from tools.serving.session import Answer, Session


class Engine:
    """Answers requests with `policy`, up to `policy.sizes[-1]` at once.

    Args:
      deadline: seconds that a request may wait for others to join it.
      capacity: requests that may wait.
      pairs: how clients spell their observations, see `inputs_of`.

    Raises:
      ValueError: the policy has no preparation, or `pairs` do not fit it.
    """

    def __init__(
        self,
        policy: Policy,
        metrics: Metrics,
        *,
        deadline: float,
        capacity: int,
        pairs: Sequence[str] = (),
    ) -> None:
        if policy.processor is None:
            raise ValueError(
                "The checkpoint came without a processor (scales and tokenizer), so it cannot be "
                "asked in a robot's units; serve one that was trained or converted here."
            )
        robot = policy.processor.embodiments[policy.embodiment]
        reads_state = policy.processor.state_input != "none" or bool(robot.relative)
        self.inputs: Inputs = inputs_of(robot, reads_state, pairs)
        self.metadata: Mapping[str, Any] = {
            "robot": robot.name,
            "inputs": self.inputs.expected,
            "actions": {
                "dtype": "float32",
                "shape": [policy.processor.horizon, len(robot.actions.offset)],
            },
            "chunking": list(CONTROLS),
        }
        self._policy, self.metrics = policy, metrics
        self._lock = threading.Lock()
        self._clients = self._waiting = 0
        self._batcher: Batcher[Request, Answer] = Batcher(
            self._run,
            sizes=policy.sizes,
            deadline=deadline,
            capacity=max(capacity, policy.sizes[-1]),
            outstanding=lambda: self._clients - self._waiting,
        )

    def join(self) -> None:
        """One more client, for whose request a batch may wait."""
        with self._lock:
            self._clients += 1

    def leave(self) -> None:
        """Nobody needs to wait for this client any more."""
        with self._lock:
            self._clients -= 1
        self._batcher.recheck()

    def read(self, message: Mapping[str, Any], session: Session) -> Request:
        """A client's message as the policy reads it.

        Raises:
          ValueError: it does not fit the policy.
        """
        observation = self.inputs.read(message)
        keys = np.array([[session.number, session.requests]])
        (request,) = self._policy.prepare(observation, keys)
        return request

    def submit(self, request: Request) -> Future[Answer]:
        """The answer, when the request's batch has run."""
        with self._lock:
            self._waiting += 1
        future = self._batcher.submit(request, timeout=0)
        future.add_done_callback(self._answered)
        return future

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        """Returns when all that was submitted is answered."""
        self._batcher.close()

    def _answered(self, future: Future[Answer]) -> None:
        with self._lock:
            self._waiting -= 1

    def _run(self, requests: list[Request]) -> list[Answer]:
        began = time.monotonic()
        chunks = self._policy.answer(requests)
        seconds = time.monotonic() - began
        self.metrics.batch_rows.observe(len(requests))
        self.metrics.batch_seconds.observe(seconds)
        return [Answer(chunk, seconds) for chunk in chunks]
