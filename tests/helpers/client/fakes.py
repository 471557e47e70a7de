"""A clock, a server and a robot without time, threads or sockets, for the control loop's tests."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from chiliad_client import ServerAnswer, ServerSession

DIMS = 2


class FakeClock:
    """Time passes when somebody sleeps, or says so."""

    def __init__(self):
        self.time = 1000.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


@dataclass
class FakeRobot:
    """Absolute targets that it reaches at once. `slow`: seconds of observing, by the number of the
    observation."""

    clock: FakeClock
    at: np.ndarray = field(default_factory=lambda: np.zeros(DIMS))
    sent: list = field(default_factory=list)
    slow: dict = field(default_factory=dict)
    relative: bool = False
    observed: int = 0

    def observe(self):
        self.clock.time += self.slow.get(self.observed, 0.0)
        self.observed += 1
        return {"observation/state": self.at.astype(np.float32)}

    def act(self, action):
        self.sent.append((self.clock.time, np.array(action)))
        self.at = self.at + action if self.relative else np.array(action)

    def hold(self, seen, last):
        if self.relative:
            return np.zeros(DIMS)
        return seen["observation/state"] if last is None else last


class FakeServer:
    """Answers after `delay` seconds with `chunk(message)`; keeps the rules of our server's
    real-time chunking, as tools/serving/engine.py has them, and fails the test if the client breaks
    one.

    `lose` drops the connection and what is under way, `open` makes a new one.
    """

    url = "ws://fake:8000"

    def __init__(self, clock, chunk, delay=0.0, chunking=True, metadata=None):
        self.clock, self.chunk, self.delay, self.chunking = clock, chunk, delay, chunking
        self.metadata = {
            "inputs": {
                "observation/state": {"dtype": "float32", "shape": [DIMS]},
                "prompt": {"dtype": "str"},
            },
            "actions": {"shape": [0, DIMS]},
            "chunking": ["executed", "committed"] if chunking else [],
            **(metadata or {}),
        }
        self.number = self.opened = 0
        self.session, self.last = None, None
        self.messages, self.coming = [], deque()
        self.refuse = None
        self.open()

    def open(self):
        self.opened += 1
        self.last = None
        self.session = ServerSession(self.opened, self.metadata)

    def lose(self):
        self.session = None
        self.coming.clear()

    def ask(self, message):
        self.number += 1
        if self.session is None:
            return self.number
        assert not self.coming, "One question at a time."
        self.messages.append((self.clock.time, message))
        if self.refuse is not None:
            self.coming.append((self.clock.time, ServerAnswer(self.number, {}, self.refuse)))
            return self.number
        actions = np.asarray(self.chunk(message), np.float32)
        if "executed" in message:
            assert self.chunking
            assert self.last is not None
            left = self.last[message["executed"] :]
            assert 0 <= message["committed"] <= len(left)
            actions[: message["committed"]] = left[: message["committed"]]
        self.last = actions
        delay = self.delay(self.number) if callable(self.delay) else self.delay
        answer = ServerAnswer(self.number, {"actions": actions})
        self.coming.append((self.clock.time + delay, answer))
        return self.number

    def answer(self):
        if self.coming and self.coming[0][0] <= self.clock.time + 1e-9:
            return self.coming.popleft()[1]
        return None
