"""Acting over `Slots` without a barrier: each slot's observation goes to the policy when it
arrives, its chunk goes to the slot when it is ready, and the next episode begins when admission
allows it.

One thread serves all slots of a `Slots`, which only one may use. Random draws derive from an
episode's start, ticket and member, so its trajectory is the same in any slot, beside any others.
"""

import threading
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from models.batcher import Batcher
from models.inputs.packed_batch import Sample
from models.requests import Request
from models.session import RobotSession
from parallel.hosts.watchdog import alive
from rl.host.staleness import GroupMember, StalenessControl
from rl.host.timeline import Cause, Timeline
from rl.host.trajectory_buffer import TrajectoryBuffer
from rl.records import Decision, SampledChunk, Trajectory
from rl.rewards import Reward
from sim.acting import NotFinite
from sim.protocol import Observation, Outcome, Slots, Spec

RERUNS = 3
"""Maximum number of restarts of an episode whose simulator failed."""


class Actor(Protocol):
    """A policy that draws chunks at random."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the batches that it computes."""

    def session(self) -> RobotSession:
        """The state to keep for an episode between its requests."""

    def prepare(
        self, observation: Observation, prompt: str, key: tuple[int, int], session: RobotSession
    ) -> Request:
        """Prepares one observation ([c h w 3] and [s]) of the episode's step `key[1]`; all
        randomness of its chunk derives from the key."""

    def answer(
        self, params: Any, requests: Sequence[Request]
    ) -> Sequence[tuple[Float[np.ndarray, "h a"], SampledChunk]]:
        """Answers each request with a chunk in the robot's units, and how it was drawn (without a
        batch axis)."""


class InferenceRequest(NamedTuple):
    """A request to the batcher: an observation, and the oldest version that may answer it."""

    request: Request
    oldest: int


class InferenceReply(NamedTuple):
    """The batcher's answer: a chunk in the robot's units, its draws, and the version."""

    actions: Float[np.ndarray, "h a"]
    drawn: SampledChunk
    version: int


def key_of(place: GroupMember, step: int) -> tuple[int, int]:
    """32-bit words of the key for a policy's draws at a step of an episode: as `Start.key`, but
    members of a group differ, and so do tickets that share a start."""
    start = place.start
    name = f"{start.seed} {start.task} {place.ticket} {place.member}"
    return zlib.crc32(name.encode()), step


