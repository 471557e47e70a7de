"""A gymnasium environment as a suite of one task; `sim.simulators.gym` runs it, in the Python
environment that `make gym` creates or in any other that has its packages (CHILIAD_GYM_PYTHON)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sim.processes.interpreters import interpreter
from sim.processes.processes import open_tasks
from sim.suite import Suite

INSTALL = "make gym"
SIMULATOR = Path(__file__).parents[1] / "simulators" / "gym.py"
PUSHT = "gym_pusht:gym_pusht/PushT-v0"
"""Diffusion Policy's task (arXiv 2303.04137) as LeRobot's package gym-pusht has it, which counts an
episode as a success when the block covers 95 % of its target."""


def suite(
    environment: str,
    *,
    prompts: tuple[str, ...] = (),
    max_steps: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    cameras: Mapping[str, str] | None = None,
    package: str = "gymnasium",
    patience: float = 60.0,
) -> Suite:
    """A suite of one task, named by the environment's id.

    Args:
      environment: "CartPole-v1", or "module:ID" if a module must be imported first.
      prompts: wordings of the task; by default the id's words.
      max_steps: longest episode; by default as registered, else 1000.
      arguments: arguments of the environment's constructor, as JSON.
      cameras: names of cameras by the keys of the observation's pictures, other than those they
        have anyway.
      package: one that it needs.
      patience: seconds after which the environment counts as hung.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    python = interpreter("gym", package, INSTALL)
    options = {
        "prompts": prompts or (_words(environment),),
        "max_steps": max_steps,
        "arguments": dict(arguments or {}),
        "cameras": dict(cameras or {}),
    }
    remedy = f"{INSTALL}, or set CHILIAD_GYM_PYTHON to a Python that has the environment"
    return Suite(
        name=f"gym:{environment}",
        tasks=(environment,),
        episodes=50,
        open=partial(open_tasks, SIMULATOR, python, options, remedy, patience=patience),
    )


def pusht() -> Suite:
    """`PUSHT` with the camera, prompt and units of LeRobot's dataset `pusht`; its pictures are
    drawn at 96 × 96 pixels.

    Raises:
      FileNotFoundError: as `suite`.
    """
    made = suite(
        PUSHT,
        prompts=("Push the T-shaped block onto the T-shaped target.",),
        arguments={"obs_type": "pixels_agent_pos"},
        cameras={"pixels": "observation.image"},
        package="gym_pusht",
    )
    return replace(made, name="pusht", action_range=((0.0, 512.0),) * 2)


def _words(environment: str) -> str:
    """ "module:space/MountainCarContinuous-v0" as "mountain car continuous"."""
    name = re.split("[:/]", environment)[-1]
    name = re.sub(r"-v\d+$", "", name)
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()
