"""Draws what an RL run came to so far: success on held-out starts and in training, what
the learner says, how old what it learnt from was, and what everybody waited for. Of a population,
another: how its members did, with which numbers, and who copied whom.

    python -m tools.rl_curves runs/seed0 runs/seed1 runs/seed2 --out seeds.svg

compares runs. All is read from the run's metrics.jsonl, closed_loop.jsonl and population.jsonl, so
it can be drawn at any time.
"""

from pathlib import Path
from typing import Annotated

import tyro

from models.terminal import guard_tracebacks, harmless
from tools.command_line.ending import in_a_line
from tools.recipes.rl_figures import write_comparison


def main(
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Path = Path("comparison.svg"),
) -> None:
    """Compares runs of tools.rl by their success on held-out starts, in one figure."""
    with in_a_line(writing=out):
        write_comparison(runs, out)
    print(harmless(f"Figure: {out}"))


if __name__ == "__main__":
    guard_tracebacks()
    tyro.cli(main, prog="python -m tools.rl_curves")
