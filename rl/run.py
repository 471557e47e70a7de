"""A run of RL from a supervised policy, or from its own last checkpoint, to an orderly end,
whatever ends it; its placement decides where acting and learning happen.

The shell is that of any run (`parallel.shell`). Checkpoints hold the acting policy as supervised
training does, so that evaluation and serving can read it. All else that the run needs to resume is
beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from models.checkpoints import own
from models.files.terminal import Console
from parallel import checkpoint
from parallel.hooks import Hook, due
from parallel.hosts import exits, inject
from parallel.hosts.distributed import host_count, host_index
from parallel.hosts.facts import any_host
from parallel.hosts.stop import UNLOGGED, Stopped
from parallel.hosts.watchdog import note
from parallel.monitor.metrics import MetricsWriter
from parallel.monitor.progress import StepBar
from parallel.monitor.step_trace import StepTrace, traced_steps
from parallel.runs.position import NoPosition
from parallel.runs.retention import Retention
from parallel.runs.run_folder import Run
from parallel.shell import Shell, in_shell
from rl.config import RlConfig
from rl.environment import FIELD, check_environment
from rl.records import TaskOutcome

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
        from `on_step` ends the run, and Stopped does so in an orderly way. On several hosts, all
        make the same steps, and only `on_step` says when to stop."""

    def state(self) -> dict[str, Any]:
        """Contents of a checkpoint; asked for before and after `run`, and within `on_step`."""

    def record(self) -> Json:
        """Progress of the run besides its state, as JSON."""

    def restore(self, state: dict[str, Any], record: Json) -> None:
        """Restores the contents of a checkpoint, before `run`; raises ValueError, with the field,
        if the record is not one of this placement's."""


def step_metrics(
    learnt: Mapping[str, Any], tasks: Mapping[str, TaskOutcome], seconds: float
) -> dict[str, float]:
    """Metrics of a step, by the names that they have in every placement.

    Args:
      learnt: what `FlowLearner.update` returned.
      tasks: outcomes by task; each has its own success, signal and groups if there are several.
      seconds: since the last step ended.
    """
    found, lags = dict(learnt), learnt["lags"]
    del found["lags"]
    whole = TaskOutcome(*(sum(x) for x in zip(*tasks.values(), strict=True)))
    env_steps, decisions = whole.env_steps, found["decisions"]
    several = tasks if len(tasks) > 1 else {}
    return {
        **found,
        **({"return": whole.rewards / whole.episodes} if whole.episodes else {}),
        **_rates(whole),
        **{
            f"{name}/{task}": value
            for task, one in several.items()
            for name, value in _rates(one).items()
        },
        "episodes": whole.episodes,
        "lag": sum(lag * count for lag, count in enumerate(lags)) / decisions,
        **{f"lag/{lag}": count for lag, count in enumerate(lags) if count},
        "env_steps": env_steps,
        "step_seconds": seconds,
        "env_steps_per_second": env_steps / seconds,
        "decisions_per_second": decisions / seconds,
    }


def _rates(of: TaskOutcome) -> dict[str, float]:
    found = {"success": of.successes / of.episodes} if of.episodes else {}
    return found | ({"signal": of.signal / of.groups, "groups": of.groups} if of.groups else {})


@dataclass(frozen=True)
class RlResult:
    """The policy's parameters after `step` updates; not `finished` if a signal ended the run.
    `exit_code`: of a process that only made this run (`parallel.hosts.exits`)."""

    params: Params
    step: int
    finished: bool
    exit_code: int = 0


def improve(
    build: Callable[[], AbstractContextManager[Placement]],
    run: Run,
    config: RlConfig,
    console: Console,
    *,
    keep: Retention | None = None,
    hooks: Sequence[Hook[Params]] = (),
    track: Sequence[str] = (),
) -> RlResult:
    """Makes `config.learner_steps` steps, saving on the way, at the end and when told to stop.

    `keep` selects the checkpoints that stay; by default, as the config says, but without a best.
    `hooks` get the policy's parameters, and must copy them and return. Those with `ends` are called
    before the first step, and each is called when it is due. `track` names trackers, see
    `parallel.trackers.tracker.find_tracker`.

    SIGTERM or Ctrl-C, on any host, end the run with a checkpoint of the last whole step; a second
    Ctrl-C interrupts at once.

    Raises:
      ValueError: the run's checkpoint is of another run, was learned in another environment or has
        more steps than `config.learner_steps`.
      FileNotFoundError: all of its checkpoints are damaged.
      OSError: as `advance`.
    """
    keep = keep or Retention(config.keep, config.keep_every)
    with in_shell(run, config.learner_steps, keep, console, hooks=hooks, track=track) as shell:
        done = shell.newest() or 0
        with build() as place:
            if shell.saved is not None:
                restore(place, shell.folder / str(done), console)
            begin(shell, place)
            note("evaluating")
            for hook in hooks:
                if done == 0 and hook.ends and hook.every:
                    hook.call(0, place.state()["ema"], shell.stop.should_stop)
            result = advance(place, shell, config, config.learner_steps)
            console.print(shell.ledger.account.report(), soft_wrap=True, highlight=False)
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


