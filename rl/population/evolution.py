"""A population's generations, one after the other: every member takes its turn and is evaluated,
then the worst copy the best (`rl.population.population`) and all continue.

Members are runs like any other, in RUN/members/K, and a member always continues from one of its
checkpoints. Decisions are written before they are carried out, and they can be carried out again,
so a population killed at any moment continues as if it had not been killed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.checkpoints import own
from models.config import to_json
from models.files.terminal import Console
from parallel import checkpoint
from parallel.hosts import exits
from parallel.monitor.goodput import read_account, total
from parallel.runs.mirror import Mirror, put_logs
from parallel.runs.retention import Retention
from parallel.runs.run_folder import (
    CONFIG_NAME,
    Run,
    check_steps_made,
    note_saved,
    write_config,
)
from parallel.shell import Shell, in_shell, opened
from rl.config import RlConfig
from rl.host.loop import Stopped
from rl.learner import Diverged
from rl.population.population import (
    Generation,
    PopulationConfig,
    check_population,
    configured,
    first_generation,
    next_generation,
    read_generations,
    set_damaged_generations_aside,
    turn_of,
    write_generations,
)
from rl.run import Placement, advance, begin, restore
from sim.acting import NotFinite

Params = Any
Evaluate = Callable[[int, Params, Sequence[Path], Callable[[], bool]], float]


@dataclass(frozen=True)
class PopulationResult:
    """Generations of a population; `finished` is false if a signal ended it. `exit_code`: of a
    process that only bred it (`parallel.hosts.exits`)."""

    generations: tuple[Generation, ...]
    finished: bool
    exit_code: int = 0

    @property
    def step(self) -> int:
        """Last step that all members have made."""
        return self.generations[-1].step if self.generations else 0

    @property
    def best(self) -> int:
        """Number of the best member of the last generation."""
        return self.generations[-1].best


def evolve(
    build: Callable[[RlConfig, Path], AbstractContextManager[Placement]],
    policy: Params,
    run: Run,
    config: RlConfig,
    population: PopulationConfig,
    console: Console,
    *,
    evaluate: Evaluate,
    rebuild: Callable[[], None] = lambda: None,
) -> PopulationResult:
    """Lets every member make `config.learner_steps` steps. RUN/checkpoints holds the checkpoint of
    the best member after the last whole generation (and that of the best generation, with
    `keep_best`), and RUN/population.jsonl holds the generations.

    A member's placement is kept between its turns; that of a member that copies another is rebuilt.
    With a mirror, each member has its own in MIRROR/members/K.

    Args:
      build: (config, directory) -> where a member acts and learns, in simulators that it shares
        with the others.
      policy: parameters that all begin with, for the first evaluation.
      run: its config becomes a member's with the member's numbers at "rl".
      evaluate: (step, params, directories, told) -> success on held-out starts, recorded in these
        directories; raises `Stopped` once `told()`, `NotFinite` if the policy's actions are not.
      rebuild: called after a member's turn failed, for what the failure may have damaged.

    SIGTERM or Ctrl-C end it with the last whole step of the member whose turn it is.

    Raises:
      ValueError: the population makes no sense, the folder holds one and is not resumed, it has
        made more than `config.learner_steps` steps or was made in another environment, or another
        run is at work in a member's folder (InUse).
      FileNotFoundError: a member's checkpoints are missing.
      OSError: a save failed, logs could not be written, or a checkpoint did not arrive in the
        mirror.
    """
    check_population(population, config)
    count = population.population
    with ExitStack() as stack:
        best: dict[int, float] = {}
        keep = Retention(1, best=best)
        shell = stack.enter_context(in_shell(run, config.learner_steps, keep, console))
        if run.folder.resume:
            set_damaged_generations_aside(run.directory, console)
        generations = read_generations(run.directory)
        if generations and not run.folder.resume:
            raise ValueError(
                f"{run.directory} holds a population already, of {len(generations) - 1} "
                f"generations; continue with --resume or name another directory."
            )
        if generations:
            check_steps_made(run.directory, generations[-1].step, config.learner_steps)
        members = []
        for k in range(count):
            path, mirror = run.directory / "members" / str(k), run.folder.mirror
            mirror = None if mirror is None else f"{mirror}/members/{k}"
            begun = run.folder.resume and (mirror is not None or (path / CONFIG_NAME).exists())
            folder = stack.enter_context(opened(path, begun, console, mirror))
            member = _Member(k, build, evaluate, rebuild, replace(run, folder=folder, origin={}))
            members.append(stack.enter_context(member))
        write_config(run)
        try:
            if not generations:
                paths = [member.run.directory for member in members]
                begun_with = evaluate(0, policy, paths, shell.stop.should_stop)
                generations.append(first_generation(config, population, begun_with))
                write_generations(run.directory, generations)
            console.print(_said(generations), soft_wrap=True)
            while generations[-1].step < config.learner_steps:
                last = generations[-1]
                best |= _scores(config, generations)
                if last.step:
                    _settle(shell, members, last)
                until = min(last.step + turn_of(population, config), config.learner_steps)
                success: list[float | None] = []
                for member, tuned in zip(members, last.hyperparameters, strict=True):
                    scores = _scores(config, generations, member.number)
                    keep = Retention(config.keep, config.keep_every, scores)
                    doing = f"generation {len(generations)}, member {member.number} of {count}"
                    changed = configured(config, tuned)
                    success.append(member.turn(changed, until, keep, shell, doing))
                generations.append(next_generation(config, last, until, success))
                write_generations(run.directory, generations)
                console.print(_said(generations), soft_wrap=True)
            best |= _scores(config, generations)
            _settle(shell, members, generations[-1])
        except Stopped:
            code = exits.of_signal(shell.stop.number)
            return PopulationResult(tuple(generations), finished=False, exit_code=code)
        spent = total(read_account(member.run.directory) for member in members)
        console.print(spent.report(), soft_wrap=True, highlight=False)
    return PopulationResult(tuple(generations), finished=True)


def _scores(
    config: RlConfig, generations: Sequence[Generation], member: int | None = None
) -> dict[int, float]:
    """By step, the value by which the best checkpoint is chosen, the lowest: of a member's own
    checkpoints, or of those of the best members."""
    found: dict[int, float] = {}
    for one in generations if config.keep_best else ():
        success = one.success[one.best if member is None else one.parents[member]]
        if success is not None:
            found[one.step] = -success
    return found


class _Member(AbstractContextManager["_Member"]):
    """A run of the population; once built, its placement has the newest checkpoint's state."""

    def __init__(
        self,
        number: int,
        build: Callable[..., Any],
        evaluate: Evaluate,
        rebuild: Callable[[], None],
        run: Run,
    ) -> None:
        self.number, self.run = number, run
        self._build, self._evaluate, self._rebuild = build, evaluate, rebuild
        self._stack = ExitStack()
        self._config: RlConfig | None = None
        self._place: Placement
        self._done = 0

    def turn(
        self, config: RlConfig, until: int, keep: Retention, outer: Shell, doing: str
    ) -> float | None:
        """Continues, or begins, with the numbers of `config` until `until` steps are made; raises
        `Stopped` if it is told to stop before that. Returns success on held-out starts, None if the
        policy no longer gives finite actions."""
        built, console = config == self._config, outer.console
        if not built:
            self.drop()
        run = replace(self.run, config={**self.run.config, "rl": to_json(config)})
        with in_shell(run, config.learner_steps, keep, console, stop=outer.stop) as shell:
            shell.saved = self._done if built else checkpoint.newest_good(shell.folder, console)
            success = None
            try:
                if (shell.saved or 0) < until:
                    if not built:
                        self._place = self._stack.enter_context(self._build(config, run.directory))
                        if shell.saved:
                            restore(self._place, shell.folder / str(shell.saved), console)
                        self._config = config
                    begin(shell, self._place)
                    self._done = advance(self._place, shell, config, until, doing, built).step
                    if shell.stop.should_stop() or self._done < until:
                        raise Stopped
                else:
                    shell.finish(until)
                params = own.restore_params(run.directory)
                success = self._evaluate(until, params, [run.directory], shell.stop.should_stop)
                shell.ledger.spend("evaluation")
            except (Diverged, NotFinite) as error:
                self.drop()
                self._rebuild()
                console.print(f"Member {self.number} failed: {error}", soft_wrap=True)
            shell.ledger.end(shell.ledger.account.steps)
        if run.folder.mirror is not None:
            put_logs(run.folder.mirror, run.directory)
        return success

    def copy(self, other: "_Member", step: int, console: Console) -> None:
        """Copies another member's checkpoint, to continue from it."""
        self.drop()
        path, directory = other.run.directory / "checkpoints" / str(step), self.run.directory
        checkpoint.copy(path, directory / "checkpoints")
        note_saved(directory, step)
        if self.run.folder.mirror is not None:
            with Mirror(self.run.folder.mirror, directory, 1, console) as mirror:
                mirror.put(step)
                mirror.finish(step)

    def drop(self) -> None:
        """Drops everything that is not saved."""
        self._stack.close()
        self._config = None

    def __exit__(self, *_: object) -> None:
        self.drop()


