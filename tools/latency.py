"""Measure how long a suite's environments take per chunk and per reset, for RL benchmarks in which
environments only wait (`python -m tools.bench rl`).

    python -m tools.latency --suite metaworld --tasks reach-v3 --out reach.json

One slot at a time takes random actions, so that nothing else shares the machine with it.
"""

import os
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import tyro

from models.terminal import Console, guard_tracebacks
from rl.simulated.latency import Measured, measure, write
from sim.protocol import Start
from sim.suites import load_suite
from tools.command_line.ending import in_a_line
from tools.command_line.options import current_options


@dataclass(frozen=True)
class LatencyConfig:
    """Suite to measure and file to write."""

    out: Path
    """JSON file to write: lists of seconds, `chunk` and `reset`."""
    suite: str = "metaworld"
    """Suite to measure."""
    tasks: tuple[str, ...] = ()
    """Selection of the suite's tasks; default: its first task."""
    replan_steps: int = 4
    """Control steps per chunk."""
    chunks: int = 200
    """Chunks to measure per task."""
    resets: int = 20
    """Resets to measure per task."""
    image_size: int = 48
    """Edge of the camera images, in pixels."""


def main(config: LatencyConfig, console: Console) -> None:
    """Measures one task after another and writes all their seconds into one file.

    Raises:
      ValueError: no such task, or a simulator fails.
      FileNotFoundError: the suite is not installed.
    """
    suite = load_suite(config.suite)
    chunks: list[float] = []
    resets: list[float] = []
    for task in chain.from_iterable(suite.groups(config.tasks or suite.tasks[:1])):
        with closing(suite.open((task,), 1, config.image_size)) as slots:
            starts = [Start(task, seed) for seed in range(max(config.resets, 1))]
            each = max(config.chunks // len(starts), 1)
            found = measure(slots, starts, replan_steps=config.replan_steps, each=each)
        chunks += found.chunk.seconds
        resets += found.reset.seconds
        console.print(f"{task}: {_said(found.chunk)} a chunk, {_said(found.reset)} a reset")
    about = asdict(config) | {"out": None, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    write(config.out, Measured(tuple(chunks)), Measured(tuple(resets)), about)


def _said(measured: Measured) -> str:
    p50, p99 = np.percentile(measured.seconds, (50, 99)) * 1000
    return f"{p50:.1f} ms (p99 {p99:.1f} ms, {len(measured.seconds)} times)"


if __name__ == "__main__":
    guard_tracebacks()
    config = tyro.cli(
        LatencyConfig,
        args=current_options(sys.argv[1:], LatencyConfig),
        prog="python -m tools.latency",
        description=__doc__,
    )
    with in_a_line(writing=config.out):
        main(config, Console())