def begin(shell: Shell, place: Placement) -> None:
    """Begins a run whose checkpoints also say in which environment it learns."""
    shell.begin({**shell.run.config, FIELD: place.environment})


def advance(
    place: Placement,
    shell: Shell,
    config: RlConfig,
    until: int,
    doing: str = "improving",
    compiled: bool = False,
) -> RlResult:
    """Lets a placement continue from the shell's last checkpoint to step `until`, and ends the
    shell's run there or where it is told to stop.

    Args:
      compiled: the placement has made steps before. If not, its first is counted as compilation.

    Raises:
      OSError: a save failed, the logs could not be written, and then the last step is saved; or the
        last checkpoint did not arrive in the mirror.
    """
    done, console, failure = shell.saved or 0, shell.console, shell.failure
    hosts, stopped = host_count(), None
    if done >= until:
        shell.end(done, finished=True)
        return RlResult(place.state()["ema"], done, finished=True)
    directory, ledger = shell.run.directory, shell.ledger
    wanted = traced_steps(config.profile, config.learner_steps, "profile")
    ledger.begin(done)
    with ExitStack() as stack:
        metrics = None
        if host_index() == 0:
            metrics = stack.enter_context(MetricsWriter(directory, done, shell.trackers))
        bar = stack.enter_context(StepBar(console, doing, done, until))
        trace = StepTrace(wanted, directory, done, console, failure)
        stack.callback(trace.close)

        def own() -> int:
            return shell.stop.number or (0 if failure.error is None else UNLOGGED)

        def stopping() -> bool:
            return own() != 0

        def turn() -> None:
            if trace.turns(done):
                trace.turn()
                ledger.spend("profile")

        def write(found: Mapping[str, float]) -> None:
            if metrics is not None:
                with failure.kept():
                    metrics.write(done - 1, dict(found))

        def sync() -> None:
            if metrics is not None:
                metrics.sync()

        def save() -> None:
            write(shell.save(done, place.state(), place.record(), sync))

        def on_step(found: dict[str, float]) -> None:
            nonlocal done, compiled, stopped
            shell.checkpoints.check()
            done += 1
            if not compiled:
                ledger.spend("compile")
            compiled = True
            ledger.spend("step")
            with failure.kept():
                ledger.made(done)
            note("training", done)
            turn()
            if shell.due(done):
                found = found | shell.evaluate(done, place.state()["ema"], stopping)
            write(found)
            if done == until or due(done, config.save_every):
                save()
            said = [says.format(found[name]) for name, says in _SAID.items() if name in found]
            bar.show(done, ", ".join(said))
            note("training")
            inject.at(done)
            if hosts > 1 and done < until and (stopped := any_host(own())):
                raise Stopped

        turn()
        ledger.spend("start")
        note("compiling", done)  # on the way to the first step
        inject.at(done)
        place.run(on_step, stopping, until)
        trace.close()
        note("saving")
        with failure.first():
            if done != (shell.saved or 0):
                save()
            shell.checkpoints.wait()
        ledger.spend("checkpoint")
    stopped = stopped or any_host(own())
    shell.end(done, done >= until, stopped is not None and stopped[1] == UNLOGGED)
    code = 0 if done >= until or stopped is None else exits.of_signal(stopped[1])
    return RlResult(place.state()["ema"], done, done >= until, code)


_SAID = {
    "success": "success {:.0%}",
    "lag": "lag {:.2f}",
    "ess": "ESS {:.0%}",
    "env_steps_per_second": "{:.0f} env steps/s",
    "learner_busy": "learner busy {:.0%}",
}
"""Metrics of a step shown beside the progress bar."""
