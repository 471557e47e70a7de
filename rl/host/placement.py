"""Placement "host" as a run: simulators, the policy and the learner on threads of their own
(`rl.host.loop`), around one device or a mesh of them; simulators and policy may also run in workers
elsewhere."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import Policy
from models.inputs.packed_batch import PackedBatch
from models.robot_policy import RobotPolicy
from parallel.hosts.agreement import total
from parallel.hosts.distributed import host_count, host_index, row_share
from parallel.hosts.stop import Stopped
from parallel.mesh import check_rows, make_mesh, replicated
from parallel.optimizer import select
from parallel.runs.position import entry
from rl.config import RlConfig
from rl.environment import describe
from rl.host import rollout
from rl.host.actor import FlowActor
from rl.host.experience import MicroBatch, micro_batches
from rl.host.loop import (
    HostConfig,
    HostSystem,
    Inference,
    StepResult,
    check_state,
    run_host,
)
from rl.host.staleness import Share
from rl.host.starts import Curriculum, training_seeds
from rl.host.timeline import Summary, Timeline
from rl.host.trajectory_buffer import Counts
from rl.host.weights import Weights
from rl.learner import FlowLearner, begin_learner, restored, saved
from rl.objectives import advantage_of
from rl.records import TaskOutcome
from rl.run import step_metrics
from sim.protocol import Slots, Spec
from sim.suite import Suite

_LARGEST = 64
"""Rows of the largest batch that the policy computes."""
_PATIENCE = 600.0
"""Seconds that an update under way may take when a run is told to stop."""


@contextmanager
def on_host(
    policy: Policy, suite: Suite, tasks: tuple[str, ...], config: RlConfig, directory: Path
) -> Iterator["OnHost"]:
    """Opens the slots, which close with the block; writes timeline.json to the directory. Tasks
    that cannot share slots have equally many each.

    Raises:
      ValueError: policy, suite and config do not fit together.
    """
    groups, size = suite.groups(tasks), suite.edge(policy.model.config.edge)
    count = suite.count(config.rollout.slots, most_episodes(config))
    if count < len(groups):
        raise ValueError(
            f"{count} slots are too few for {len(groups)} tasks that cannot share slots "
            f"(rollout.slots, and no more than (staleness + 1)·groups·group episodes at a time); "
            f"give each at least one."
        )
    with ExitStack() as stack:
        slots = [
            stack.enter_context(closing(suite.open(together, share, size)))
            for together, share in zip(groups, divided(count, len(groups)), strict=True)
        ]
        made = OnHost(policy, suite, tasks, slots, config)
        yield stack.enter_context(traced(made, directory))


def most_episodes(config: RlConfig) -> int:
    """Largest number of concurrent episodes on a host."""
    groups = -(-config.rollout.groups // host_count())
    return (config.rollout.staleness + 1) * groups * config.rollout.group


def divided(count: int, parts: int) -> list[int]:
    """Divides a number into parts that differ by at most 1."""
    return [count // parts + (i < count % parts) for i in range(parts)]


@contextmanager
def traced(made: "OnHost", directory: Path) -> Iterator["OnHost"]:
    """Writes its timeline.json (of the first host) to the directory when the block ends."""
    try:
        yield made
    finally:
        if directory.is_dir() and host_index() == 0:
            made.timeline.write(directory / "timeline.json")


class Worker(rollout.Actor, Protocol):
    """A policy that acts in another process."""

    def start(self, make: Callable[[], FlowActor], local: FlowActor) -> None:
        """Begins to build the actor that answers there; `local` prepares observations here."""

    def hold(self, moving: Any, base: Any) -> Any:
        """Makes a version of the parameters, as `Elsewhere.stage` left it, available there."""


@dataclass(frozen=True)
class Elsewhere:
    """Other processes that take part. `workers` act (if there are none, devices of this process
    do). `stage` hands parameters to them, see `Weights`. `replaced` counts workers of all kinds
    replaced so far. `specs` are those of slots of different tasks, without what identifies their
    process."""

    workers: Sequence[Worker]
    stage: Callable[[Any], Any]
    replaced: Callable[[], int]
    specs: Sequence[Spec]


class OnHost:
    """See `rl.run.Placement`. Each host of a job acts in slots of its own and learns from its share
    of each step's tickets; metrics and `record` are of all hosts together.

    Raises:
      ValueError: the devices, the micro-batches or the groups do not fit the hosts, or the tasks
        are not of one robot.
    """

    def __init__(
        self,
        policy: Policy,
        suite: Suite,
        tasks: tuple[str, ...],
        slots: Sequence[Slots],
        config: RlConfig,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        workers = elsewhere.workers if elsewhere else ()
        learning, acting = split_devices(0 if workers else config.rollout.inference_devices)
        mesh = make_mesh(config.mesh, learning)
        check_rows(config.learner.micro, mesh)
        self._mesh, self._share = mesh, _share(config, mesh)
        self._config, self._slots, self._elsewhere = config, slots, elsewhere
        self.environment = describe(
            elsewhere.specs if elsewhere else [some.spec for some in slots], suite
        )
        self._acting_on = acting
        self._values = advantage_of(config.objective).values
        self._learner = begin_learner(policy, config, mesh)
        self._trained = select(self._learner.optimizer, self._learner.state.params)[1]
        count = sum(some.count for some in slots)
        shared = policy.varied(sizes=batch_sizes(-(-count // (len(workers) or len(acting)))))
        robot = _one_robot(shared, [some.spec for some in slots])
        self._actor = FlowActor(robot, config.flow)
        for worker in workers:
            worker.start(partial(FlowActor, _bare(robot), config.flow), self._actor)
        rollout = config.rollout
        self._tasks, self._follows_signal = tasks, rollout.curriculum == "signal"
        self._curriculum = Curriculum(
            config.seed,
            tasks,
            training_seeds(suite),
            tickets=rollout.groups,
            staleness=rollout.staleness,
            signal=self._follows_signal,
        )
        self._pack: Callable[..., PackedBatch] = policy.rows
        self._record: Any = None
        self.timeline = Timeline()

    def run(
        self,
        on_step: Callable[[dict[str, float]], None],
        should_stop: Callable[[], bool],
        until: int,
    ) -> None:
        learner = HostLearner(self._learner)
        alone, params = host_count() == 1, self._learner.state.params
        there = self._elsewhere
        if there and there.workers:
            inference = [Inference(worker, join=worker.hold) for worker in there.workers]
        else:
            inference = [
                Inference(self._actor, partial(jax.device_put, device=device))
                for device in self._acting_on
            ]
        kept = self._config.rollout.snapshots
        weights = Weights(
            jax.tree.map(jnp.copy, params) if alone else params,
            trained=self._trained,
            dtype=None if kept == "float32" else kept,
            version=self._learner.version,
            gathered=None if alone else replicated(self._mesh),
            stage=there.stage if there and there.workers else lambda params: params,
        )
        summary = self.timeline.summary()
        totals = _Totals.recorded(self._record)

        def learnt(found: StepResult) -> None:
            nonlocal summary, totals
            before, summary = summary, self.timeline.summary()
            try:
                nothing, last = TaskOutcome(0, 0, 0, 0.0), totals
                own_outcomes = [found.outcomes.get(task, nothing) for task in self._tasks]
                sums = _Totals.of(found, there.replaced() if there else 0)
                told: Any = total("rl step", [own_outcomes, sums, asdict(found.counts)])
                each, totals = (TaskOutcome(*one) for one in told[0]), _Totals(*told[1])
                outcomes = dict(zip(self._tasks, each, strict=True))
                own = totals.since(last)
                admission = {**found.state["admission"], "waited": totals.waited}
                self._record = {"admission": admission, "counts": told[2]}
                if self._follows_signal:
                    self._curriculum.note(outcomes)
                    self._record["curriculum"] = self._curriculum.state()
                replaced = {"workers_replaced": own.workers_replaced} if there else {}
                on_step(_metrics(found, outcomes, summary.since(before), own) | replaced)
            finally:
                learner.whole.set()

        try:
            run_host(
                HostSystem(
                    self._slots, inference, learner, weights, self._curriculum.start, self._batches
                ),
                HostConfig(self._config.rollout, until, self._values, share=self._share),
                resume=_of_this_host(self._record),
                on_step=learnt,
                timeline=self.timeline,
                should_stop=should_stop if alone else lambda: False,
            )
        except Stopped:
            if not learner.halt(_PATIENCE):
                raise

    def state(self) -> dict[str, Any]:
        return saved(self._learner.state)

    def record(self) -> Any:
        return self._record

    def restore(self, state: dict[str, Any], record: Any) -> None:
        self._learner.resume(restored(state))
        check_state(record, self._learner.version)
        if self._follows_signal:
            self._curriculum.restore(entry(record, "curriculum"), self._learner.version)
        self._record = record

    def _batches(self, tickets: Any) -> Iterator[MicroBatch]:
        objective, size = self._config.objective, self._config.learner.micro // self._share[1]
        return micro_batches(tickets, self._pack, objective, size, self._learner.evaluate)


class HostLearner:
    """`rl.host.loop.Learner` of a learner; `whole` is set while no update is under way."""

    def __init__(self, learner: FlowLearner) -> None:
        self._learner, self.whole = learner, threading.Event()
        self._deciding, self._halted = threading.Lock(), False
        self.whole.set()

    def halt(self, seconds: float) -> bool:
        """Lets no other update begin; False if the current one is not complete after `seconds`."""
        with self._deciding:
            self._halted = True
        return self.whole.wait(seconds)

    @property
    def params(self) -> Any:
        return self._learner.state.params

    def add(self, part: MicroBatch) -> None:
        self._learner.add(part.experience, part.tickets)

    def update(self) -> dict[str, Any]:
        with self._deciding:
            if self._halted:
                raise Stopped
            self.whole.clear()
        try:
            return self._learner.update()
        except BaseException:
            self.whole.set()
            raise


def split_devices(acting: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """The learner's devices, of all processes, and the actors' devices, of this process: its last
    `acting` devices, or, if that is 0, its first, which then also learns.

    Raises:
      ValueError: none are left to learn.
    """
    if acting == 0:
        return jax.devices(), jax.local_devices()[:1]
    if acting >= len(jax.local_devices()):
        raise ValueError(
            f"rollout.inference_devices is {acting}, but this host has {len(jax.local_devices())} "
            f"devices, and at least one must be left to learn; give fewer, or 0 to share the first."
        )
    learning = [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process)[:-acting]
    ]
    return learning, jax.local_devices()[-acting:]


def _share(config: RlConfig, mesh: Mesh) -> Share:
    """This host's share of the tickets."""
    share, hosts = row_share(mesh), host_count()
    if share[1] != hosts:
        raise ValueError(
            f"The {hosts} processes of this job share {share[1]} parts of a micro-batch's rows, "
            f"but each must bring its own; choose mesh.stage, mesh.context and mesh.tensor within "
            f"a process."
        )
    if config.rollout.groups < hosts:
        raise ValueError(
            f"rollout.groups is {config.rollout.groups}, but this job has {hosts} processes; give "
            f"at least one group a step for each."
        )
    return share


