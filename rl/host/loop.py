"""The host-asynchronous runtime: slots act, the policy answers and the learner learns, each on
threads of its own, and none waits for more than it needs.

Asynchrony has three levels (RL-VLA3, arXiv 2602.05765), each of which can be turned off: slots that
wait for no other slot, acting that runs ahead of learning, learning that begins before a step is
complete. The first error of any thread ends the run.
"""

import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from models.batcher import Batcher, Statistics
from models.layers.functional import fill
from parallel.hosts.stop import Stopped
from parallel.hosts.watchdog import alive
from parallel.runs.position import count, entry, shown
from rl.config import RolloutConfig
from rl.host.rollout import Actor, InferenceReply, InferenceRequest, Rollout
from rl.host.staleness import ALL, Share, StalenessControl, numbers_of
from rl.host.timeline import Timeline
from rl.host.trajectory_buffer import Counts, TrajectoryBuffer
from rl.host.weights import Weights, WeightsReader
from rl.records import Decision, TaskOutcome, Ticket
from rl.rewards import reward_of
from sim.protocol import Slots, Start

_ENDING = 8.0
"""Seconds that threads have to end after an error; those that compute longer are abandoned."""


class Learner(Protocol):
    """Adds up gradients, then updates."""

    @property
    def params(self) -> Any:
        """Current parameters; only `Weights.publish` reads them before the next `update`."""

    def add(self, experience: Any) -> None:
        """Adds the gradient of a part of the step."""

    def update(self) -> dict[str, Any]:
        """Ends the step; returns metrics."""


class Inference(NamedTuple):
    """Place where the policy acts: its actor, and how versions get there (see `WeightsReader`)."""

    actor: Actor
    place: Callable[[Any], Any] = lambda params: params
    join: Callable[[Any, Any], Any] = fill


@dataclass(frozen=True)
class StepResult:
    """A learner's step."""

    step: int
    metrics: dict[str, Any]
    """The learner's own."""
    lags: dict[int, int]
    """Number of decisions by lag: updates by which the learner was ahead of their policy."""
    outcomes: dict[str, TaskOutcome]
    """By task; of episodes learnt from, but for `groups`."""
    seconds: float
    """Seconds since the last step ended."""
    counts: Counts
    waited: float
    """Seconds that the bound on staleness has held slots back so far, summed over slots."""
    latency: float
    """Seconds from the publication of the last version that was taken over until it was ready to
    act; 0 if none was."""
    batches: tuple[Statistics, ...]
    """Statistics of the batches at each place where the policy acts."""
    state: dict[str, Any]
    """State that `run_host` needs, besides the learner's, to resume from here, as JSON."""


def check_state(found: Any, version: int) -> None:
    """Raises ValueError, with the field, unless `found` can be `StepResult.state` after `version`
    updates."""
    staleness_control, counts = entry(found, "admission"), entry(found, "counts")
    waited = entry(staleness_control, "waited")
    if count(staleness_control, "version") != version:
        raise ValueError(
            f"admission.version is {staleness_control['version']}, but the learner has made "
            f"{version} updates"
        )
    if type(waited) not in (int, float) or not 0 <= waited < np.inf:
        raise ValueError(f"admission.waited is {shown(waited)}, expected seconds")
    told = {"redrawn": 0, **counts} if isinstance(counts, dict) else counts  # not in early records
    numbers = Counts(**{one.name: count(told, one.name) for one in fields(Counts)})
    settled = numbers.learnt + numbers.redrawn
    if settled > numbers.finished or numbers.finished + numbers.dropped > numbers.begun:
        raise ValueError(f"counts is {shown(counts)}, whose numbers do not add up")


@dataclass(frozen=True)
class HostSystem:
    """Simulators, policy and learner of a `run_host`.

    `slots`: one thread each. `inference`: one thread each; number i of n answers the slots
    i, i + n, …, counted over all of `slots`. They take a new version over one after the other.
    `starts`: (ticket, attempt) -> where its episodes start, see `StalenessControl`.
    `batches`: a step's tickets, as they complete -> what `learner.add` takes.
    """

    slots: Sequence[Slots]
    inference: Sequence[Inference]
    learner: Learner
    weights: Weights
    starts: Callable[[int, int], Start]
    batches: Callable[[Iterator[Ticket]], Iterable[Any]]


@dataclass(frozen=True)
class HostConfig:
    """Length of a `HostSystem`'s run, and its levels of asynchrony.

    `rollout`: its `groups`, `group`, `staleness`, `redraws`, `replan_steps`, `reward` and
    `deadline` count; without the second level of asynchrony, `staleness` is 0. `learner_steps`:
    updates that the policy has had at the end. `values`: the policy has a value head. `each`: first
    level, no slot waits for another. `stream`: third level, the learner gets tickets as they
    complete, and not once all have. `share`: the tickets that this host acts and learns from.
    """

    rollout: RolloutConfig
    learner_steps: int
    values: bool = False
    each: bool = True
    stream: bool = True
    share: Share = ALL


