"""`python -m tests.helpers.parallel.train_hosts RUN [--resume] [--inject FAULTS] [--patience
SECONDS] [--profile A:B]`: the toy's run as one of several processes that `tools.launch` or a test
began."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from parallel.hosts import inject
from parallel.hosts.distributed import row_share
from parallel.hosts.job import restarts, start
from parallel.hosts.watchdog import Watchdog
from parallel.mesh import make_mesh
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, Fed, batches, position

CONFIG = TrainerConfig(train_steps=32, save_every=4, keep=2)


def shares(start: int, where: Any) -> Iterator[Fed]:
    """This host's rows of the toy's batches."""
    index, count = row_share(make_mesh())
    for batch, facts in batches(start, where):
        rows = len(batch.state) // count
        mine = slice(index * rows, (index + 1) * rows)
        yield jax.tree.map(lambda x, m=mine: x[m], batch), facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--inject", default="")
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--profile", default="")
    options = parser.parse_args()
    config = replace(CONFIG, profile=options.profile)
    start()
    with Watchdog(options.run, options.patience):
        inject.arm(options.inject, options.run)
        resume = options.resume or ("auto" if restarts() else False)
        run = Run(options.run, config={"model": "toy"}, assets={})
        result = train(Denoiser(), RULES, shares, position, run, config, OPTIMIZER, resume=resume)
    print("finished" if result.finished else "stopped", "at", result.step, flush=True)
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