def _one_robot(policy: Policy, specs: Sequence[Spec]) -> RobotPolicy:
    """The policy in slots of different tasks, which must be of one robot."""
    robots = [RobotPolicy.in_suite(policy, spec) for spec in specs]
    for spec in specs[1:]:
        for name in ("cameras", "picture", "state_names", "action_names", "fps"):
            if (one := getattr(specs[0], name)) != (other := getattr(spec, name)):
                raise ValueError(
                    f"Tasks that are learnt together must be of one robot, but {name} is {one} in "
                    f"{specs[0].name} and {other} in {spec.name}; learn them in separate runs."
                )
    return robots[0]


def _of_this_host(record: Any) -> Any:
    """A run's record as this host continues it: the first has what all hosts had counted."""
    if record is None or host_index() == 0:
        return record
    return {"admission": {**record["admission"], "waited": 0.0}, "counts": {}}


def _bare(robot: RobotPolicy) -> RobotPolicy:
    """The robot without parameters or anything compiled or read, to be sent elsewhere."""
    policy, processor = robot.policy, replace(robot.processor)
    model = policy.model.config.build()
    return replace(robot, policy=replace(policy, model=model, params=None, processor=processor))


def batch_sizes(count: int) -> tuple[int, ...]:
    """Powers of two below the number that can wait at a time, and that; at most `_LARGEST`."""
    most = min(count, _LARGEST)
    return (*(2**k for k in range(most.bit_length()) if 2**k < most), most)


