"""A run of RL from a supervised policy, or from its own last checkpoint, to an orderly end,
whatever ends it; its placement decides where acting and learning happen.

Checkpoints are like those of any run: they hold the acting policy as supervised training does, so
that evaluation and serving can read it. All else that the run needs to resume is beside it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from models.checkpoints import own
from models.files.terminal import Console
from parallel import checkpoint
from parallel.hooks import Hook, due
from parallel.hosts.stop import StopSignals
from parallel.hosts.watchdog import note
from parallel.monitor.metrics import MetricsWriter, set_damaged_metrics_aside
from parallel.monitor.progress import StepBar
from parallel.monitor.step_trace import StepTrace, traced_steps
from parallel.runs.log_failure import LogFailure
from parallel.runs.position import NoPosition
from parallel.runs.run_folder import Run, check_folder, check_steps_made, note_saved, write_config
from parallel.runs.run_lock import locked
from parallel.trackers.trackers import Trackers
from rl.config import RlConfig
from rl.environment import FIELD, check_environment

Params = Any
Json = Any


class Placement(Protocol):
    """Acting and learning. `state` has all arrays that a run needs to resume, in a dict whose "ema"
    are the policy's parameters; `record` has everything else that it needs. `environment`: where it
    acts, as `rl.environment.describe` returns it."""

    environment: Json

    def run(
        self,
        on_step: Callable[[dict[str, float]], None],
        should_stop: Callable[[], bool],
        until: int,
    ) -> None:
        """Makes the remaining steps up to step `until`, or as many as it can before `should_stop()`
        is true. After each step, `on_step` gets its metrics, perhaps on another thread; an error
        from `on_step` ends the run."""

    def state(self) -> dict[str, Any]:
        """Contents of a checkpoint; asked for before and after `run`, and within `on_step`."""

    def record(self) -> Json:
        """Progress of the run besides its state, as JSON."""

    def restore(self, state: dict[str, Any], record: Json) -> None:
        """Restores the contents of a checkpoint, before `run`; raises ValueError, with the field,
        if the record is not one of this placement's."""


@dataclass(frozen=True)
class RlResult:
    """The policy's parameters after `step` updates; not `finished` if a signal ended the run."""

    params: Params
    step: int
    finished: bool


def improve(
    build: Callable[[], AbstractContextManager[Placement]],
    run: Run,
    config: RlConfig,
    console: Console,
    *,
    resume: bool = False,
    hooks: Sequence[Hook[Params]] = (),
    track: Sequence[str] = (),
) -> RlResult:
    """Makes `config.steps` steps, saving on the way, at the end and when told to stop.

    `hooks` get the policy's parameters, and must copy them and return. Those with `ends` are called
    before the first step, and each is called when it is due. `track` names trackers, see
    `parallel.trackers.tracker.find_tracker`.

    SIGTERM or Ctrl-C end the run with a checkpoint of the last whole step; a second Ctrl-C
    interrupts at once.

    Raises:
      ValueError: the folder holds a run and `resume` is false, another run is at work in it
        (InUse), or its checkpoint is of another run, was learned in another environment or has more
        steps than `config.steps`.
      FileNotFoundError: `resume` is true but the folder holds no run, or its checkpoints are
        missing.
    """
    check_folder(run.directory, resume)
    folder = run.directory / "checkpoints"
    with ExitStack() as stack:
        stack.enter_context(locked(run.directory, console))
        check_folder(run.directory, resume)  # another run may have ended there meanwhile
        stop = stack.enter_context(StopSignals())
        note("loading")
        place = stack.enter_context(build())
        saved = checkpoint.newest_good(folder, console) if resume else None
        if saved is not None:
            restore(place, folder / str(saved), console)
        done = saved or 0
        check_steps_made(run.directory, done, config.steps)
        if resume:
            console.print(
                f"Resuming {run.directory} at step {done} of {config.steps}.", soft_wrap=True
            )
        write_config(run)
        if saved is not None:
            note_saved(run.directory, saved)
        note("evaluating")
        for hook in hooks:
            if done == 0 and hook.ends and hook.every:
                hook.call(0, place.state()["ema"], stop.should_stop)
        trackers = stack.enter_context(Trackers(track, run.directory, run.config, resume, console))
        result = advance(
            place,
            run,
            config,
            console,
            done=done,
            until=config.steps,
            stop=stop,
            hooks=hooks,
            trackers=trackers,
        )
        trackers.outcome = "finished" if result.finished else "stopped"
        return result


