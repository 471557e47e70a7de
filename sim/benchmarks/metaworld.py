"""Meta-World as a suite: `sim.simulators.metaworld` simulates it, in the Python environment that
`make metaworld` creates.

Starts are drawn from seeds, while the benchmark has 50 fixed starts per task. Demonstrations use
the seeds in `sim.protocol.TRAIN_SEEDS`, evaluation the first 50 of EVAL_SEEDS.
"""

from functools import partial
from pathlib import Path
from typing import Any

from sim.processes.interpreters import interpreter
from sim.processes.processes import open_tasks
from sim.protocol import Slots
from sim.simulators.metaworld_prompts import PROMPTS
from sim.suite import Suite

INSTALL = "make metaworld"
SIMULATOR = Path(__file__).parents[1] / "simulators" / "metaworld.py"
MT10 = (
    *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3"),
    *("button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3"),
)
"""Tasks of the benchmark MT10."""
CORNER, SIDES = ("corner", "wrist"), ("close", "left")
FAMILIES = {
    "metaworld": (tuple(PROMPTS), CORNER),
    "metaworld_mt10": (MT10, SIDES),
    "metaworld_mt50": (tuple(PROMPTS), SIDES),
}
"""Tasks and cameras: the package's corner camera, as in LeRobot, and wrist camera; or two closer
cameras of ours, on two sides."""


def suite(
    name: str = "metaworld",
    paraphrased: bool = False,
    draw_every: int = 1,
    antialias: bool = True,
) -> Suite:
    """All 50 tasks or ten of them, with 50 starts each, for a policy with two cameras.

    Args:
      name: a key of `FAMILIES`.
      paraphrased: whether prompts are wordings that no recording has.
      draw_every: steps from one drawn picture to the next, for recordings; frames in between repeat
        the last picture. Policies are judged with 1.
      antialias: whether edges are smooth, as when policies are judged; without, drawing takes less
        time.

    Raises:
      FileNotFoundError: Meta-World is not installed.
    """
    python = interpreter("metaworld", "metaworld", INSTALL)
    tasks, cameras = FAMILIES[name]
    return Suite(
        name=f"{name}_paraphrase" if paraphrased else name,
        tasks=tasks,
        episodes=50,
        open=partial(
            open_slots,
            python=python,
            cameras=cameras,
            paraphrased=paraphrased,
            draw_every=draw_every,
            antialias=antialias,
        ),
        action_range=((-1.0, 1.0),) * 4,
        variants={} if paraphrased else {"paraphrase": f"{name}_paraphrase"},
        cheaper=partial(suite, name, paraphrased),
        about="wordings that no recording has" if paraphrased else "",
    )


def open_slots(
    tasks: tuple[str, ...],
    count: int,
    size: int,
    *,
    python: Path | None = None,
    **options: Any,
) -> Slots:
    """Slots for some tasks; `options` are those of `sim.simulators.metaworld.Simulator`.

    Raises:
      ValueError: no such task, camera or option, or the simulator does not start.
      FileNotFoundError: Meta-World is not installed.
    """
    python = python or interpreter("metaworld", "metaworld", INSTALL)
    return open_tasks(SIMULATOR, python, options, INSTALL, tasks, count, size)
