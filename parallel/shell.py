"""The shell of a run, the same for supervised training, RL and each member of a population: its
folder, signals to stop, checkpoints and which of them stay, mirror, trackers, hooks and the account
of its time. The loops inside (`parallel.loop`, `rl.run.advance`) decide only what a step is.

A run's folder is locked and checked once, by `opened`, before anything is read or prepared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models.files.terminal import Console
from parallel import checkpoint
from parallel.hooks import Hook
from parallel.hosts.agreement import agree
from parallel.hosts.distributed import host_index
from parallel.hosts.stop import StopSignals
from parallel.hosts.watchdog import note
from parallel.monitor import goodput, metrics
from parallel.monitor.goodput import Ledger
from parallel.runs.json_lines import set_damage_aside
from parallel.runs.log_failure import LogFailure
from parallel.runs.mirror import Mirror, begin
from parallel.runs.retention import Retention
from parallel.runs.run_folder import (
    Run,
    RunFolder,
    check_folder,
    check_saved,
    check_steps_made,
    holds_run,
    note_saved,
    write_config,
)
from parallel.runs.run_lock import locked
from parallel.trackers.trackers import Trackers

Json = Any
Resume = bool | Literal["auto"]
"""Continue a run, or begin one; "auto": continue it if there is one, else begin."""


@contextmanager
def opened(
    directory: Path, resume: Resume, console: Console, mirror: str | None = None
) -> Iterator[RunFolder]:
    """A run's folder, kept from other runs and brought back from its mirror if need be. All hosts
    must call it.

    Args:
      resume: "auto" resumes a run that is there, else begins one.
      mirror: URL of a folder where the run's checkpoints are also kept. If a run is in neither
        place, `resume` begins a new one.

    Raises:
      ValueError: the folder or its mirror holds a run and `resume` is false, or another run is at
        work in it (InUse).
      FileNotFoundError: `resume` is true but there is no run, or its checkpoints are missing.
      OSError: the mirror cannot be reached, or the checkpoint from it is damaged.
    """
    with locked(directory, console):
        if mirror is not None:
            resume = begin(mirror, directory, bool(resume), console)
        elif resume == "auto":
            found = agree("resume", "", lambda _: "yes" if holds_run(directory) else "no")
            resume = found == "yes"
        check_folder(directory, resume)
        yield RunFolder(directory, resume, mirror)


@contextmanager
def in_shell(
    run: Run,
    steps: int,
    keep: Retention,
    console: Console,
    *,
    hooks: Sequence[Hook[Any]] = (),
    track: Sequence[str] = (),
    stop: StopSignals | None = None,
) -> Iterator["Shell"]:
    """The shell of a run of `steps` steps, which ends with the block.

    Args:
      hooks: called between updates.
      track: names of trackers, see `parallel.trackers.tracker.find_tracker`.
      stop: signals of the run that this one is part of; default: its own. SIGTERM or Ctrl-C on any
        host are then only noted; a second Ctrl-C interrupts at once.
    """
    directory, first = run.directory, host_index() == 0
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopSignals())
        if run.folder.resume and first:
            set_damage_aside(directory / metrics.FILE_NAME, metrics.is_line, console)
            set_damage_aside(directory / goodput.FILE_NAME, goodput.is_line, console)
        ledger = stack.enter_context(Ledger(directory if first else None))
        mirror = None
        if run.folder.mirror is not None:
            mirror = stack.enter_context(Mirror(run.folder.mirror, directory, keep, console))
        yield Shell(run, steps, keep, console, hooks, track, stop, ledger, mirror, stack)


@dataclass
class Shell:
    """Surroundings of a run's steps. In this order: `newest`, to continue from; `begin`; between
    steps `evaluate` and `save`; and `end`.

    `saved` is the step of the last checkpoint. `failure` keeps the first error in writing a log:
    the loop then saves and stops.
    """

    run: Run
    steps: int
    keep: Retention
    console: Console
    hooks: Sequence[Hook[Any]]
    track: Sequence[str]
    stop: StopSignals
    ledger: Ledger
    mirror: Mirror | None
    _stack: ExitStack
    failure: LogFailure = field(default_factory=LogFailure)
    saved: int | None = None
    trackers: Trackers = field(init=False, repr=False)
    checkpoints: checkpoint.CheckpointWriter = field(init=False, repr=False)

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return self.run.directory / "checkpoints"

    def newest(self) -> int | None:
        """The step of the newest good checkpoint if the run is resumed, else None.

        Raises:
          ValueError: it is past the run's last step.
          FileNotFoundError: all checkpoints are damaged.
        """
        note("loading")
        if self.run.folder.resume:
            self.saved = checkpoint.newest_good(self.folder, self.console)
            done = self.saved or 0
            check_steps_made(self.run.directory, done, self.steps)
            self.console.print(
                f"Resuming {self.run.directory} at step {done} of {self.steps}.", soft_wrap=True
            )
        return self.saved

    def begin(self, config: Json = None) -> None:
        """Writes the run's config, and opens trackers and checkpoints; these hold `config` if it
        is given, else the run's.

        Raises:
          ValueError, FileNotFoundError: a tracker cannot be opened.
        """
        directory = self.run.directory
        if host_index() == 0:
            write_config(self.run)
            if self.saved is not None:
                note_saved(directory, self.saved)
        note("opening trackers")
        trackers = Trackers(
            self.track, directory, self.run.config, self.run.folder.resume, self.console
        )
        self.trackers = self._stack.enter_context(trackers)
        writer = checkpoint.CheckpointWriter(
            self.folder,
            config or self.run.config,
            self.run.assets,
            self.keep,
            on_saved=self._on_saved,
            console=self.console,
            held=tuple if self.mirror is None else self.mirror.held,
        )
        self.checkpoints = self._stack.enter_context(writer)

    def go_back(self) -> int | None:
        """The step of the newest good checkpoint, None if there is none, for a run whose steps
        since then are to be made again."""
        note("loading")
        self.checkpoints.wait()
        check_saved(self.run.directory)
        self.saved = checkpoint.newest_good(self.folder, self.console)
        return self.saved

    def due(self, done: int) -> list[Hook[Any]]:
        """Hooks to be called after `done` steps."""
        return [hook for hook in self.hooks if hook.due(done, self.steps)]

    def evaluate(self, done: int, state: Any, stopping: Callable[[], bool]) -> dict[str, float]:
        """Calls the hooks that are due after `done` steps, as `Hook` says; returns their
        metrics."""
        note("evaluating")
        found: dict[str, float] = {}
        with self.failure.kept():
            for hook in self.due(done):
                found |= hook.call(done, state, stopping)
        note("training")
        self.ledger.spend("evaluation")
        return found

    def save(
        self, done: int, state: Any, position: Json, sync: Callable[[], None]
    ) -> dict[str, float]:
        """Saves the state after `done` steps in the background, once `sync()` has brought the
        metrics to disk, so that these never lag behind a checkpoint; returns metrics.

        Raises:
          OSError: this save or the one before failed.
        """
        note("saving")
        with self.failure.kept():
            sync()
            self.ledger.sync()
        seconds = self.checkpoints.save(done, state, position)
        self.saved = done
        note("training")
        self.ledger.spend("checkpoint")
        return {"save_blocking_seconds": seconds}

    def finish(self, done: int) -> None:
        """Returns when the checkpoint of `done` steps is also in the mirror, if there is one.

        Raises:
          OSError: it cannot be copied there.
        """
        if self.mirror is not None:
            self.mirror.finish(done)

    def outcome(self, done: int) -> str:
        """End of a sentence on a run that has ended after `done` steps."""
        kept = f"saved in {self.folder}" if self.saved == done else "nothing to save yet"
        return f"after step {done} of {self.steps}, {kept}; the same command with --resume"

    def end(self, done: int, finished: bool, unlogged: bool = False) -> None:
        """Ends the run in an orderly way after `done` steps.

        Args:
          unlogged: all hosts know that the logs of one of them could not be written.

        Raises:
          OSError: logs could not be written, on any host; or the last checkpoint did not arrive in
            the mirror.
        """
        self.trackers.outcome = "finished" if finished else "stopped"
        if self.saved is not None:
            self.finish(self.saved)
        with self.failure.kept():
            self.ledger.end(done)
        final = None
        if self.failure.error is not None:
            said = f"The run was stopped {self.outcome(done)} then continues from there."
            final = self.failure.final(said)
        if unlogged:
            told = agree("unlogged", str(final or ""), lambda all_told: max(all_told, key=len))
            raise final or OSError(told)
        if final is not None:
            raise final

    def _on_saved(self, step: int) -> None:
        note_saved(self.run.directory, step)
        if self.mirror is not None:
            self.mirror.put(step)
