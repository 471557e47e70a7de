"""`tools.rl` on the points, as one process or several, and what came of it."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.checkpoints import own
from parallel.monitor.metrics import read_metrics
from tests.helpers.parallel.launched import ended
from tests.helpers.rl.points import save_policy

MINE = """
from dataclasses import replace
from parallel.mesh import MeshConfig
from tests.helpers.rl.points import HOST, POINTS

PRESET = replace(
    HOST,
    rollout=replace(HOST.rollout, suite=f"{__file__}:POINTS", groups=4),
    mesh=MeshConfig(fsdp=2),
)
"""


def begin(folder: Path) -> list[str]:
    """Writes a policy and a preset for it; returns the command that improves it, without --out."""
    (folder / "mine.py").write_text(MINE)
    save_policy(folder / "policy")
    options = ["--checkpoint", folder / "policy", "--preset", f"{folder / 'mine.py'}:PRESET"]
    return ["-m", "tools.rl", *map(str, options)]


def improve(
    command: list[str], *options: str | Path, hosts: int, devices: int, code: int = 0
) -> str:
    """Output of the command as so many processes of so many devices each, which end with `code`."""
    launcher = ["-m", "tools.launch", "-n", str(hosts), "--", "python"] if hosts > 1 else []
    return ended([sys.executable, *launcher, *command, *map(str, options)], devices, code)


def learnt(out: Path) -> tuple[Any, dict[int, dict[str, float]]]:
    """The policy's parameters, and by step the metrics that do not depend on time."""
    params = own.restore_params(out / "checkpoints" / str(max(own.steps(out / "checkpoints"))))
    timed = ("seconds", "per_second", "idle", "busy", "batch_fill")
    steps: dict[int, dict[str, float]] = {}
    for row in read_metrics(out):
        found = {name: x for name, x in row.items() if not any(word in name for word in timed)}
        steps.setdefault(int(row["step"]), {}).update(found)
    return jax.tree.map(np.asarray, params), steps