def run_host(
    system: HostSystem,
    config: HostConfig,
    *,
    resume: dict[str, Any] | None = None,
    on_step: Callable[[StepResult], None] = lambda learnt: None,
    timeline: Timeline | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Learns until the policy has had `config.learner_steps` updates, starting from the version
    that the system's weights hold.

    JAX settings that apply to one thread (a mesh, a default device) do not reach the threads that
    this function starts. The slots can be used again afterwards, but they are closed if it fails.

    Args:
      resume: `StepResult.state` of the step that the learner and the weights were restored from.
      on_step: called after each step, on the learner's thread, while the slots act.
      should_stop: whether to stop; called on this thread twice a second.

    Raises:
      ValueError: a start's task is in none of the slots, or `resume` is of another version.
      RuntimeError: an episode was lost or learnt from twice, or a decision is older than allowed.
      Stopped: `should_stop` said so; the learner may still be computing an update.
      BaseException: the first that any thread raised, or KeyboardInterrupt, within 10 s.
    """
    host = _Host(system, config, resume, timeline or Timeline())
    try:
        host.run(on_step, should_stop)
    except BaseException:
        for some in system.slots:
            some.close()
        raise


@dataclass
class _Tally:
    """Counts over a step's tickets, as they pass."""

    step: int
    staleness: int
    lags: Counter[int] = field(default_factory=Counter)
    tickets: int = 0
    outcomes: dict[str, TaskOutcome] = field(default_factory=dict)

    def noting(self, tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """Yields the same tickets, and counts them."""
        for ticket in tickets:
            if self.step - ticket.oldest > self.staleness:
                raise RuntimeError(
                    f"Step {self.step} has ticket {ticket.number}, sampled by policy version "
                    f"{ticket.oldest}, which is older than staleness = {self.staleness} allows."
                )
            self.tickets += 1
            decisions = [d for one in ticket.trajectories for d in one.decisions]
            self.lags.update(self.step - decision.version for decision in decisions)
            task = ticket.trajectories[0].start.task
            before = self.outcomes.get(task, TaskOutcome(0, 0, 0, 0.0))
            now = _outcome(ticket, decisions)
            self.outcomes[task] = TaskOutcome(*map(operator.add, before, now))
            yield ticket


class _Host:
    """A system at work: admission of episodes, batchers that answer, rollouts that ask."""

    def __init__(
        self,
        system: HostSystem,
        config: HostConfig,
        resume: dict[str, Any] | None,
        clock: Timeline,
    ) -> None:
        self._system, self._config, self._clock = system, config, clock
        rollout, version = config.rollout, system.weights.version
        state = resume or {"admission": {"version": version}, "counts": {}}
        if state["admission"]["version"] != version:
            raise ValueError(
                f"The run to resume had made {state['admission']['version']} updates, but its "
                f"weights have had {version}; restore both from the same checkpoint."
            )
        self.staleness_control = StalenessControl(
            _known(system),
            tickets=rollout.groups,
            group=rollout.group,
            staleness=rollout.staleness,
            steps=config.learner_steps,
            share=config.share,
            redraws=rollout.redraws > 0,
            **state["admission"],
        )
        self.trajectories = TrajectoryBuffer(
            rollout.groups,
            rollout.group,
            Counts(**state["counts"]),
            config.share,
            redraws=rollout.redraws,
            redraw=self._redraw,
        )
        self.rollouts: list[Rollout] = []
        readers = [WeightsReader(system.weights, one.place, one.join) for one in system.inference]
        self.batchers = [
            self._batcher(number, one.actor, reader)
            for number, (one, reader) in enumerate(zip(system.inference, readers, strict=True))
        ]
        first = 0
        for some in system.slots:
            self.rollouts.append(self._rollout(some, first))
            first += some.count

    def run(self, on_step: Callable[[StepResult], None], should_stop: Callable[[], bool]) -> None:
        """Runs all threads until the learner is done or one of them fails, then ends all."""
        errors: list[BaseException] = []
        over = threading.Event()

        def fail(error: BaseException) -> None:
            errors.append(error)
            self.staleness_control.close(errors[0])
            self.trajectories.close(errors[0])
            over.set()

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:  # raised again below
                fail(error)

        def learn() -> None:
            self._learn(on_step)
            over.set()

        works = {f"slots {i}": rollout.run for i, rollout in enumerate(self.rollouts)}
        threads = [
            threading.Thread(target=guarded, args=(work,), name=name, daemon=True)
            for name, work in {"learner": learn, **works}.items()
        ]
        try:
            for thread in threads:
                thread.start()
            while not over.wait(0.5):  # not forever: signals are sure to be seen only between waits
                if should_stop():
                    raise Stopped
        except BaseException as error:  # Ctrl-C
            fail(error)
        try:
            left = self._end(threads)
        except KeyboardInterrupt as error:
            fail(error)
            left = self._end(threads)
        if not errors:
            self.trajectories.check(at_rest=True)
            return
        if left:
            errors[0].add_note(f"Still running, and no longer waited for: {', '.join(left)}.")
        else:
            try:
                self.trajectories.check(at_rest=True)
            except RuntimeError as lost:
                errors[0].add_note(str(lost))
        raise errors[0]

    def _end(self, threads: Sequence[threading.Thread]) -> list[str]:
        """Names of the threads that do not end in time."""
        for rollout in self.rollouts:
            rollout.stop()
        closing = [
            threading.Thread(target=batcher.close, args=(False,), name="policy", daemon=True)
            for batcher in self.batchers
        ]
        for thread in closing:
            thread.start()
        until = time.monotonic() + _ENDING
        for thread in (started := [t for t in (*threads, *closing) if t.ident is not None]):
            thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in started if thread.is_alive()]

    def _learn(self, on_step: Callable[[StepResult], None]) -> None:
        """Makes all steps that are left."""
        ended = time.monotonic()
        for step in range(self._system.weights.version, self._config.learner_steps):
            tally = _Tally(step, self._config.rollout.staleness)
            metrics = self._learn_step(tally)
            begun, ended = ended, time.monotonic()
            on_step(self._learnt(tally, metrics, ended - begun))

    def _learn_step(self, tally: _Tally) -> dict[str, Any]:
        system, step = self._system, tally.step
        tickets = tally.noting(self.trajectories.step(step))
        if not self._config.stream:
            tickets = iter(sorted(tickets, key=lambda ticket: ticket.number))
        for part in system.batches(tickets):
            with self._clock.span("learner", "add"):
                system.learner.add(part)
            alive()
        wanted = numbers_of(step, self._config.rollout.groups, self._config.share)
        if next(tickets, None) is not None or tally.tickets < len(wanted):
            raise RuntimeError(f"Not all tickets of step {step} were turned into batches.")
        with self._clock.span("learner", "update"):
            metrics = system.learner.update()
            system.weights.publish(system.learner.params, step + 1)
        alive()
        self.staleness_control.advance(step + 1)
        for rollout in self.rollouts:
            rollout.wake()
        return metrics

    def _redraw(self, ticket: int, attempt: int) -> None:
        self.staleness_control.redraw(ticket, attempt)
        for rollout in self.rollouts:
            rollout.wake()

    def _learnt(self, tally: _Tally, metrics: dict[str, Any], seconds: float) -> StepResult:
        counts = self.trajectories.counts()
        return StepResult(
            step=tally.step,
            metrics=metrics,
            lags=dict(sorted(tally.lags.items())),
            outcomes=tally.outcomes,
            seconds=seconds,
            counts=counts,
            waited=self.staleness_control.waited,
            latency=(self._system.weights.latencies or (0.0,))[-1],
            batches=tuple(batcher.statistics() for batcher in self.batchers),
            state={"admission": self.staleness_control.state(), "counts": asdict(counts)},
        )

    def _batcher(
        self, number: int, actor: Actor, reader: WeightsReader
    ) -> Batcher[InferenceRequest, InferenceReply]:
        lane = "inference" if len(self._system.inference) == 1 else f"inference {number}"
        count = sum(some.count for some in self._system.slots)

        def answer(asked: list[InferenceRequest]) -> list[InferenceReply]:
            with self._clock.span(lane, "compute"):
                snapshot = reader.read(max(one.oldest for one in asked))
                drawn = actor.answer(snapshot.params, [one.request for one in asked])
                alive()
                return [InferenceReply(*row, snapshot.version) for row in drawn]

        return Batcher(
            answer,
            sizes=actor.sizes,
            deadline=self._config.rollout.deadline,
            capacity=max(2 * count, *actor.sizes),
            outstanding=lambda: sum(rollout.coming(number) for rollout in self.rollouts),
        )

    def _rollout(self, slots: Slots, first: int) -> Rollout:
        config = self._config
        return Rollout(
            slots,
            self.batchers,
            self._system.inference[0].actor,
            self.staleness_control,
            self.trajectories,
            replan_steps=config.rollout.replan_steps,
            reward=reward_of(config.rollout.reward),
            values=config.values,
            together=not config.each,
            timeline=self._clock,
            first=first,
        )


def _outcome(ticket: Ticket, decisions: Sequence[Decision]) -> TaskOutcome:
    grouped = len(ticket.trajectories) > 1
    return TaskOutcome(
        episodes=len(ticket.trajectories),
        successes=sum(one.success for one in ticket.trajectories),
        env_steps=sum(len(decision.reward) for decision in decisions),
        rewards=sum(float(decision.reward.sum(dtype=np.float64)) for decision in decisions),
        groups=1 + ticket.redrawn if grouped else 0,
        signal=int(ticket.signal),
    )


def _known(system: HostSystem) -> Callable[[int, int], Start]:
    """The system's starts; each must be in a task that its slots have."""
    tasks = {task for some in system.slots for task in some.spec.tasks}

    def known(ticket: int, attempt: int) -> Start:
        start = system.starts(ticket, attempt)
        if start.task not in tasks:
            raise ValueError(
                f"Ticket {ticket} starts in task '{start.task}', which the slots do not have; "
                f"expected one of {sorted(tasks)}."
            )
        return start

    return known
