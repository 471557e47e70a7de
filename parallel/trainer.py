"""Training of a model from the start or its last checkpoint to an orderly end, whatever ends it.

`parallel.loop` runs the steps. This module decides where they begin, also after a bad step that
sends the run back, and what is reported at their end. It knows no model and no dataset by name.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from jax.sharding import Mesh

from models.checkpoints import own
from models.files.bounds import check_least
from models.files.terminal import Console
from models.inputs.packed_batch import PackedBatch
from models.sharding import Rules
from parallel import checkpoint
from parallel.evaluations import HELD_OUT_LOSS, Evaluations, check_judged, made_late
from parallel.hooks import Hook
from parallel.hosts import exits
from parallel.hosts.distributed import host_count, host_index
from parallel.hosts.stop import UNLOGGED
from parallel.loop import Loop, TrainerConfig
from parallel.mesh import check_rows, make_mesh
from parallel.monitor.speed import model_flops
from parallel.monitor.spikes import BadStep, Policy, check_record
from parallel.monitor.step_trace import traced_steps
from parallel.optimizer import OptimizerConfig, make_schedule
from parallel.runs.position import NoPosition, at_data, check_at_data
from parallel.runs.retention import Retention
from parallel.runs.run_folder import Run
from parallel.shell import Shell, in_shell
from parallel.step import (
    Trainable,
    TrainState,
    abstract_state,
    init_state,
    make_train_step,
    state_from,
)

__all__ = ["TrainResult", "TrainerConfig", "check_start", "train"]

Json = Any
_ROLLBACKS = 3  # to the same checkpoint
_MOST_STEPS = 2**31 - 1  # the state counts them as int32


@dataclass(frozen=True)
class TrainResult:
    """The state after `step` updates. `finished` is False if a signal ended the run early, but True
    if the run stopped early because of its evaluations. `exit_code`: of a process that only made
    this run (`parallel.hosts.exits`)."""

    state: TrainState
    step: int
    finished: bool
    exit_code: int = 0


def train(
    model: Trainable,
    rules: Rules,
    batches: Callable[[int, Json], Iterator[tuple[PackedBatch, Mapping[str, float]]]],
    position: Callable[[int], Json],
    run: Run,
    config: TrainerConfig,
    optimizer: OptimizerConfig,
    *,
    mesh: Mesh | None = None,
    initial: Callable[[Any], Any] | None = None,
    hooks: Sequence[Hook[TrainState]] = (),
    track: Sequence[str] = (),
) -> TrainResult:
    """Trains to `config.train_steps`, and saves along the way, at the end and when told to stop.

    `batches(step, position)` yields, from that step on, this host's rows (numpy) and values to log
    for them, at least `samples` (of all hosts). Its `position` is the result of `position(step)`
    when the checkpoint was saved (None at step 0). After a rollback, batches are ahead of steps,
    and both functions take the batch's number. `initial(like)` gives the parameters that a new run
    begins with, in the shapes and shardings of `like`. `hooks` are called between updates; hooks
    due after the same update share one line in the log. `track` names trackers, see
    `parallel.trackers.tracker.find_tracker`.

    SIGTERM or Ctrl-C on any host stops all hosts after the same step, which is saved; a second
    Ctrl-C interrupts at once.

    Raises:
      ValueError: a setting makes no sense; the run's checkpoint is of another model or has more
        steps than `config.train_steps`; parameters, rules, rows and mesh do not fit; a step is bad
        (BadStep).
      FileNotFoundError: all of the run's checkpoints are damaged.
      OSError: a save failed; or the logs could not be written (the last step is then saved); or the
        last checkpoint did not arrive in the mirror.
    """
    _check(config)
    mesh = make_mesh() if mesh is None else mesh
    optimizer = _until_the_end(optimizer, config)
    console = Console(quiet=host_index() != 0)
    abstract = abstract_state(model, optimizer, rules, mesh)

    def begin(saved: int | None) -> tuple[TrainState, Json]:
        """The state to continue from, at the newest good step, and its checkpoint's position."""
        if saved is not None:
            path = shell.folder / str(saved)
            record = own.read_json(path, "position")
            try:
                check_at_data(record)
                check_record(record["bad_steps"])
            except ValueError as error:
                raise NoPosition(path, error) from None
            return checkpoint.restore(path, abstract, verified=True), record
        if initial is not None:
            return state_from(initial(abstract.params), optimizer, abstract, consume=True), None
        return init_state(model, optimizer, abstract, np.uint32(config.seed % 2**32)), None

    evaluations = None
    if config.keep_best or config.patience:
        evaluations = Evaluations(config.keep_best or HELD_OUT_LOSS, config.patience)
    best = {} if evaluations is None else evaluations.finite
    keep = Retention(config.keep, config.keep_every, best)
    with in_shell(run, config.train_steps, keep, console, hooks=hooks, track=track) as shell:
        saved = shell.newest()
        done = saved or 0
        verdict = ""
        if evaluations is not None:
            evaluations.restore(run.directory, done)
            verdict = evaluations.verdict
        state, record = begin(saved)
        pending = record is not None and "owed" in record and not made_late(run.directory, done)
        pending = pending and bool(shell.due(done))
        if (done >= config.train_steps or verdict) and not pending:
            shell.finish(done)
            _say_early(verdict if done < config.train_steps else "", done, shell)
            return TrainResult(state, done, finished=True)
        shell.begin()
        loop = Loop(
            config=config,
            shell=shell,
            mesh=mesh,
            batches=batches,
            position=position,
            step=make_train_step(model, optimizer, mesh, abstract, config.accumulation, hosts=True),
            flops=partial(model_flops, model, optimizer),
            evaluations=evaluations,
            pending_evaluation=done if pending else None,
        )
        rollbacks: list[int | None] = []
        while True:
            offset = record["offset"] if record else 0
            try:
                with shell.failure.first():
                    state, done, skipped = loop.run(state, done, record)
                break
            except BadStep as bad:
                rollbacks.append(shell.saved)
                if config.on_bad_step != "rollback" or rollbacks.count(shell.saved) > _ROLLBACKS:
                    raise
                reason, resumed_at = str(bad), bad.step + 1 + offset
            saved = shell.go_back()
            done = saved or 0
            if evaluations is not None:
                evaluations.restore(run.directory, done)
            console.print(
                f"{reason} Going back to step {done} and on from there with batch {resumed_at}.",
                soft_wrap=True,
            )
            state, record = begin(saved)
            bad_steps = record["bad_steps"] if record else None
            record = at_data(position(resumed_at), resumed_at - done, bad_steps)
        ended = done == config.train_steps or bool(loop.verdict)
        ended = ended and loop.pending_evaluation != done
        unlogged = loop.stopped is not None and loop.stopped[1] == UNLOGGED
        shell.end(done, ended, unlogged)
        if skipped:
            console.print(f"{skipped} of {done} steps were bad and were skipped.")
        if loop.stopped:
            host, number = loop.stopped
            where = f" on host {host}" if host_count() > 1 else ""
            console.print(
                f"Stopped by {signal.Signals(number).name}{where} {shell.outcome(done)} continues "
                f"from there.",
                soft_wrap=True,
            )
        _say_early(loop.verdict, done, shell)
        console.print(shell.ledger.account.report(), soft_wrap=True, highlight=False)
    code = 0 if ended or loop.stopped is None else exits.of_signal(loop.stopped[1])
    return TrainResult(state, done, ended, code)


