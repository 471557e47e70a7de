"""Training of a model from the start or its last checkpoint to an orderly end, whatever ends it.

`parallel.loop` runs the steps. This module decides where they begin, also after a bad step that
sends the run back, and what is reported at their end. It knows no model and no dataset by name.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
from parallel.hosts.agreement import agree
from parallel.hosts.distributed import host_count, host_index
from parallel.hosts.stop import UNLOGGED, StopSignals
from parallel.hosts.watchdog import note
from parallel.loop import Loop, TrainerConfig
from parallel.mesh import check_rows, make_mesh
from parallel.monitor.goodput import Ledger, set_damaged_account_aside
from parallel.monitor.metrics import set_damaged_metrics_aside
from parallel.monitor.speed import model_flops
from parallel.monitor.spikes import BadStep, Policy, check_record
from parallel.monitor.step_trace import traced_steps
from parallel.optimizer import OptimizerConfig, make_schedule
from parallel.retention import Retention
from parallel.runs.log_failure import LogFailure
from parallel.runs.mirror import Mirror
from parallel.runs.position import NoPosition, at_data, check_at_data
from parallel.runs.run_folder import (
    CONFIG_NAME,
    Run,
    check_folder,
    check_saved,
    check_steps_made,
    note_saved,
    write_config,
)
from parallel.runs.run_lock import locked
from parallel.step import (
    Trainable,
    TrainState,
    abstract_state,
    init_state,
    make_train_step,
    state_from,
)
from parallel.trackers.trackers import Trackers

__all__ = ["CONFIG_NAME", "Run", "TrainResult", "TrainerConfig", "check_start", "train"]

Json = Any
_ROLLBACKS = 3  # to the same checkpoint


@dataclass(frozen=True)
class TrainResult:
    """The state after `step` updates. `finished` is False if a signal ended the run early, but True
    if the run stopped early because of its evaluations."""

    state: TrainState
    step: int
    finished: bool


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
    resume: bool = False,
    initial: Callable[[Any], Any] | None = None,
    hooks: Sequence[Hook[TrainState]] = (),
    mirror: str | None = None,
    track: Sequence[str] = (),
) -> TrainResult:
    """Trains to `config.steps`, and saves along the way, at the end and when told to stop.

    `batches(step, position)` yields, from that step on, this host's rows (numpy) and values to log
    for them, at least `samples` (of all hosts). Its `position` is the result of `position(step)`
    when the checkpoint was saved (None at step 0). After a rollback, batches are ahead of steps,
    and both functions take the batch's number. `initial(like)` gives the parameters that a new run
    begins with, in the shapes and shardings of `like`. `hooks` are called between updates; hooks
    due after the same update share one line in the log. `mirror` is the URL of a folder where
    checkpoints are also kept. `track` names trackers, see `parallel.trackers.tracker.find_tracker`.

    SIGTERM or Ctrl-C on any host stops all hosts after the same step, which is saved; a second
    Ctrl-C interrupts at once.

    Raises:
      ValueError: a setting makes no sense; the directory holds checkpoints and `resume` is false;
        another run is at work in it (InUse); its checkpoint is of another model or has more steps
        than `config.steps`; parameters, rules, rows and mesh do not fit; a step is bad (BadStep).
      FileNotFoundError: `resume` is true but the directory holds no run, or its checkpoints are
        missing.
      OSError: a save failed; or the logs could not be written (the last step is then saved); or the
        last checkpoint did not arrive in the mirror.
    """
    _check(config)
    mesh = make_mesh() if mesh is None else mesh
    optimizer = _until_the_end(optimizer, config)
    console = Console(quiet=host_index() != 0)
    folder = run.directory / "checkpoints"
    check_folder(run.directory, resume)
    abstract = abstract_state(model, optimizer, rules, mesh)

    def begin(saved: int | None) -> tuple[TrainState, Json]:
        """The state to continue from, at the newest good step, and the position in its
        checkpoint."""
        if saved is not None:
            path = folder / str(saved)
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

    with ExitStack() as stack:
        stack.enter_context(locked(run.directory, console))
        check_folder(run.directory, resume)  # another run may have ended there in the meantime
        stop = stack.enter_context(StopSignals())
        if resume and host_index() == 0:
            set_damaged_metrics_aside(run.directory, console)
            set_damaged_account_aside(run.directory, console)
        ledger = stack.enter_context(Ledger(run.directory if host_index() == 0 else None))
        note("loading")
        saved = checkpoint.newest_good(folder, console) if resume else None
        done = saved or 0
        check_steps_made(run.directory, done, config.steps)
        evaluations = None
        if config.keep_best or config.patience:
            evaluations = Evaluations(config.keep_best or HELD_OUT_LOSS, config.patience)
            evaluations.restore(run.directory, done)
        best = evaluations.finite if evaluations is not None else {}
        keep = Retention(config.keep, config.keep_every, best)
        verdict = evaluations.verdict if evaluations is not None else ""
        state, record = begin(saved)
        if resume:
            console.print(
                f"Resuming {run.directory} at step {done} of {config.steps}.", soft_wrap=True
            )
        kept_at = (
            None
            if mirror is None
            else stack.enter_context(Mirror(mirror, run.directory, keep, console))
        )
        owed = record is not None and "owed" in record and not made_late(run.directory, done)
        owed = owed and any(hook.due(done, config.steps) for hook in hooks)
        if (done >= config.steps or verdict) and not owed:
            if kept_at is not None:
                kept_at.finish(done)
            _say_early(verdict if done < config.steps else "", done, config, folder, best, console)
            return TrainResult(state, done, finished=True)
        if host_index() == 0:
            write_config(run)
            if saved is not None:
                note_saved(run.directory, saved)
        note("opening trackers")
        trackers = stack.enter_context(Trackers(track, run.directory, run.config, resume, console))
        writer = checkpoint.CheckpointWriter(
            folder,
            run.config,
            run.assets,
            keep,
            on_saved=partial(_saved, run.directory, kept_at),
            console=console,
            held=tuple if kept_at is None else kept_at.held,
        )
        checkpoints = stack.enter_context(writer)
        loop = Loop(
            config=config,
            directory=run.directory,
            mesh=mesh,
            console=console,
            batches=batches,
            position=position,
            step=make_train_step(model, optimizer, mesh, abstract, config.accumulation, hosts=True),
            flops=partial(model_flops, model, optimizer),
            hooks=hooks,
            stop=stop,
            checkpoints=checkpoints,
            ledger=ledger,
            failure=(failure := LogFailure()),
            saved=saved,
            owed=done if owed else None,
            evaluations=evaluations,
            trackers=trackers,
        )
        rollbacks: list[int | None] = []
        while True:
            offset = record["offset"] if record else 0
            try:
                state, done, skipped = loop.run(state, done, record)
                break
            except BadStep as bad:
                rollbacks.append(loop.saved)
                if config.on_bad_step != "rollback" or rollbacks.count(loop.saved) > _ROLLBACKS:
                    raise
                reason, resumed_at = str(bad), bad.step + 1 + offset
            except OSError as error:
                if failure.error is None:
                    raise
                raise failure.final(str(error)) from error
            note("loading")
            checkpoints.wait()
            check_saved(run.directory)
            loop.saved = checkpoint.newest_good(folder, console)
            done = loop.saved or 0
            if evaluations is not None:
                evaluations.restore(run.directory, done)
            console.print(
                f"{reason} Going back to step {done} and on from there with batch {resumed_at}.",
                soft_wrap=True,
            )
            state, record = begin(loop.saved)
            bad_steps = record["bad_steps"] if record else None
            record = at_data(position(resumed_at), resumed_at - done, bad_steps)
        ended = (done == config.steps or bool(loop.verdict)) and loop.owed != done
        trackers.outcome = "finished" if ended else "stopped"
        if kept_at is not None and loop.saved is not None:
            kept_at.finish(loop.saved)
        with failure.kept():
            ledger.end(done)
        kept = f"saved in {folder}" if loop.saved == done else "nothing to save yet"
        outcome = f"after step {done} of {config.steps}, {kept}; the same command with --resume"
        _raise_unlogged(loop, f"The run was stopped {outcome} then continues from there.")
        if skipped:
            console.print(f"{skipped} of {done} steps were bad and were skipped.")
        if loop.stopped:
            host, number = loop.stopped
            where = f" on host {host}" if host_count() > 1 else ""
            console.print(
                f"Stopped by {signal.Signals(number).name}{where} {outcome} continues from there.",
                soft_wrap=True,
            )
        _say_early(loop.verdict, done, config, folder, best, console)
        console.print(ledger.account.report(), soft_wrap=True, highlight=False)
    return TrainResult(state, done, finished=ended)


def _say_early(
    verdict: str,
    done: int,
    config: TrainerConfig,
    folder: Path,
    values: Mapping[int, float],
    console: Console,
) -> None:
    if verdict:
        judged = [step for step in own.steps(folder) if step in values]
        best = min(judged, key=lambda step: values[step], default=None)
        kept = (
            f"Saved in {folder}" if best is None else f"The best checkpoint is {folder / str(best)}"
        )
        console.print(
            f"Stopped early after step {done} of {config.steps}: {verdict}. {kept}; --resume with "
            f"--trainer.patience 0 continues from the last.",
            soft_wrap=True,
        )


def _saved(directory: Path, mirror: Mirror | None, step: int) -> None:
    note_saved(directory, step)
    if mirror is not None:
        mirror.put(step)


def _raise_unlogged(loop: Loop, outcome: str) -> None:
    """Ends a run whose logs could not be written. If all hosts stopped for that, all raise the
    message of the host at fault."""
    final = loop.failure.final(outcome) if loop.failure.error else None
    if loop.stopped and loop.stopped[1] == UNLOGGED:
        told = agree("unlogged", str(final or ""), lambda all_told: max(all_told, key=len))
        raise final or OSError(told)
    if final is not None:
        raise final


def check_start(
    directory: Path,
    resume: bool,
    rows: int,
    mesh: Mesh,
    config: TrainerConfig,
    optimizer: OptimizerConfig,
) -> None:
    """Makes all checks that are possible before data is read: the folder, the settings, the rows,
    the schedule, the steps to trace.

    Raises:
      ValueError, FileNotFoundError: as `train` would.
    """
    check_folder(directory, resume)
    _check(config)
    traced_steps(config.profile, config.steps, "trainer.profile")
    check_rows(rows, mesh, config.accumulation)
    make_schedule(_until_the_end(optimizer, config))
    check_judged(config.keep_best, config.patience, config.eval_every, config.save_every)


def _check(config: TrainerConfig) -> None:
    """Raises ValueError, with the field to change, for a setting that no run could use."""
    least = {
        "steps": 1,
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
    return replace(optimizer, decay_steps=config.steps) if whole else optimizer
