"""`python -m tests.helpers.parallel.train_often RUN STEPS SAVE_EVERY`: the toy's run, which
begins or resumes, and says when it makes a batch, so that it can be killed at a chosen moment."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from parallel.mesh import make_mesh
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, Fed, batches, position

KEEP = 2


def run(directory: Path, steps: int, save_every: int) -> None:
    def announced(start: int, where: Any) -> Iterator[Fed]:
        for step, batch in enumerate(batches(start, where), start):
            print("batch", step, flush=True)
            yield batch

    train(
        Denoiser(),
        RULES,
        announced,
        position,
        Run(directory, config={}, assets={}),
        TrainerConfig(train_steps=steps, save_every=save_every, keep=KEEP),
        OPTIMIZER,
        mesh=make_mesh(devices=jax.devices()[:1]),
        resume=(directory / "config.json").exists(),
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
