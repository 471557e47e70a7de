"""An RL run in simulated time: how fast it would be with hundreds of workers that you do not have,
and what they would wait for.

A discrete-event model of what `rl.host.loop` does: the same tickets, admission, batching and
streaming, with costs and latencies that the user gives or measures. The modes are those of
RL-VLA3's ablation (arXiv 2602.05765, Table 1).
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rl.host.timeline import Summary, Timeline
from rl.simulated.latency import Constant, Latencies, Latency


class Mode(NamedTuple):
    """Mode of a run: which waits it avoids."""

    disaggregated: bool
    """Inference and learner have devices of their own; otherwise all do one, then the other."""
    ahead: bool = False
    """Level 2: rollouts run ahead of the learner by the run's `staleness`, otherwise by nothing."""
    by_slot: bool = False
    """Level 1: slots are answered as they report, otherwise when all have."""
    streamed: bool = False
    """Level 3: gradients of a step's tickets are computed as these complete, otherwise when all
    have."""


MODES: dict[str, Mode] = {
    "synchronous colocated": Mode(disaggregated=False),
    "synchronous disaggregated": Mode(disaggregated=True),
    "+ level 2": Mode(True, ahead=True),
    "+ levels 1-2": Mode(True, ahead=True, by_slot=True),
    "all three": Mode(True, ahead=True, by_slot=True, streamed=True),
}


@dataclass(frozen=True)
class Workload:
    """A run to simulate; times are in seconds. Names are those of `rl.config`."""

    slots: int
    latencies: Latencies
    inference: Mapping[int, float]
    """Seconds of a batch on one device, by size; fewer rows are padded to the next."""
    gradient: float
    """Seconds of a micro-batch on one device."""
    update: float
    """Seconds from the last gradient of a step until rollouts have its parameters."""
    tickets: int
    group: int = 1
    micro: int = 64
    staleness: int = 1
    deadline: float = 0.02
    prepare: float = 0.0
    """Seconds to prepare one observation, on the one thread that serves all slots."""
    tell: float = 0.0
    """Seconds to send one slot actions or a start, on that thread."""
    wake: float = 0.0
    """Seconds until a waiting thread continues: that of the slots once a batch is drawn, the
    policy's once a batch is due."""
    replan_steps: int = 4
    chunks: Latency = field(default_factory=lambda: Constant(16))
    """Chunks of an episode, rounded up, at least 1: a distribution of counts, not of seconds."""
    inference_devices: int = 1
    learner_devices: int = 1

    def __post_init__(self) -> None:
        counts = (self.slots, self.tickets, self.group, self.micro, self.replan_steps)
        if min(*counts, self.inference_devices, self.learner_devices) < 1:
            raise ValueError(
                f"slots, tickets, group, micro, replan_steps and devices are {counts}, "
                f"{self.inference_devices} and {self.learner_devices}: expected at least 1 of each."
            )
        own = self.deadline, self.prepare, self.tell, self.wake
        times = (self.gradient, self.update, *own, *self.inference.values())
        if not self.inference or min(self.inference) < 1 or not min(times) >= 0:
            raise ValueError(
                f"inference is {dict(self.inference)}, gradient {self.gradient} s, update "
                f"{self.update} s, deadline, prepare, tell and wake {own} s: expected a batch size "
                "of at least 1 and no negative times."
            )
        if self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}, expected at least 0.")


@dataclass(frozen=True)
class Simulated:
    """Result of a run, counted after its first updates."""

    seconds: float
    updates: int
    steps_per_second: float
    """Control steps of all environments."""
    samples_per_second: float
    """Decisions learnt from."""
    lag: int
    """The most updates between a decision and the update that learnt from it."""
    use: Summary
    """Use of lanes "slot i", "inference i" and "learner i"."""
    timeline: Timeline


def simulate(
    workload: Workload,
    mode: Mode,
    *,
    updates: int = 8,
    warm: int = 2,
    seed: int = 0,
    spans: int = 0,
) -> Simulated:
    """Runs until there were `updates` updates; the first `warm` of them do not count.

    Args:
      seed: seed of episodes' lengths and latencies, which are the same in all modes.
      spans: number of spans that the timeline keeps, for a trace.

    Raises:
      ValueError: no update would count, or those that do take no time.
    """
    if not 0 <= warm < updates:
        raise ValueError(f"{warm} of {updates} updates are for warm-up; expected fewer than all.")
    run = _Run(workload, mode, seed, spans)
    begun = run.until(warm)
    ended = run.until(updates)
    seconds = ended.now - begun.now
    if not seconds:
        raise ValueError(
            f"The last {updates - warm} of {updates} updates take no time, so there is no rate to "
            "report; give a latency, inference, gradient or update of more than 0 s."
        )
    return Simulated(
        seconds=seconds,
        updates=updates - warm,
        steps_per_second=(ended.steps - begun.steps) / seconds,
        samples_per_second=(ended.samples - begun.samples) / seconds,
        lag=run.lag,
        use=ended.use.since(begun.use),
        timeline=run.timeline,
    )


