"""The training loop: runs steps from a given state until the last one, a signal to any host, or a
bad step.

Batches are put on the device ahead of time and metrics are read late, so neither data nor logging
stops the device as long as they keep up. A host bases its decisions on values that all hosts read.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from models.inputs.packed_batch import PackedBatch
from parallel.evaluations import LATE, Evaluations
from parallel.hooks import due
from parallel.hosts import inject
from parallel.hosts.agreement import agree
from parallel.hosts.distributed import host_count, host_index, put_batch
from parallel.hosts.facts import HostFacts, any_host, put_facts
from parallel.hosts.stop import UNLOGGED
from parallel.hosts.watchdog import note
from parallel.monitor.metrics import MetricsWriter
from parallel.monitor.progress import StepBar, StepLog
from parallel.monitor.speed import Speed
from parallel.monitor.spikes import BadStep, Policy, Spikes
from parallel.monitor.step_trace import StepTrace, traced_steps
from parallel.prefetch import GivenUp, Prefetcher
from parallel.runs.position import at_data
from parallel.shell import Shell
from parallel.step import TrainState

Json = Any
Fed = tuple[PackedBatch, Mapping[str, float]]


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of the training loop; a step is one update.

    Every step goes to metrics.jsonl, and every `log_every`-th also to TensorBoard and trackers. The
    checkpoints that stay are the last `keep`, those of every `keep_every`-th step (0: none), and
    the one with the lowest `keep_best`, a metric of the evaluations such as val_loss ("": none).
    With `eval_every` 0, nothing is evaluated. The run ends early after `patience` evaluations in a
    row (0: never) without a lower `keep_best`. If `keep_best` names no metric, `patience` goes by
    val_loss, and the best checkpoint by val_loss also stays.

    A batch is computed in `accumulation` micro-batches; `prefetch` batches wait on the device. A
    step is bad if its loss is not finite, or if its gradient norm is above `spike_factor` times the
    recent median (0: no such limit). A bad step does not change the state. The run then stops,
    skips it, or goes back to its last checkpoint and continues with the batches after the bad one
    (`on_bad_step`). `profile` "A:B" traces steps A to B - 1, counted from 0, into the run's folder.
    """

    train_steps: int = 1000
    log_every: int = 10
    save_every: int = 1000
    keep: int = 3
    keep_every: int = 0
    keep_best: str = ""
    patience: int = 0
    eval_every: int = 0
    accumulation: int = 1
    seed: int = 0
    prefetch: int = 2
    on_bad_step: Policy = "stop"
    spike_factor: float = 0.0
    profile: str = ""


