"""Output of a run while it trains: every step's metrics in the log, and a progress bar.

A step's metrics are read once a later step is under way. This bounds how far the host runs ahead of
the device, and shows which of the two waits for the other.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from models.files.terminal import Console, Progress, TextColumn, draws
from parallel.hosts.facts import by_host, stop_signal
from parallel.monitor.data_wait import DataWait
from parallel.monitor.goodput import Account
from parallel.monitor.metrics import MetricsWriter
from parallel.monitor.speed import Speed
from parallel.monitor.spikes import IN_FLIGHT, Spikes
from parallel.monitor.stragglers import StragglerMonitor
from parallel.runs.log_failure import LogFailure
from parallel.step import Metrics

_WINDOW = 50  # steps the progress bar averages over
_SPOKEN_SECONDS = 30.0  # between lines if no bar can be drawn


class StepBar:
    """A progress bar over steps, or an occasional line if no bar can be drawn. Use as a context
    manager."""

    def __init__(self, console: Console, doing: str, done: int, steps: int) -> None:
        self._console, self._steps, self._spoken = console, steps, time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            refresh_per_second=2,
            disable=not draws(console),
        )
        self._task = self._bar.add_task(doing, total=steps, completed=done, status="compiling")

    def show(self, done: int, status: str) -> None:
        """Shows that `done` steps are made."""
        self._bar.update(self._task, completed=done, status=status)
        now = time.perf_counter()
        last = done == self._steps
        if not draws(self._console) and (last or now - self._spoken > _SPOKEN_SECONDS):
            self._spoken = now
            self._console.print(f"step {done} of {self._steps}: {status}", soft_wrap=True)

    def __enter__(self) -> "StepBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@dataclass
class StepLog:
    """Takes the metrics of steps when they are dispatched and writes them when they are done.

    With `writer` None (on all hosts but the first), nothing is written. `failure` keeps the error
    of a failed write. `made` counts the steps that are done. `stopped` is set once a host that was
    told to stop has entered a step, to that host and the signal's number; that step and those after
    it were not made. Both are the same on all hosts at the same point of the loop.
    """

    writer: MetricsWriter | None
    console: Console
    bar: StepBar
    start: int
    board_every: int
    mesh: Mesh
    spikes: Spikes
    account: Account
    failure: LogFailure
    speed: Speed
    stopped: tuple[int, int] | None = None
    _pending: deque[tuple[int, Metrics, dict[str, float]]] = field(default_factory=deque)
    _recent: deque[tuple[float, float, float]] = field(default_factory=partial(deque, (), _WINDOW))
    _clock: float = 0.0
    _data_wait: DataWait = field(default_factory=DataWait)
    _stragglers: StragglerMonitor = field(default_factory=StragglerMonitor)

    def __post_init__(self) -> None:
        self.made = self.start

    def started(self, step: int, begin: float, metrics: Metrics, facts: dict[str, float]) -> None:
        """Records that `step` was dispatched and that its data was requested at `begin`
        (perf_counter seconds).

        `facts` is what the host knows of the step: `data_wait` (seconds), `samples` and any other
        values to log. Reads the metrics of earlier steps until at most two are under way.

        Raises:
          BadStep: such a step was bad and is not skipped.
        """
        if not self._pending:
            self._clock = begin
        self._pending.append((step, metrics, facts))
        while len(self._pending) > IN_FLIGHT:
            self._finish()

    def drain(self) -> None:
        """Waits for all steps under way and writes their lines.

        Raises:
          BadStep: one of them was bad and is not skipped.
        """
        while self._pending:
            self._finish()

    def noted(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics that an evaluation or a save gave after the update of `step`."""
        self._write(step, metrics)

    def sync(self) -> None:
        """Returns when all lines written so far are on disk."""
        if self.writer is not None:
            with self.failure.kept():
                self.writer.sync()

    def _finish(self) -> None:
        step, on_device, facts = self._pending.popleft()
        asked = time.perf_counter()
        read = jax.device_get(on_device)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        hosts = by_host(read.pop("hosts"), self.mesh)
        self.stopped = self.stopped or stop_signal(hosts)
        if self.stopped:
            return
        metrics: dict[str, Any] = {name: value.item() for name, value in read.items()}
        good, _ = metrics.pop("good"), metrics.pop("finite")
        limit = min(host.limit for host in hosts.values())
        self.spikes.after(step, good, metrics, limit)
        self.made = step + 1
        slow_host, line = self._stragglers.after(seconds, hosts)
        metrics |= facts | slow_host
        metrics |= {
            "skipped": float(not good),
            "goodput": self.account.goodput,
            "step_seconds": seconds,
            "samples_per_second": facts["samples"] / seconds,
            "data_wait_share": facts["data_wait"] / seconds,
        }
        if step > self.start:  # the first step waited for compilation
            self.speed.add(seconds)
        board = step % self.board_every == 0
        if board:
            metrics |= {f"seconds/{cause}": s for cause, s in self.account.seconds.items() if s}
            metrics |= self.speed.report()
        self._write(step, metrics, board)
        for said in (line, self._data_wait.after(seconds, facts)):
            if said is not None:
                self.console.print(said, soft_wrap=True)
        self._recent.append((seconds, facts["data_wait"], now - asked))
        self._show(step, metrics["loss"])

    def _write(self, step: int, metrics: dict[str, Any], board: bool = True) -> None:
        if self.writer is not None:
            with self.failure.kept():
                self.writer.write(step, metrics, board)

    def _show(self, step: int, loss: float) -> None:
        seconds, data, device = (sum(parts) for parts in zip(*self._recent, strict=True))
        status = (
            f"loss {loss:.4f}, {len(self._recent) / seconds:.1f} steps/s, "
            f"waits {data / seconds:.0%} for data, {device / seconds:.0%} for the device"
        )
        self.bar.show(step + 1, status)
