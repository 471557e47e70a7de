"""The training loop: steps, metrics, checkpoints, and an orderly end whatever ends it.

Batches wait on the device ahead of time and metrics are read late, so neither data nor logging
stops the device while they keep up. Knows no model and no dataset by name.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from models.checkpoints import own
from models.inputs import PackedBatch
from models.sharding import Rules
from parallel import checkpoint
from parallel.distributed import host_index, put_batch
from parallel.mesh import check_rows, make_mesh
from parallel.metrics import MetricsWriter
from parallel.optimizer import OptimizerConfig, make_schedule
from parallel.prefetch import Prefetcher
from parallel.progress import StepLog
from parallel.step import (
    Model,
    TrainState,
    abstract_state,
    init_state,
    make_train_step,
    state_from,
)

Json = Any
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class TrainerConfig:
    """How long to train and what to do on the way; steps count updates.

    Every step goes to metrics.jsonl, every `log_every`-th to TensorBoard. The last `keep`
    checkpoints stay. `eval_every` 0 never evaluates. A batch is taken in `accumulation`
    micro-batches; `prefetch` batches wait on the device.
    """

    steps: int = 1000
    log_every: int = 10
    save_every: int = 1000
    keep: int = 3
    eval_every: int = 0
    accumulation: int = 1
    seed: int = 0
    prefetch: int = 2


@dataclass(frozen=True)
class Run:
    """Where a run lives, and what its checkpoints carry besides the state, as JSON values."""

    directory: Path
    config: Json
    assets: Json


@dataclass(frozen=True)
class Trained:
    """The state after `step` updates; not `finished` if a signal ended the run before its time."""

    state: TrainState
    step: int
    finished: bool


def train(
    model: Model,
    rules: Rules,
    batches: Callable[[int, Json], Iterator[tuple[PackedBatch, Mapping[str, float]]]],
    position: Callable[[int], Json],
    run: Run,
    config: TrainerConfig,
    optimizer: OptimizerConfig,
    *,
    mesh: Mesh | None = None,
    resume: bool = False,
    initial: Callable[[Any], Any] | None = None,
    on_eval: Callable[[int, TrainState], dict[str, float]] | None = None,
) -> Trained:
    """Trains to `config.steps`, saving on the way, at the end and when told to stop.

    `batches(step, position)` yields from that step on this host's rows (numpy) and what is to be
    logged of them, `samples` (of all hosts) at least; `position` is what `position(step)` gave when
    the checkpoint was saved (None at step 0). `initial(like)` gives
    the parameters that a new run begins with, in the shapes and shardings of `like`. `on_eval(step,
    state)` is called after every `eval_every` updates; what it returns is logged, and it must not
    keep the state. SIGTERM and Ctrl-C finish the step under way, save and return; a second Ctrl-C
    interrupts at once.

    Raises:
      ValueError: the directory holds checkpoints and `resume` is false; its checkpoint is of
        another model; parameters, rules, rows and mesh do not fit; a loss is not finite.
      FileNotFoundError: `resume` is true but the directory holds no run.
    """
    mesh = make_mesh() if mesh is None else mesh
    optimizer = _until_the_end(optimizer, config)
    console = Console(quiet=host_index() != 0)
    folder = run.directory / "checkpoints"
    saved = _saved_step(run.directory, resume)
    abstract = abstract_state(model, optimizer, rules, mesh)
    seed = np.uint32(config.seed % 2**32)
    if saved is None:
        start, where = 0, None
        if initial is None:
            state = init_state(model, optimizer, abstract, seed)
        else:
            state = state_from(initial(abstract.params), optimizer, abstract)
    else:
        start, where = saved, own.read_json(folder / str(saved), "position")
        state = checkpoint.restore(folder / str(saved), abstract)
    if resume:
        console.print(
            f"Resuming {run.directory} at step {start} of {config.steps}.", soft_wrap=True
        )
    if start >= config.steps:
        return Trained(state, start, finished=True)
    if host_index() == 0:
        _write_config(run)

    train_step = make_train_step(model, optimizer, mesh, abstract, config.accumulation)
    with ExitStack() as stack:
        stop = stack.enter_context(_StopSignals())
        checkpoints = stack.enter_context(
            checkpoint.CheckpointWriter(folder, run.config, run.assets, config.keep)
        )
        source = stack.enter_context(
            Prefetcher(
                batches(start, where), lambda b: (put_batch(b[0], mesh), b[1]), config.prefetch
            )
        )
        writer = None
        if host_index() == 0:
            writer = stack.enter_context(MetricsWriter(run.directory, start))
        log = stack.enter_context(StepLog(writer, console, start, config.steps, config.log_every))
        done, last_saved = start, saved
        while done < config.steps and stop.name is None:
            begin = time.perf_counter()
            try:
                item = next(source, None)
            except Exception as error:
                if stop.name is None:
                    raise
                console.print(f"After {stop.name}, the loader: {error!r}", soft_wrap=True)
                break  # the signal ended the loader's processes too; what was trained is saved
            if item is None:
                raise ValueError(
                    f"The data ended after {done} of {config.steps} steps; batches must go on."
                )
            batch, facts = item
            state, metrics = train_step(state, batch, seed)
            waits = {"data_wait": source.wait, "data_ready": source.ready}
            log.started(done, begin, metrics, {**facts, **waits})
            done += 1
            if on_eval is not None and config.eval_every and done % config.eval_every == 0:
                log.drain()
                log.evaluated(done - 1, on_eval(done, state))
            if done == config.steps or done % config.save_every == 0:
                log.drain()
                checkpoints.save(done, state, position(done))
                last_saved = done
        if done != last_saved:
            log.drain()
            checkpoints.save(done, state, position(done))
    if done < config.steps:
        console.print(
            f"Stopped by {stop.name} after step {done} of {config.steps} and saved in {folder}; "
            f"the same command with --resume goes on from there.",
            soft_wrap=True,
        )
    return Trained(state, done, finished=done == config.steps)


def check_start(
    directory: Path,
    resume: bool,
    rows: int,
    mesh: Mesh,
    config: TrainerConfig,
    optimizer: OptimizerConfig,
) -> None:
    """All that can be refused before data is read: the folder, the rows, the schedule.

    Raises:
      ValueError, FileNotFoundError: as `train` would.
    """
    _saved_step(directory, resume)
    check_rows(rows, mesh, config.accumulation)
    make_schedule(_until_the_end(optimizer, config))


def _until_the_end(optimizer: OptimizerConfig, config: TrainerConfig) -> OptimizerConfig:
    whole = optimizer.decay_steps is None
    return replace(optimizer, decay_steps=config.steps) if whole else optimizer


class _StopSignals:
    """While entered, SIGTERM and Ctrl-C leave their name here; a second Ctrl-C interrupts."""

    name: str | None = None

    def __enter__(self) -> "_StopSignals":
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        os.write(2, b"\nFinishing this step and saving; Ctrl-C aborts instead.\n")


def _saved_step(directory: Path, resume: bool) -> int | None:
    saved = checkpoint.latest(directory / "checkpoints")
    if resume and not (directory / CONFIG_NAME).exists():
        raise FileNotFoundError(
            f"{directory} holds no run to resume: it has no {CONFIG_NAME}; check the path or start "
            f"without --resume."
        )
    if saved is not None and not resume:
        raise ValueError(
            f"{directory} holds a run already, saved at step {saved}; go on with --resume or name "
            f"another directory."
        )
    return saved


def _write_config(run: Run) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    temporary = run.directory / f"{CONFIG_NAME}.tmp"
    temporary.write_text(json.dumps(run.config, indent=2) + "\n")
    os.replace(temporary, run.directory / CONFIG_NAME)
