"""A population's generations, one after the other: every member takes its turn and is evaluated,
then the worst copy the best (`rl.population.population`) and all continue.

Members are runs like any other, in RUN/members/K, and a member always continues from one of its
checkpoints. Decisions are written before they are carried out, and they can be carried out again,
so a population killed at any moment continues as if it had not been killed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoints import own
from models.config import to_json
from models.files.terminal import Console
from parallel import checkpoint
from parallel.hosts.stop import StopSignals
from parallel.runs.run_folder import (
    Run,
    check_folder,
    check_saved,
    check_steps_made,
    note_saved,
    write_config,
)
from parallel.runs.run_lock import locked
from rl.config import RlConfig
from rl.host.loop import Stopped
from rl.learner import Diverged
from rl.population.population import (
    Generation,
    Hyperparameters,
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
from rl.run import Placement, advance, restore
from sim.acting import NotFinite

Params = Any
Evaluate = Callable[[int, Params, Sequence[Path], Callable[[], bool]], float]


@dataclass(frozen=True)
class PopulationResult:
    """Generations of a population; `finished` is false if a signal ended it."""

    generations: tuple[Generation, ...]
    finished: bool

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
    mend: Callable[[], None] = lambda: None,
    resume: bool = False,
) -> PopulationResult:
    """Lets every member make `config.steps` steps. RUN/checkpoints holds the checkpoint of the best
    member after the last whole generation, and RUN/population.jsonl holds the generations.

    A member's placement is kept between its turns; that of a member that copies another is rebuilt.

    Args:
      build: (config, directory) -> where a member acts and learns, in simulators that it shares
        with the others.
      policy: parameters that all begin with, for the first evaluation.
      run: its config becomes a member's with the member's numbers at "rl".
      evaluate: (step, params, directories, told) -> success on held-out starts, recorded in these
        directories; raises `Stopped` once `told()`, `NotFinite` if the policy's actions are not.
      mend: called after a member's turn failed, to rebuild what the failure may have damaged.

    SIGTERM or Ctrl-C end it with the last whole step of the member whose turn it is.

    Raises:
      ValueError: the population makes no sense, the folder holds one and `resume` is false, it has
        made more than `config.steps` steps or was made in another environment, or another run is at
        work in it or in a member's folder (InUse).
      FileNotFoundError: `resume` is true but the folder holds no run, or its checkpoints or a
        member's are missing.
    """
    check_population(population, config)
    check_folder(run.directory, resume)
    count = population.population
    with ExitStack() as stack:
        stack.enter_context(locked(run.directory, console))
        check_folder(run.directory, resume)  # another run may have ended there meanwhile
        if resume:
            set_damaged_generations_aside(run.directory, console)
        generations = read_generations(run.directory)
        if generations and not resume:
            raise ValueError(
                f"{run.directory} holds a population already, of {len(generations) - 1} "
                f"generations; continue with --resume or name another directory."
            )
        if generations:
            check_steps_made(run.directory, generations[-1].step, config.steps)
        folders = [run.directory / "members" / str(k) for k in range(count)]
        for folder in folders:
            check_saved(folder)
            stack.enter_context(locked(folder, console))
        stop = stack.enter_context(StopSignals())
        members = [
            stack.enter_context(_Member(k, build, Run(folder, run.config, run.assets)))
            for k, folder in enumerate(folders)
        ]
        write_config(run)
        try:
            if not generations:
                begun = evaluate(0, policy, [m.run.directory for m in members], stop.should_stop)
                generations.append(first_generation(config, population, begun))
                write_generations(run.directory, generations)
            console.print(_said(generations), soft_wrap=True)
            while generations[-1].step < config.steps:
                last = generations[-1]
                if last.step:
                    _settle(run.directory, members, last)
                until = min(last.step + turn_of(population, config), config.steps)
                success: list[float | None] = []
                for member, tuned in zip(members, last.hyperparameters, strict=True):
                    doing = f"generation {len(generations)}, member {member.number} of {count}"
                    found = None
                    try:
                        member.turn(configured(config, tuned), until, stop, console, doing)
                        found = evaluate(
                            until, member.saved(), [member.run.directory], stop.should_stop
                        )
                    except (Diverged, NotFinite) as error:
                        member.drop()
                        mend()
                        console.print(f"Member {member.number} failed: {error}", soft_wrap=True)
                    success.append(found)
                generations.append(next_generation(config, last, until, success))
                write_generations(run.directory, generations)
                console.print(_said(generations), soft_wrap=True)
            _settle(run.directory, members, generations[-1])
        except Stopped:
            return PopulationResult(tuple(generations), finished=False)
    return PopulationResult(tuple(generations), finished=True)


class _Member:
    """A run of the population; once built, its placement has the newest checkpoint's state."""

    def __init__(self, number: int, build: Callable[..., Any], run: Run) -> None:
        self.number, self.run = number, run
        self._build, self._stack = build, ExitStack()
        self._config: RlConfig | None = None
        self._place: Placement
        self._done = 0

    def turn(
        self, config: RlConfig, until: int, stop: StopSignals, console: Console, doing: str
    ) -> None:
        """Continues, or begins, with the numbers of `config` until `until` steps are made; raises
        `Stopped` if it is told to stop before that."""
        if config != self._config:
            self.drop()
            folder = self.run.directory / "checkpoints"
            self._done = checkpoint.newest_good(folder, console) or 0
            if self._done >= until:
                return
            self._place = self._stack.enter_context(self._build(config, self.run.directory))
            if self._done:
                restore(self._place, folder / str(self._done), console)
            self._config = config
        run = Run(self.run.directory, {**self.run.config, "rl": to_json(config)}, self.run.assets)
        write_config(run)
        made = advance(
            self._place,
            run,
            config,
            console,
            done=self._done,
            until=until,
            stop=stop,
            doing=doing,
        )
        self._done = made.step
        if stop.should_stop() or not made.finished:
            raise Stopped

    def saved(self) -> Params:
        """The policy's parameters as its newest checkpoint has them."""
        return own.restore_params(self.run.directory)

    def copy(self, other: "_Member", step: int) -> None:
        """Copies another member's checkpoint, to continue from it."""
        self.drop()
        path = other.run.directory / "checkpoints" / str(step)
        checkpoint.copy(path, self.run.directory / "checkpoints")
        note_saved(self.run.directory, step)

    def drop(self) -> None:
        """Drops everything that is not saved."""
        self._stack.close()
        self._config = None

    def __enter__(self) -> "_Member":
        return self

    def __exit__(self, *exception: object) -> None:
        self.drop()


def _settle(directory: Path, members: Sequence[_Member], last: Generation) -> None:
    """Carries out the decisions of a generation, unless that has been done: copies checkpoints to
    members that continue from others, and, last, the checkpoint of the best member."""
    best = directory / "checkpoints"
    if checkpoint.latest(best) == last.step:
        return
    for member, parent in zip(members, last.parents, strict=True):
        if member.number != parent:
            member.copy(members[parent], last.step)
    checkpoint.copy(members[last.best].run.directory / "checkpoints" / str(last.step), best)
    note_saved(directory, last.step)


def _said(generations: Sequence[Generation]) -> str:
    """Description of the last generation, for people."""
    last = generations[-1]
    lines = [f"After step {last.step}:"]
    for k, (found, parent) in enumerate(zip(last.success, last.parents, strict=True)):
        rate = "failed" if found is None else f"{found:.1%}"
        copies = f", continues from member {parent}" if parent != k else ""
        lines.append(f"  member {k}: {rate}{copies}, {_numbers(last.hyperparameters[k])}")
    return "\n".join(lines)


def _numbers(tuned: Hyperparameters) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in tuned.items())