class Rollout:
    """Acts in all slots of one `Slots`, on the thread that calls `run`.

    Args:
      slots: used by that thread alone.
      batchers: answer the slots; batcher i of n answers those whose number is i modulo n. They may
        serve other rollouts too.
      actor: prepares observations.
      replan_steps: steps executed of each chunk.
      reward: see `rl.rewards`.
      values: the policy has a value head, which is asked about the last observation if time ran
        out.
      together: no slot continues before all have reported and been answered, as in synchronous RL;
        slots that move in lockstep always do.
      first: number of the first slot in the timeline.
    """

    def __init__(
        self,
        slots: Slots,
        batchers: Sequence[Batcher[InferenceRequest, InferenceReply]],
        actor: Actor,
        staleness_control: StalenessControl,
        trajectories: TrajectoryBuffer,
        *,
        replan_steps: int,
        reward: Reward,
        values: bool,
        together: bool,
        timeline: Timeline,
        first: int,
    ) -> None:
        self._slots, self._batchers, self._actor = slots, batchers, actor
        self._admission, self._arrivals = staleness_control, trajectories
        self._replan_steps, self._reward, self._values = replan_steps, reward, values
        self._together = together or slots.lockstep
        self._timeline, self._first = timeline, first
        self._free = deque(range(slots.count))
        self._acting: dict[int, _Episode] = {}
        self._working = 0
        self._coming = [0] * len(batchers)
        self._asking: list[int] = []
        self._waiting = 0
        self._answered: list[tuple[int, InferenceReply]] = []
        self._valuing: list[tuple[_Episode, Outcome, Future[InferenceReply]]] = []
        self._inbox: deque[tuple[int, Future[InferenceReply]]] = deque()
        self._news = threading.Event()
        self._stopped = self._over = False

    def coming(self, batcher: int) -> int:
        """Number of slots at work that may ask this batcher next; callable from any thread."""
        return self._coming[batcher]

    def run(self) -> None:
        """Acts until no ticket is left or `stop` is called, which drops the episodes under way.

        Raises:
          ValueError: a reward, an observation or an action is not finite, an episode is longer than
            the slots' `max_steps`, a simulator fails again and again, or what the slots raise.
          BaseException: what the policy raises, or what admission was closed with.
        """
        try:
            while not self._stopped:
                self._news.clear()
                self._collect()
                if not (self._together and self._waiting):
                    self._send()
                self._admit()
                if not (self._together and self._working):
                    self._ask()
                if self._working:
                    for outcome in self._slots.poll():
                        self._take(outcome)
                        alive()
                elif self._over and not self._acting and not self._valuing:
                    return
                else:
                    self._news.wait()
        finally:
            left = [*self._acting.values(), *(episode for episode, _, _ in self._valuing)]
            self._coming = [0] * len(self._batchers)
            for episode in left:
                self._arrivals.drop(episode.place)

    def wake(self) -> None:
        """Signals news (a version, or an answer); callable from any thread."""
        self._news.set()
        self._slots.wake()

    def stop(self) -> None:
        """Ends `run`; callable from any thread."""
        self._stopped = True
        self.wake()

    def _collect(self) -> None:
        """Collects the answers that have come since the last call."""
        while self._inbox:
            slot, future = self._inbox.popleft()
            self._waiting -= 1
            self._answered.append((slot, future.result()))
        for entry in [entry for entry in self._valuing if entry[2].done()]:
            episode, outcome, future = entry
            value = float(future.result().drawn.value)
            self._valuing.remove(entry)
            assert episode.request is not None
            self._finish(episode, outcome, value, episode.request.sample)

    def _send(self) -> None:
        for slot, answered in self._answered:
            episode = self._acting[slot]
            actions = np.asarray(answered.actions)[: self._replan_steps]
            if len(actions) < self._replan_steps or not np.isfinite(actions).all():
                raise NotFinite(
                    f"{episode.where}: version {answered.version} of the policy returned actions "
                    f"of shape {np.shape(answered.actions)}, which are not all finite, or fewer "
                    f"than replan_steps = {self._replan_steps}; check what it learnt from."
                )
            episode.answered = answered
            self._tell(slot, "act")
            self._slots.send(slot, actions)
        self._answered = []

    def _admit(self) -> None:
        """Begins episodes in slots that are free."""
        ended = self._admission.ended
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            place = self._admission.take(self._first + slot, self._slots.spec.tasks)
            if place is not None:
                self._arrivals.begin(place)
                self._begin(slot, _Episode(place, self._actor.session()))
                continue
            self._free.append(slot)
            self._over = ended
            if ended:
                self._mark(slot, None)
            else:
                self._mark(slot, "wait for the learner", "staleness")

    def _begin(self, slot: int, episode: "_Episode") -> None:
        self._acting[slot] = episode
        self._tell(slot, "begin")
        self._slots.begin(slot, episode.place.start)

    def _tell(self, slot: int, what: str) -> None:
        self._working += 1
        self._coming[self._whose(slot)] += 1
        self._mark(slot, what)

    def _ask(self) -> None:
        """Submits new observations to the policy. A slot counts as coming until the batcher has its
        observation, so that no batch leaves without observations that come at the same time."""
        for slot in self._asking:
            episode = self._acting[slot]
            self._mark(slot, "wait for the policy", "inference")
            self._waiting += 1
            future = self._submit(slot, episode)
            future.add_done_callback(partial(self._hear, slot))
            self._coming[self._whose(slot)] -= 1
        self._asking = []
        for batcher in self._batchers:
            batcher.recheck()

    def _whose(self, slot: int) -> int:
        """Index of the slot's batcher."""
        return (self._first + slot) % len(self._batchers)

    def _submit(self, slot: int, episode: "_Episode") -> "Future[InferenceReply]":
        assert episode.seen is not None
        key = key_of(episode.place, episode.steps)
        given = episode.seen, episode.prompt, key, episode.session
        episode.request = self._actor.prepare(*given)
        oldest = self._admission.oldest(episode.place.ticket)
        return self._batchers[self._whose(slot)].submit(InferenceRequest(episode.request, oldest))

    def _hear(self, slot: int, future: "Future[InferenceReply]") -> None:
        """Receives an answer, on the batcher's thread."""
        self._inbox.append((slot, future))
        self.wake()

    def _take(self, outcome: Outcome) -> None:
        slot, spec = outcome.slot, self._slots.spec
        episode = self._acting[slot]
        self._working -= 1
        if outcome.error is not None:
            self._coming[self._whose(slot)] -= 1
            if episode.reruns == RERUNS:
                raise ValueError(
                    f"{episode.where}: the simulator failed {RERUNS + 1} times in this episode; "
                    f"its last error: {outcome.error}"
                )
            self._arrivals.rerun(episode.place)
            again = _Episode(episode.place, self._actor.session(), episode.reruns + 1)
            self._begin(slot, again)
            return
        episode.add(outcome, spec, self._reward)
        if not episode.prompt:
            episode.prompt = spec.wording(outcome.goal, episode.place.start.seed)
        if not outcome.ended:
            if episode.steps >= spec.max_steps:
                raise ValueError(
                    f"{episode.where}: '{spec.name}' did not end the episode within its max_steps "
                    f"= {spec.max_steps}."
                )
            self._asking.append(slot)
            self._mark(slot, "wait for the slots", "environment")
            return
        self._coming[self._whose(slot)] -= 1
        future = self._submit(slot, episode) if outcome.truncated and self._values else None
        del self._acting[slot]
        self._free.append(slot)
        self._mark(slot, None)
        if future is None:
            self._finish(episode, outcome)
        else:
            self._valuing.append((episode, outcome, future))
            future.add_done_callback(lambda _: self.wake())

    def _finish(
        self,
        episode: "_Episode",
        outcome: Outcome,
        value: float = 0.0,
        last: Sample | None = None,
    ) -> None:
        trajectory = Trajectory(
            start=episode.place.start,
            member=episode.place.member,
            decisions=tuple(episode.decisions),
            terminated=outcome.terminated,
            final_value=value,
            success=episode.success,
            last=last,
        )
        self._arrivals.finish(episode.place, trajectory)

    def _mark(self, slot: int, what: str | None, cause: Cause | None = None) -> None:
        self._timeline.mark(f"slot {self._first + slot}", what, cause)