def _say_early(verdict: str, done: int, shell: Shell) -> None:
    if verdict:
        best = shell.keep.best_of(own.steps(shell.folder))
        kept = (
            f"Saved in {shell.folder}"
            if best is None
            else f"The best checkpoint is {shell.folder / str(best)}"
        )
        shell.console.print(
            f"Stopped early after step {done} of {shell.steps}: {verdict}. {kept}; --resume with "
            f"--trainer.patience 0 continues from the last.",
            soft_wrap=True,
        )


def check_start(rows: int, mesh: Mesh, config: TrainerConfig, optimizer: OptimizerConfig) -> None:
    """Makes all checks that are possible before data is read: the settings, the rows, the schedule,
    the steps to trace.

    Raises:
      ValueError: as `train` would.
    """
    _check(config)
    traced_steps(config.profile, config.train_steps, "trainer.profile")
    check_rows(rows, mesh, config.accumulation)
    make_schedule(_until_the_end(optimizer, config))
    check_judged(config.keep_best, config.patience, config.eval_every, config.save_every)


def _check(config: TrainerConfig) -> None:
    """Raises ValueError, with the field to change, for a setting that no run could use."""
    if config.train_steps > _MOST_STEPS:
        raise ValueError(
            f"trainer.train_steps is {config.train_steps}; give at most {_MOST_STEPS}."
        )
    least = {
        "train_steps": 1,
        "log_every": 1,
        "save_every": 0,
        "keep": 1,
        "keep_every": 0,
        "patience": 0,
        "eval_every": 0,
        "accumulation": 1,
        "prefetch": 0,
    }
    check_least({f"trainer.{name}": (getattr(config, name), x) for name, x in least.items()})
    if config.on_bad_step not in get_args(Policy):
        raise ValueError(
            f"trainer.on_bad_step is '{config.on_bad_step}'; choose one of "
            f"{', '.join(get_args(Policy))}."
        )
    if config.spike_factor and not config.spike_factor > 1:
        raise ValueError(
            f"trainer.spike_factor is {config.spike_factor}; it must be above 1, because "
            f"otherwise usual steps would count as bad, or 0 for no limit."
        )


def _until_the_end(optimizer: OptimizerConfig, config: TrainerConfig) -> OptimizerConfig:
    whole = optimizer.decay_steps is None
    return replace(optimizer, decay_steps=config.train_steps) if whole else optimizer
