"""A toy for the host runtime, in numpy: a policy that sees a disc and is disturbed by noise, a
learner whose updates depend on every number it was given, and slots that take their time."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from models.inputs.packed_batch import Sample
from models.requests import Request
from models.session import RobotSession
from rl.records import SampledChunk, Ticket
from sim.environments.device_slots import DeviceSlots
from sim.protocol import Observation, Outcome, Start
from tests.helpers.sim.point_world import PointWorld, expert, seeing_policy

HORIZON = 4


def starts(ticket: int, attempt: int = 0) -> Start:
    return Start("points", 17 + 5 * ticket + 7919 * attempt)


class Policy:
    """`rl.host.rollout.Actor`: goes where the prompt says, plus noise of the key and the
    parameters' bias. `pause` is called before each batch."""

    sizes = (1, 2, 4)

    def __init__(self, pause=lambda: None) -> None:
        self.pause = pause

    def session(self):
        return RobotSession()

    def prepare(self, observation, prompt, key, session=None):
        sample = Sample(
            images=tuple(observation.images),
            text=np.frombuffer(prompt.encode(), np.uint8).astype(np.int32),
            state=observation.state,
            actions=np.zeros((HORIZON, 3), np.float32),
            action_mask=np.zeros((HORIZON, 3), bool),
        )
        return Request(sample, observation.state, np.array(key, np.uint32))

    def warm(self, params):
        """Does nothing: nothing is to compile."""

    def answer(self, params, requests):
        self.pause()
        return [self.chunk(np.asarray(params["bias"]), request) for request in requests]

    def chunk(self, bias, request):
        noise = np.random.default_rng(request.key.tolist()).normal(size=(HORIZON, 2))
        seen = Observation(np.stack(request.sample.images)[None], request.state[None])
        prompt = bytes(request.sample.text.astype(np.uint8)).decode()
        actions = np.clip(self.wanted(seen, prompt) + 0.7 * noise + bias, -1, 1)
        actions = actions.astype(np.float32)
        padded = np.pad(actions, ((0, 0), (0, 1)))
        drawn = SampledChunk(
            actions=padded,
            before=padded[None],
            after=padded[None],
            at=np.zeros(1, np.int32),
            log_prob=np.zeros_like(padded),
            value=np.float32(bias.sum() + request.state.sum()),
        )
        return actions, drawn

    def wanted(self, seen, prompt):
        return seeing_policy(seen, [prompt], np.zeros((1, 2)))[0]


class Blind(Policy):
    """Its noise is all it has."""

    def wanted(self, seen, prompt):
        return np.zeros((HORIZON, 2))


@dataclass
class Learner:
    """`rl.host.loop.Learner` of tickets; `rate` 0 changes nothing."""

    rate: float = 0.1
    pause: object = None
    params: dict = field(default_factory=lambda: {"bias": np.zeros(2, np.float32)})
    tickets: list[list[Ticket]] = field(default_factory=lambda: [[]])
    total: np.ndarray = field(default_factory=lambda: np.zeros(2, np.float32))

    def add(self, ticket):
        if self.pause:
            self.pause()
        self.tickets[-1].append(ticket)
        for trajectory in ticket.trajectories:
            for decision in trajectory.decisions:
                reward = decision.reward.sum() - 0.1
                self.total += reward * decision.drawn.actions[:, :2].mean(0)

    def update(self):
        if self.pause:
            self.pause()
        params = {"bias": self.params["bias"] + np.float32(self.rate) * self.total}
        self.params["bias"][:] = np.nan  # as if donated
        self.params, self.total = params, np.zeros(2, np.float32)
        self.tickets.append([])
        return {"norm": float(np.linalg.norm(params["bias"]))}


class Restless:
    """`Slots` over points whose answers take random times, up to `longest` seconds.

    Args:
      fails: (start, attempt) -> whether the simulator fails in it.
      spoil: outcome -> the outcome that is told instead.
    """

    lockstep = False

    def __init__(self, count, seed=0, longest=0.002, fails=None, spoil=lambda start, out: out):
        self.slots = [DeviceSlots(PointWorld(), 1, expert) for _ in range(count)]
        self.spec, self.count, self.longest = self.slots[0].spec, count, longest
        self.rng, self.fails, self.spoil = np.random.default_rng(seed), fails, spoil
        self.ready: dict[int, float] = {}
        self.starts: dict[int, Start] = {}
        self.attempts: dict[Start, int] = {}
        self.woken = threading.Event()
        self.closed = False
        self.threads: set[int] = set()

    def begin(self, slot, start):
        self.starts[slot] = start
        self.attempts[start] = self.attempts.get(start, 0) + 1
        self.slots[slot].begin(0, start)
        self._told(slot)

    def send(self, slot, actions, film=False):
        self.slots[slot].send(0, actions, film)
        self._told(slot)

    def poll(self, timeout=None):
        self.threads.add(threading.get_ident())
        while self.ready:
            due = min(self.ready, key=self.ready.__getitem__)
            if self.woken.wait(max(self.ready[due] - time.monotonic(), 0)):
                self.woken.clear()
                break
            if self.ready[due] <= time.monotonic():
                del self.ready[due]
                return [self._outcome(due)]
        return []

    def wake(self):
        self.woken.set()

    def close(self):
        self.closed = True

    def _told(self, slot):
        assert slot not in self.ready
        self.threads.add(threading.get_ident())
        self.ready[slot] = time.monotonic() + self.rng.random() * self.longest

    def _outcome(self, slot):
        (outcome,) = self.slots[slot].poll()
        start = self.starts[slot]
        if len(outcome.reward) and self.fails and self.fails(start, self.attempts[start]):
            nothing = Observation(np.zeros(0, np.uint8), np.zeros(0, np.float32))
            return Outcome(slot, nothing, 0, np.zeros(0, np.float32), error="it fell over")
        return self.spoil(start, outcome._replace(slot=slot))
