"""`python -m tests.helpers.parallel.train_toy RUN [--resume] [--slow] [--long]`: the toy's run as a
process to be stopped or killed, alone or one of several; with --slow it takes a minute to prepare,
with --long a minute for its last evaluation.

Prints what it begins, so that a test can strike at a chosen moment. One batch has a NaN, in the
first process's rows alone.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from parallel.hooks import Hook
from parallel.hosts.distributed import host_count, host_index
from parallel.hosts.job import first_host_first, start
from parallel.hosts.stop import leave_at_once
from parallel.hosts.watchdog import Watchdog
from parallel.mesh import make_mesh
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, Fed, batches, position

CONFIG = TrainerConfig(
    train_steps=40, save_every=3, keep=2, eval_every=5, on_bad_step="skip", spike_factor=50.0
)
POISONED = 13


def poisoned(start: int, where: Any) -> Iterator[Fed]:
    """The toy's batches, one of them with a NaN."""
    for step, (batch, info) in enumerate(batches(start, where), start):
        if step == POISONED:
            actions = batch.actions.copy()
            actions[0, 0, 0, 0] = np.nan
            batch = replace(batch, actions=actions)
        yield batch, info


def announced(start: int, where: Any) -> Iterator[Fed]:
    """This process's rows, a few milliseconds apart."""
    for step, (batch, info) in enumerate(poisoned(start, where), start):
        print("batch", step, flush=True)
        time.sleep(0.03)
        rows = len(batch.state) // host_count()
        mine = slice(host_index() * rows, (host_index() + 1) * rows)
        yield jax.tree.map(lambda x, m=mine: x[m], batch), info


def evaluate(
    step: int, state: Any, stopping: Callable[[], bool], long: bool = False
) -> dict[str, float]:
    print("evaluating", step, flush=True)
    for _ in range(3000 if long and step == CONFIG.train_steps else 5):
        if stopping():
            return {}
        time.sleep(0.02)
    return {"eval_loss": 0.0}


def main(directory: str, *more: str) -> int:
    resume = "--resume" in more
    first_host_first(lambda: prepare(60.0 if "--slow" in more else 0.0))
    result = train(
        Denoiser(),
        RULES,
        announced,
        position,
        Run(Path(directory), config={"model": "toy"}, assets={}),
        CONFIG,
        OPTIMIZER,
        mesh=make_mesh() if host_count() > 1 else make_mesh(devices=jax.devices()[:1]),
        resume=resume,
        hooks=[Hook(CONFIG.eval_every, partial(evaluate, long="--long" in more))],
    )
    print("finished" if result.finished else "stopped", "at", result.step, flush=True)
    return result.exit_code


def prepare(seconds: float) -> None:
    print("begins", flush=True)
    time.sleep(seconds)


if __name__ == "__main__":
    start()
    with Watchdog(Path(sys.argv[1]), patience=120.0), leave_at_once():
        code = main(*sys.argv[1:])
    sys.exit(code)