def restore(place: Placement, path: Path, console: Console) -> None:
    """Restores a placement from a checkpoint that has been verified.

    Raises:
      ValueError: it was learned in another environment, or its record is not valid (NoPosition).
    """
    check_environment(path, place.environment, console)
    record = own.read_json(path, "position")
    state = checkpoint.restore(path, place.state(), verified=True)
    try:
        place.restore(state, record)
    except ValueError as error:
        raise NoPosition(path, error) from None


def advance(
    place: Placement,
    run: Run,
    config: RlConfig,
    console: Console,
    *,
    done: int,
    until: int,
    stop: StopSignals,
    hooks: Sequence[Hook[Params]] = (),
    doing: str = "improving",
    trackers: Trackers | None = None,
) -> RlResult:
    """Lets a placement that has made `done` steps, which are saved, continue to step `until`;
    otherwise as `improve`.

    Raises:
      OSError: a save failed, or the logs could not be written, and then the last step is saved.
    """
    saved, failure = done, LogFailure()
    wanted = traced_steps(config.profile, config.steps, "profile")
    if done >= until:
        return RlResult(place.state()["ema"], done, finished=True)
    with ExitStack() as stack:
        folder = run.directory / "checkpoints"
        set_damaged_metrics_aside(run.directory, console)
        writer = stack.enter_context(
            checkpoint.CheckpointWriter(
                folder,
                {**run.config, FIELD: place.environment},
                run.assets,
                on_saved=partial(note_saved, run.directory),
                console=console,
            )
        )
        metrics = stack.enter_context(MetricsWriter(run.directory, done, trackers))
        bar = stack.enter_context(StepBar(console, doing, done, until))

        trace = stack.enter_context(StepTrace(wanted, run.directory, done, console, failure))

        def stopping() -> bool:
            return stop.should_stop() or failure.error is not None

        def save() -> None:
            nonlocal saved
            note("saving")
            with failure.kept():
                metrics.sync()  # so that metrics never lag a checkpoint
            seconds = writer.save(done, place.state(), place.record())
            saved = done
            with failure.kept():
                metrics.write(done - 1, {"save_blocking_seconds": seconds})

        def on_step(found: dict[str, float]) -> None:
            nonlocal done
            writer.check()
            done += 1
            note("training", done)
            if trace.turns(done):
                trace.turn()
            for hook in hooks:
                if hook.due(done, until):
                    note("evaluating")
                    with failure.kept():
                        found = found | hook.call(done, place.state()["ema"], stopping)
            with failure.kept():
                metrics.write(done - 1, found)
            if done == until or due(done, config.save_every):
                save()
            said = [says.format(found[name]) for name, says in _SAID.items() if name in found]
            bar.show(done, ", ".join(said))
            note("training")

        if trace.turns(done):
            trace.turn()
        note("compiling", done)  # on the way to the first step
        place.run(on_step, stopping, until)
        trace.close()
        note("saving")
        try:
            if done != saved:
                save()
            writer.wait()
        except OSError as error:
            if failure.error is None:
                raise
            raise failure.final(str(error)) from error
        if failure.error is not None:
            raise failure.final(
                f"The run was stopped after step {done} of {config.steps}, saved in {folder}; "
                f"--resume then continues from there."
            )
        return RlResult(place.state()["ema"], done, finished=done >= until)


_SAID = {
    "success": "success {:.0%}",
    "lag": "lag {:.2f}",
    "ess": "ESS {:.0%}",
    "env_steps_per_second": "{:.0f} env steps/s",
    "learner_busy": "learner busy {:.0%}",
}
"""Metrics of a step shown beside the progress bar."""
