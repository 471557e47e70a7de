"""`python -m tests.helpers.rl.struck RUN colocated|population [FAULT STEPS]`: a run of RL that
begins or goes on, and that a fault hits once this process has made so many steps.

`log`: the metrics are on a full disk from then on. `full`: no file takes another byte. `unmounted`:
the checkpoints of one member are elsewhere, a file in their place. `kill`: the process dies.
"""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel.runs.run_folder import CONFIG_NAME
from rl.device.placement import OnDevice
from tests.helpers.models.tiny_policy import tiny_policy
from tests.helpers.parallel.full_disk import fill
from tests.helpers.parallel.opened import Run
from tests.helpers.rl.opened import evolve, improve
from tests.rl.device import test_placement as test_colocated_placement
from tests.rl.population import test_evolution
from tools.command_line.ending import in_a_line

KINDS = ("log", "full", "unmounted", "kill")
AWAY = "checkpoints.away"
COLOCATED = replace(test_colocated_placement.CONFIG, learner_steps=24, save_every=3, eval_every=0)
POPULATION = replace(test_evolution.CONFIG, learner_steps=24, save_every=2, eval_every=4)


def strike(kind: str, run: Path) -> None:
    """Lets a fault hit the run, or member, in a folder."""
    print("struck", kind, flush=True)
    match kind:
        case "log":
            fill(run / "metrics.jsonl")
        case "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        case "unmounted":
            checkpoints = run / "checkpoints"
            checkpoints.rename(run / AWAY)
            while not checkpoints.is_file():  # a save under way may make the folder again
                shutil.rmtree(checkpoints, ignore_errors=True)
                with suppress(FileExistsError):
                    checkpoints.touch(exist_ok=False)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def repair(out: Path) -> None:
    """Mounts again what was unmounted."""
    for away in list(out.rglob(AWAY)):
        checkpoints = away.with_name("checkpoints")
        checkpoints.unlink()
        away.rename(checkpoints)


class Struck:
    """`rl.run.Placement`: another one, in which a fault happens after so many steps."""

    def __init__(self, place: Any, struck: Callable[[], None]) -> None:
        self._place, self._struck = place, struck

    def run(self, on_step: Any, should_stop: Any, until: int) -> None:
        def after(found: dict[str, float]) -> None:
            on_step(found)
            self._struck()

        self._place.run(after, should_stop, until)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)


def main(out: Path, kind: str, fault: str = "", steps: str = "0") -> None:
    left = int(steps) if fault else sys.maxsize

    def counted(run: Path) -> Callable[[], None]:
        def step() -> None:
            nonlocal left
            left -= 1
            if left == 0 or (left < 0 and fault == "log"):  # each turn opens its logs again
                strike(fault, run)

        return step

    resume, console = (out / CONFIG_NAME).exists(), Console(quiet=True)
    if kind == "colocated":
        policy, suite = tiny_policy(), test_colocated_placement.POINT
        place = Struck(OnDevice(policy, suite, ("point",), COLOCATED), counted(out))
        made = Run(out, {}, {})
        improve(lambda: nullcontext(place), made, COLOCATED, console, resume=resume)
        return

    @contextmanager
    def build(config: Any, run: Path) -> Iterator[Any]:
        yield Struck(test_evolution.Descent(config), counted(run))

    evolve(
        build,
        test_evolution.BEGIN,
        Run(out, {}, {}),
        POPULATION,
        test_evolution.TWO,
        console,
        evaluate=test_evolution.score,
        resume=resume,
    )


if __name__ == "__main__":
    with in_a_line("--resume goes on.", writing=sys.argv[1]):
        main(Path(sys.argv[1]), *sys.argv[2:])
    print("finished", flush=True)
