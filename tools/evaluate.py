"""Let a trained policy act in simulation and write a report: success by task, beside controls and
other policies on the same starts.

    python -m tools.evaluate --checkpoint runs/mine --suite tabletop-lift --out runs/mine/evaluation
    python -m tools.evaluate --checkpoint runs/mine --suite metaworld --tasks reach-v3 push-v3 \\
        --compare runs/other --out runs/mine/metaworld

Every finished episode is kept in episodes.jsonl: the same command goes on after an interruption,
and more --episodes add to those that are there.
"""

import sys

import tyro

from models.terminal import Console, guard_tracebacks
from tools.command_line.ending import in_a_line
from tools.command_line.options import current_options
from tools.recipes.evaluation import JOURNAL, EvaluateConfig, run


def main() -> None:
    """Command line."""
    arguments = current_options(sys.argv[1:], EvaluateConfig, steps="euler_steps")
    config = tyro.cli(
        EvaluateConfig, args=arguments, prog="python -m tools.evaluate", description=__doc__
    )
    journal = config.out / JOURNAL
    kept = f"{journal} keeps the finished episodes: the same command goes on from there."
    with in_a_line(kept, writing=config.out):
        run(config, Console())


if __name__ == "__main__":
    guard_tracebacks()
    main()
