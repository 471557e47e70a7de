"""Evaluate a trained policy in simulation and write a report: success by task, beside controls and
other policies on the same starts. Or compare its chunks with those recorded in a dataset.

    python -m tools.evaluate --checkpoint runs/mine --suite tabletop-lift --out runs/mine/evaluation
    python -m tools.evaluate --checkpoint runs/mine --suite metaworld --tasks reach-v3 push-v3 \\
        --compare runs/other --out runs/mine/metaworld
    python -m tools.evaluate --data datasets/mine --checkpoint runs/mine --out runs/mine/open_loop

With --data, nothing acts, and `--data PATH --help` lists the options (docs/debugging.md). Every
finished episode of a suite is kept in episodes.jsonl: after an interruption, the same command
resumes, and a larger --episodes adds to the episodes that are there.
"""

import sys

from models.files.terminal import Console, guard_tracebacks
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli, current_options
from tools.recipes import open_loop
from tools.recipes.evaluation import JOURNAL, EvaluateConfig, run
from tools.recipes.open_loop import OpenLoopConfig

_PROGRAM = "python -m tools.evaluate"


def main() -> None:
    """Command line."""
    if any(argument.partition("=")[0] == "--data" for argument in sys.argv[1:]):
        look = cli(OpenLoopConfig, prog=_PROGRAM, description=open_loop.__doc__)
        with in_a_line(writing=look.out):
            open_loop.run(look, Console())
        return
    arguments = current_options(sys.argv[1:], EvaluateConfig, steps="euler_steps")
    config = cli(EvaluateConfig, args=arguments, prog=_PROGRAM, description=__doc__)
    journal = config.out / JOURNAL
    kept = f"Finished episodes are kept in {journal}; run the same command again to continue."
    with in_a_line(kept, writing=config.out):
        run(config, Console())


if __name__ == "__main__":
    guard_tracebacks()
    main()
