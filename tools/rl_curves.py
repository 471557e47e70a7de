"""Compare runs of tools.rl in one figure: success on held-out starts, over the learner's steps and
over the minutes of acting and learning.

    python -m tools.rl_curves runs/seed0 runs/seed1 runs/seed2 --out seeds.svg

Everything is read from each run's metrics.jsonl and closed_loop.jsonl, so you can draw the figure
at any time.
"""

from pathlib import Path
from typing import Annotated

import tyro

from models.files.terminal import guard_tracebacks, harmless
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.recipes.rl_figures import write_comparison


def main(
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Path = Path("comparison.svg"),
) -> None:
    """Compare runs of tools.rl by their success on held-out starts, in one figure.

    Args:
      runs: folders of the runs.
      out: figure to write.
    """
    with in_a_line(writing=out):
        write_comparison(runs, out)
    print(harmless(f"Figure: {out}"))


if __name__ == "__main__":
    guard_tracebacks()
    cli(main, prog="python -m tools.rl_curves", description=__doc__)