@dataclass
class Loop:
    """Runs the steps of a run, inside its shell, from any of its states.

    `stopped` is the host that was told to stop and the signal's number, once all hosts know it.
    `pending_evaluation` is the step whose evaluation a stop prevented; a run that resumes from
    there makes it first. `verdict` is the reason to end the run before its last step, judged by its
    `evaluations`. If a host's logs cannot be written, the host is told to stop with `UNLOGGED`.
    `flops` counts the FLOPs of a global batch, see `monitor.speed.model_flops`.
    """

    config: TrainerConfig
    shell: Shell
    mesh: Mesh
    batches: Callable[[int, Json], Iterator[Fed]]
    position: Callable[[int], Json]
    step: Any
    flops: Callable[[PackedBatch], Mapping[str, float]]
    evaluations: Evaluations | None = None
    stopped: tuple[int, int] | None = None
    pending_evaluation: int | None = None
    verdict: str = ""
    _compiled: Any = field(default=None, init=False)
    _speed: Speed = field(init=False)

    def __post_init__(self) -> None:
        self._speed = Speed(self.mesh.size, self.mesh.devices.flat[0].device_kind)

    def run(self, state: TrainState, start: int, record: Json) -> tuple[TrainState, int, int]:
        """Continues training from `state` after `start` steps; returns the state, the steps made
        and how many of them were skipped. `record` is the position (`at_data`) in the checkpoint of
        `start`, None at the beginning.

        Raises:
          BadStep: a step was bad. If it stops the run, the state before it is saved; else the steps
            since the last checkpoint are lost.
          ValueError: the data ended.
        """
        config, shell, record = self.config, self.shell, record or at_data(None, 0, None)
        spikes = Spikes(config.on_bad_step, config.spike_factor, record["bad_steps"])
        seed, done, offset = np.uint32(config.seed % 2**32), start, record["offset"]
        shell.ledger.begin(start)
        with ExitStack() as stack:
            fed = self.batches(start + offset, record["data"])
            source = stack.enter_context(
                Prefetcher(fed, lambda b: (put_batch(b[0], self.mesh), b[1]), config.prefetch)
            )
            writer = None
            if host_index() == 0:
                writer = MetricsWriter(shell.run.directory, start, shell.trackers)
                stack.enter_context(writer)
            bar = stack.enter_context(StepBar(shell.console, "training", start, config.train_steps))
            log = StepLog(
                writer,
                shell.console,
                bar,
                start,
                config.log_every,
                self.mesh,
                spikes,
                shell.ledger.account,
                shell.failure,
                self._speed,
            )
            wanted = traced_steps(config.profile, config.train_steps, "trainer.profile")
            trace = StepTrace(wanted, shell.run.directory, start, shell.console, shell.failure)
            stack.callback(trace.close)
            if self.pending_evaluation == start:
                self._evaluate(start, state, log)
            begin, bad, item = time.perf_counter(), None, None
            if start < config.train_steps and not self.stopped and not self.verdict:
                item = self._next(source, done)
            if item is not None and self._compiled is None:
                self._compile(state, item[0], seed)
            self.stopped = self.stopped or any_host(shell.stop.number)
            try:
                while done < config.train_steps and not self.stopped and not self.verdict:
                    if trace.turns(done) and not self._turn(trace, log):
                        break
                    if done > start:
                        begin = time.perf_counter()
                        item = self._next(source, done) or item
                        shell.ledger.spend("data")
                    if shell.stop.number and host_count() == 1:
                        self.stopped = (0, shell.stop.number)
                        break
                    assert item is not None  # else this host was told to stop, and all have agreed
                    batch, info = item
                    if inject.at(done) == "nan":
                        batch = replace(batch, actions=inject.spoilt(batch.actions))
                    shell.checkpoints.check()
                    note("training", done + 1)
                    limit, busy = spikes.limit(done), time.perf_counter() - begin
                    halts = done if config.on_bad_step == "stop" else -1
                    facts = HostFacts(shell.stop.number, limit, busy, source.wait, halts)
                    with jax.profiler.StepTraceAnnotation("step", step_num=done):
                        on_devices = put_facts(facts, self.mesh)
                        state, metrics = self._compiled(state, batch, seed, on_devices)
                    waits = {"data_wait": source.wait, "data_ready": source.ready}
                    log.started(done, begin, metrics, {**info, **waits})
                    done += 1
                    self._read(log)
                    if shell.due(done):
                        log.drain()
                        self._read(log)
                        self._evaluate(done, state, log)
                    if due(done, config.save_every):
                        log.drain()
                        self._read(log)
                        if not self.stopped:
                            self._save(done, state, offset, spikes, log)
                log.drain()
                self._read(log)
            except BadStep as error:
                if config.on_bad_step != "stop":
                    raise
                bad = error  # `state` is that before the bad step
            trace.close()
            done = log.made
            if done > start and done != shell.saved:
                self._save(done, state, offset, spikes, log)
            note("saving")
            shell.checkpoints.wait()
            shell.ledger.spend("checkpoint")
        if bad is not None:
            raise bad
        return state, done, spikes.skipped

    def _next(self, source: Prefetcher[Fed], done: int) -> Fed | None:
        """The next batch; None once this host is told to stop."""
        try:
            return source.take(self.shell.stop.should_stop)
        except GivenUp:
            return None
        except StopIteration:
            raise ValueError(
                f"The data ended after {done} of {self.config.train_steps} steps; expected a batch "
                "per step."
            ) from None
        except Exception as error:
            if not self.shell.stop.should_stop():
                raise
            self.shell.console.print(
                f"After the signal, the loader failed: {error!r}", soft_wrap=True
            )
            return None  # the signal also ended the loader's processes; training so far is saved

    def _compile(self, state: TrainState, batch: PackedBatch, seed: Any) -> None:
        """Compiles the step before it first runs, so that the compile time is known, and so that a
        run that is told to stop meanwhile ends with nothing to save."""
        self.shell.ledger.spend("start")
        note("compiling")
        facts = put_facts(HostFacts(0, np.inf, 0, 0), self.mesh)
        lowered = self.step.lower(state, batch, seed, facts)
        with ThreadPoolExecutor(1) as beside:  # the compiler leaves Python to others
            counted = beside.submit(self.flops, batch)
            self._compiled = lowered.compile()
            self._speed.flops = counted.result()
        self.shell.ledger.spend("compile")
        note("training")

    def _turn(self, trace: StepTrace, log: StepLog) -> bool:
        """Begins or ends the trace between two steps, unless the run is stopped."""
        log.drain()
        self._read(log)
        if self.stopped:
            return False
        trace.turn()
        note("training")
        self.shell.ledger.spend("profile")
        return True

    def _evaluate(self, done: int, state: TrainState, log: StepLog) -> None:
        """Calls the hooks that are due and logs their metrics; an evaluation that a stop prevents
        stays pending."""
        late: dict[str, float] = {LATE: 1.0} if self.pending_evaluation == done else {}
        self.pending_evaluation = done
        if self.stopped:
            return
        found = late | self.shell.evaluate(done, state, self._stopping)
        if not self.stopped:
            self.pending_evaluation = None
            log.noted(done - 1, found)
            if self.evaluations is not None and due(done, self.config.eval_every):
                if self.shell.failure.error is None:
                    self.evaluations.add(done, found)
                said = self.evaluations.verdict
                self.verdict = agree("verdict", "", lambda _: said)

    def _stopping(self) -> bool:
        """True if any host was told to stop; all call it at the same point of an evaluation."""
        self.stopped = self.stopped or any_host(self.shell.stop.number)
        return self.stopped is not None

    def _read(self, log: StepLog) -> None:
        """Takes over the metrics that `log` has read."""
        self.stopped = self.stopped or log.stopped
        shell = self.shell
        shell.ledger.spend("step")
        with shell.failure.kept():
            shell.ledger.made(log.made)
        if shell.failure.error is not None:
            shell.stop.number = shell.stop.number or UNLOGGED

    def _save(
        self, done: int, state: TrainState, offset: int, spikes: Spikes, log: StepLog
    ) -> None:
        pending = self.pending_evaluation == done
        position = at_data(self.position(done + offset), offset, spikes.record(), pending)
        log.noted(done - 1, self.shell.save(done, state, position, log.sync))