def _settle(shell: Shell, members: Sequence[_Member], last: Generation) -> None:
    """Carries out the decisions of a generation, unless that has been done: copies checkpoints to
    members that continue from others, and, last, the checkpoint of the best member."""
    run = shell.run
    if checkpoint.latest(shell.folder) != last.step:
        if run.folder.mirror is not None:
            put_logs(run.folder.mirror, run.directory)  # before it lacks what they decide about
        for member, parent in zip(members, last.parents, strict=True):
            if member.number != parent:
                member.copy(members[parent], last.step, shell.console)
        best = members[last.best].run.directory / "checkpoints" / str(last.step)
        checkpoint.copy(best, shell.folder, shell.keep)
        note_saved(run.directory, last.step)
    shell.finish(last.step)


def _said(generations: Sequence[Generation]) -> str:
    """Description of the last generation, for people."""
    last = generations[-1]
    lines = [f"After step {last.step}:"]
    for k, (found, parent) in enumerate(zip(last.success, last.parents, strict=True)):
        rate = "failed" if found is None else f"{found:.1%}"
        copies = f", continues from member {parent}" if parent != k else ""
        tuned = last.hyperparameters[k].items()
        numbers = ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in tuned)
        lines.append(f"  member {k}: {rate}{copies}, {numbers}")
    return "\n".join(lines)