class _Moment(NamedTuple):
    now: float
    steps: int
    samples: int
    use: Summary


@dataclass(eq=False)
class _Episode:
    ticket: int
    reset: float
    chunks: deque[float]
    length: int
    version: int = -1
    """Version of the policy that drew its first chunk."""


@dataclass(eq=False)
class _Step:
    """Progress of a learner step's tickets."""

    complete: int = 0
    ready: int = 0
    """Decisions of complete tickets whose gradient is still to be computed."""


class _Run:
    """Slots step, ask and are held; inference and learner devices work; time jumps between."""

    def __init__(self, workload: Workload, mode: Mode, seed: int, spans: int) -> None:
        self.mode, self.seed = mode, seed
        self.work = workload if mode.ahead else replace(workload, staleness=0)
        self.now = 0.0
        self.timeline = Timeline(spans, lambda: self.now)
        self.version = self.steps = self.samples = self.lag = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        both = workload.inference_devices + workload.learner_devices
        self._inference_devices = workload.inference_devices if mode.disaggregated else both
        self._learner_devices = workload.learner_devices if mode.disaggregated else both
        self._inference = deque(range(self._inference_devices))
        self._learner = deque(range(self._learner_devices))
        self._sizes = sorted(workload.inference)
        self._free = deque(range(workload.slots))
        self._running: dict[int, _Episode] = {}
        self._stepping = 0
        self._asking: deque[tuple[float, int]] = deque()
        self._idle = 0.0  # when the thread that serves the slots is idle
        self._next = 0
        self._members: dict[int, list[_Episode]] = {}
        self._steps: dict[int, _Step] = {0: _Step()}
        self._updating = False
        for kind, devices in (("inference", self._inference), ("learner", self._learner)):
            for device in devices:
                self.timeline.mark(f"{kind} {device}", None)
        self._admit()
        for slot in self._free:
            self.timeline.mark(f"slot {slot}", "held", "staleness")

    def until(self, version: int) -> _Moment:
        """Continues to the moment of an update."""
        while self.version < version:
            self.now, _, happen, about = heapq.heappop(self._events)
            happen(*about)
        return _Moment(self.now, self.steps, self.samples, self.timeline.summary())

    def _after(self, seconds: float, happen: Callable[..., None], *about: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + seconds, self._scheduled, happen, about))

    # Slots: an episode is begun, asks, is answered, steps, asks again.

    def _admit(self) -> None:
        work = self.work
        while self._free:
            ticket = self._next // work.group
            if self.version < ticket // work.tickets - work.staleness:
                return
            slot = self._free.popleft()
            self._running[slot] = episode = self._episode(ticket)
            self._next += 1
            self._stepping += 1
            self._after(self._busy(work.tell), self._told, slot, "reset", episode.reset)

    def _episode(self, ticket: int) -> _Episode:
        work, member = self.work, self._next % self.work.group
        rng = np.random.default_rng([self.seed, ticket, member])
        length = max(math.ceil(work.chunks.draw(rng, 1)[0]), 1)
        (reset,) = work.latencies.reset.draw(rng, 1).tolist()
        chunks = work.latencies.chunk.draw(rng, length).tolist()
        return _Episode(ticket, reset, deque(chunks), length)

    def _busy(self, seconds: float) -> float:
        """Gives the thread work of `seconds`; returns in how many seconds the work begins."""
        begin = max(self._idle, self.now)
        self._idle = begin + seconds
        return begin - self.now

    def _told(self, slot: int, what: str, seconds: float) -> None:
        self.timeline.mark(f"slot {slot}", what)
        self._after(seconds, self._report if what == "reset" else self._acted, slot)

    def _report(self, slot: int) -> None:
        self.timeline.mark(f"slot {slot}", "ask", "inference")
        if self.mode.by_slot and self.work.prepare:
            waits = self._busy(self.work.prepare)
            self._after(waits + self.work.prepare, self._ask, slot)
        else:
            self._ask(slot)

    def _ask(self, slot: int) -> None:
        self._stepping -= 1
        self._asking.append((self.now, slot))
        self._infer()
        if self.mode.by_slot and self._asking:
            self._after(self.work.deadline, self._infer)

    def _acted(self, slot: int) -> None:
        self.steps += self.work.replan_steps
        episode = self._running[slot]
        if episode.chunks:
            self._report(slot)
            return
        del self._running[slot]
        self._stepping -= 1
        self._free.append(slot)
        self._complete(episode)
        self._admit()
        if slot not in self._running:
            self.timeline.mark(f"slot {slot}", "held", "staleness")
        self._infer()

    # Inference: batches by the rule of `models.batcher`, or all slots at once.

    def _infer(self, awake: bool = False) -> None:
        while self._inference and self._asking:
            if self.mode.by_slot:
                full = len(self._asking) >= self._sizes[-1]
                late = self.now >= self._asking[0][0] + self.work.deadline
                if not (full or late or self._stepping == 0):
                    return
                if self.work.wake and not awake:
                    self._after(self.work.wake, self._infer, True)
                    return
                self._begin_batch([self._inference.popleft()], self._sizes[-1])
            else:
                if self._stepping or len(self._inference) < self._inference_devices:
                    return
                devices, self._inference = list(self._inference), deque()
                count = len(self._asking)
                if self.work.prepare:
                    self._after(count * self.work.prepare, self._begin_batch, devices, count)
                else:
                    self._begin_batch(devices, count)

    def _begin_batch(self, devices: list[int], most: int) -> None:
        slots = [self._asking.popleft()[1] for _ in range(min(most, len(self._asking)))]
        for slot in slots:
            episode = self._running[slot]
            if episode.version < 0:
                episode.version = self.version
        for device in devices:
            self.timeline.mark(f"inference {device}", "draw")
        seconds = self._batch_seconds(-(-len(slots) // len(devices)))
        self._after(seconds, self._end_batch, devices, slots)

    def _batch_seconds(self, rows: int) -> float:
        whole, rest = divmod(rows, self._sizes[-1])
        size = next(size for size in self._sizes if size >= rest)
        return whole * self.work.inference[self._sizes[-1]] + (
            self.work.inference[size] if rest else 0.0
        )

    def _end_batch(self, devices: list[int], slots: list[int]) -> None:
        for device in devices:
            self.timeline.mark(f"inference {device}", None)
        self._inference.extend(devices)
        self._stepping += len(slots)
        self._after(self.work.wake, self._tell, slots)
        self._infer(awake=True)

    def _tell(self, slots: list[int]) -> None:
        for slot in slots:
            seconds = self._running[slot].chunks.popleft()
            self._after(self._busy(self.work.tell), self._told, slot, "step", seconds)

    # Learner: gradients of the current step's complete tickets, then the update.

    def _complete(self, episode: _Episode) -> None:
        members = self._members.setdefault(episode.ticket, [])
        members.append(episode)
        if len(members) < self.work.group:
            return
        del self._members[episode.ticket]
        number = episode.ticket // self.work.tickets
        step = self._steps.setdefault(number, _Step())
        step.complete += 1
        step.ready += sum(member.length for member in members)
        self.lag = max(self.lag, number - min(member.version for member in members))
        self._learn()

    def _learn(self) -> None:
        step = self._steps[self.version]
        whole = step.complete == self.work.tickets
        if self._updating or not (whole or self.mode.streamed):
            return
        while self._learner and (step.ready >= self.work.micro or (whole and step.ready)):
            rows = min(self.work.micro, step.ready)
            step.ready -= rows
            self.samples += rows
            device = self._learner.popleft()
            self.timeline.mark(f"learner {device}", "gradient")
            self._after(self.work.gradient, self._end_gradient, device)
        if whole and not step.ready and len(self._learner) == self._learner_devices:
            self._updating = True
            for device in self._learner:
                self.timeline.mark(f"learner {device}", "update")
            self._after(self.work.update, self._end_update)

    def _end_gradient(self, device: int) -> None:
        self.timeline.mark(f"learner {device}", None)
        self._learner.append(device)
        self._learn()

    def _end_update(self) -> None:
        for device in self._learner:
            self.timeline.mark(f"learner {device}", None)
        del self._steps[self.version]
        self.version += 1
        self._updating = False
        self._steps.setdefault(self.version, _Step())
        self._admit()
        self._learn()