@dataclass
class _Episode:
    """An episode under way."""

    place: GroupMember
    session: RobotSession
    reruns: int = 0
    prompt: str = ""
    steps: int = 0
    success: bool = False
    seen: Observation | None = None
    request: Request | None = None
    """The last request to the policy."""
    answered: InferenceReply | None = None
    """The answer to it, while its chunk is being executed."""
    decisions: list[Decision] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Description of the place for errors."""
        return f"Task '{self.place.start.task}', seed {self.place.start.seed}, step {self.steps}"

    def add(self, outcome: Outcome, spec: Spec, of_steps: Reward) -> None:
        """Records the outcome of the last chunk, or of the beginning."""
        for what, found in (("reward", outcome.reward), ("state", outcome.observation.state)):
            if not np.isfinite(found).all():
                raise ValueError(
                    f"{self.where}: '{spec.name}' returned the {what} {np.asarray(found).tolist()} "
                    f"after this step; expected finite numbers, so check how the task computes it."
                )
        self.seen = outcome.observation
        suite = np.asarray(outcome.reward, np.float32)
        reached = np.zeros_like(suite)
        reached[-1:] = outcome.success and not self.success
        reward = np.asarray(of_steps(suite, reached), np.float32)
        self.success |= outcome.success
        if self.answered is None:
            return
        assert self.request is not None
        count, sample = len(outcome.reward), self.request.sample
        acted = np.zeros(sample.action_mask.shape, bool)
        acted[:count, : len(spec.action_names)] = True
        self.decisions.append(
            Decision(
                sample=replace(sample, action_mask=acted),
                drawn=self.answered.drawn,
                version=self.answered.version,
                reward=reward,
            )
        )
        self.steps += count
        self.answered = None
