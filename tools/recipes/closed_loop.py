"""Evaluation in simulation while training continues: the trainer stops to copy the averaged
parameters, and a thread lets them act on the suite's starts.

Every evaluation adds a line to closed_loop.jsonl; with several hosts, the first one evaluates. An
evaluation that is due while another runs waits for it, and is left out if the next one is due
meanwhile: the trainer never waits, and its last parameters are always evaluated.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models import Policy
from models.files.terminal import Console
from models.robot_policy import RobotPolicy
from parallel.hosts import watchdog
from parallel.hosts.distributed import host_count, host_index
from parallel.runs.json_lines import read_lines, set_damage_aside
from parallel.runs.log_failure import naming
from parallel.step import TrainState
from sim.protocol import Slots, Start
from sim.results import Evaluation, joined
from sim.statistics import Rate
from sim.suite import Suite
from sim.suites import load_suite
from tools.recipes.conditions import Condition, in_batches
from tools.recipes.presets import ClosedLoopConfig

FILE_NAME = "closed_loop.jsonl"


class _Abandoned(Exception):
    pass


class ClosedLoop(AbstractContextManager["ClosedLoop"]):
    """Runs evaluations; use it as a context manager. The end of the block waits for the last
    evaluation; an error or `abandon` ends that evaluation with its current episode.

    Args:
      policy: the model with its processor; its parameters are not used.
      beside: those of the tasks whose success is recorded beside that of the others.

    Attributes:
      scores: by step, what it lacked of success, for a `Retention`; on the first host.
      pending: steps whose evaluation is not over yet.

    Raises:
      ValueError, FileNotFoundError: no such suite, task or starts, or the policy does not fit.
    """

    def __init__(
        self,
        config: ClosedLoopConfig,
        policy: Policy,
        directory: Path,
        console: Console,
        beside: Sequence[str] = (),
    ) -> None:
        self._config, self._beside = config, tuple(beside)
        self._directory, self._console = directory, console
        self.scores: dict[int, float] = {}
        self.pending: set[int] = set()
        self._lock = threading.Lock()
        self._waiting: tuple[int, Any] | None = None
        self._thread: threading.Thread | None = None
        self._abandoned, self._awaited = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._suite = load_suite(config.suite)
        self._groups = self._suite.groups(config.tasks)
        self._suite.judged(config.episodes)
        self._count = self._suite.count(config.slots, config.episodes * len(self._groups[0]))
        self._policy = in_batches(policy, self._count)
        if host_index() == 0:
            with closing(self._suite.open(self._groups[0], 1, self._size)) as slots:
                RobotPolicy.in_suite(policy, slots.spec)
            set_damaged_evaluations_aside(directory, console)
            for line in read_closed_loop(directory):
                self.scores[line["step"]] = 1 - line["success"]["rate"]

    def begin(self, step: int, state: TrainState, stopping: Callable[[], bool]) -> dict[str, float]:
        """`evaluate` of the averaged parameters, or nothing if the run is stopping."""
        return {} if stopping() else self.evaluate(step, state.averaged)

    def evaluate(self, step: int, params: Any) -> dict[str, float]:
        """Evaluates a copy of the policy's parameters after `step` updates, once the previous
        evaluation is done; all hosts must make the same calls.

        Returns:
          Seconds that the copy took, by the metric's name.

        Raises:
          Exception: the error of an earlier evaluation.
        """
        start = time.perf_counter()
        copied = jax.tree.map(_copied, params)
        seconds = time.perf_counter() - start
        if self._error is not None:  # raised once no other host waits for this one's part
            raise self._error
        if host_index() == 0:
            self._put(step, copied)
        return {"closed_loop_copy_seconds": seconds}

    def abandon(self) -> None:
        """Gives up the evaluation that is running."""
        self._abandoned.set()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()
        thread = self._thread
        if thread is not None:
            watchdog.note("evaluating")
            self._awaited.set()
            if thread.is_alive() and not self._abandoned.is_set():
                self._console.print(f"Waiting for the last evaluation in '{self._suite.name}'.")
            thread.join()
        if kind is None and self._error is not None:
            raise self._error

    @property
    def _size(self) -> int:
        return self._suite.edge(self._policy.model.config.edge)

    def _put(self, step: int, params: Any) -> None:
        with self._lock:
            if self._waiting is not None:
                self.pending.discard(self._waiting[0])
                self._console.print(
                    f"Step {self._waiting[0]} was not evaluated in '{self._suite.name}', "
                    "because the previous evaluation took too long; evaluate less often or on "
                    "fewer episodes."
                )
            self._waiting = step, params
            self.pending.add(step)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="closed loop", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            while waiting := self._take():
                start = time.perf_counter()
                step, found = waiting[0], self._evaluate(waiting[1])
                seconds = time.perf_counter() - start
                success = note(self._directory, step, seconds, found, self._beside)
                self.scores[step] = 1 - success.value
                self.pending.discard(step)
                self._console.print(f"After step {step}, '{self._suite.name}': {success}")
        except _Abandoned:
            pass
        except BaseException as error:  # raised by `evaluate` or the block's end
            self._error = error

    def _take(self) -> tuple[int, Any] | None:
        with self._lock:
            taken, self._waiting = self._waiting, None
            if taken is None:
                self._thread = None
            return taken

    def _evaluate(self, params: Any) -> Evaluation:
        config, suite = self._config, self._suite
        parts = []
        for tasks in self._groups:
            starts = held_out(suite, tasks, config.episodes)
            with closing(suite.open(tasks, self._count, self._size)) as slots:
                parts.append(
                    acted(self._policy, params, slots, starts, config.replan_steps, self._go_on)
                )
        return joined(parts, suite.name)

    def _go_on(self, ended: int, episodes: int) -> None:
        if self._awaited.is_set():  # before that, the run's own steps show that it is alive
            watchdog.alive()
        if self._abandoned.is_set():
            raise _Abandoned


def held_out(suite: Suite, tasks: Sequence[str], episodes: int) -> list[Start]:
    """Starts of each task that are never used for training.

    Raises:
      ValueError: see `Suite.judged`.
    """
    seeds = suite.judged(episodes)
    return [Start(task, seed) for task in tasks for seed in seeds]


def acted(
    policy: Policy,
    params: Any,
    slots: Slots,
    starts: Sequence[Start],
    replan_steps: int,
    on_progress: Callable[[int, int], None],
) -> Evaluation:
    """Evaluates the policy with these parameters (on the host), on this process's first device.

    Args:
      on_progress: called with (episodes ended, episodes in all); if it raises, the rest does not
        run.
    """
    placed = jax.device_put(params, jax.local_devices()[0])
    acting = Condition("training", policy.varied(params=placed))
    return acting.evaluate(slots, starts, replan_steps, clips=0, progress=on_progress)


def note(
    directory: Path, step: int, seconds: float, found: Evaluation, beside: Sequence[str] = ()
) -> Rate:
    """Adds an evaluation after `step` updates to a run's closed_loop.jsonl; returns its success, of
    all tasks but those `beside`, which the line has as "held_out"."""
    success = Rate.of(e.success for e in found.episodes if e.task not in beside)
    line = {
        "step": step,
        "seconds": round(seconds, 1),
        "success": success.to_json(),
        "by_task": {task: part.success.to_json() for task, part in found.by_task.items()},
    }
    if beside:
        held_out = Rate.of(e.success for e in found.episodes if e.task in beside)
        line["held_out"] = held_out.to_json() | {"tasks": list(beside)}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    with naming(path), path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return success


def read_closed_loop(directory: Path) -> list[dict[str, Any]]:
    """Evaluations of a run in the order of their steps; of an evaluation made twice, the later one.

    Raises:
      ValueError: a line is damaged.
    """
    found = {line["step"]: line for line in read_lines(directory / FILE_NAME, is_line)}
    return [found[step] for step in sorted(found)]


def set_damaged_evaluations_aside(directory: Path, console: Console) -> None:
    """Keeps the good lines of a damaged closed_loop.jsonl, before a run resumes."""
    set_damage_aside(directory / FILE_NAME, is_line, console)


def is_line(line: dict[str, Any]) -> bool:
    """True for a line of closed_loop.jsonl."""
    return type(line["step"]) is int and is_rate(line["success"])


def is_rate(success: Mapping[str, Any]) -> bool:
    """True for a success rate with the ends of its interval."""
    rates = [success[name] for name in ("rate", "low", "high")]
    return all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates)


def _copied(x: jax.Array) -> np.ndarray | None:
    """The whole array on the first host; None on others."""
    if host_count() == 1:
        return np.array(x)
    whole = multihost_utils.process_allgather(x, tiled=True)
    return whole if host_index() == 0 else None