class _Totals(NamedTuple):
    """Sums over a run so far; a step's own values are their differences. Batches and workers are
    counted from the beginning of this process, the rest from the beginning of the run."""

    items: float = 0
    rows: float = 0
    reruns: float = 0
    redrawn: float = 0
    waited: float = 0.0
    workers_replaced: float = 0

    @classmethod
    def of(cls, found: StepResult, workers_replaced: int) -> "_Totals":
        return cls(
            sum(x.items for x in found.batches),
            sum(x.rows for x in found.batches),
            found.counts.reruns,
            found.counts.redrawn,
            found.waited,
            workers_replaced,
        )

    @classmethod
    def recorded(cls, state: Any) -> "_Totals":
        """Sums that a run continues from, given a `StepResult.state` or None."""
        if state is None:
            return cls()
        counts = Counts(**state["counts"])
        return cls(
            reruns=counts.reruns, redrawn=counts.redrawn, waited=state["admission"]["waited"]
        )

    def since(self, before: "_Totals") -> "_Totals":
        return _Totals(*(now - then for now, then in zip(self, before, strict=True)))


def _metrics(
    found: StepResult, outcomes: Mapping[str, TaskOutcome], spent: Summary, own: _Totals
) -> dict[str, float]:
    learner = spent.kinds().get("learner")
    idle = learner.idle if learner else {}
    return {
        **step_metrics(found.metrics, outcomes, found.seconds),
        **({"batch_fill": own.items / own.rows} if own.rows else {}),
        "publish_seconds": found.latency,
        "slots_held_back_seconds": own.waited,
        "reruns": own.reruns,
        "redrawn": own.redrawn,
        "learner_busy": learner.utilisation if learner else 0.0,
        **{f"idle/{cause}": seconds for cause, seconds in idle.items()},
    }
