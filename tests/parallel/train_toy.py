"""`python -m tests.parallel.train_toy RUN [--resume]`: the toy's run as a process to be killed.

Prints the step of every batch it makes, so that a test can strike at a chosen moment.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from parallel.mesh import make_mesh
from parallel.trainer import Run, TrainerConfig, train
from tests.parallel.toy import OPTIMIZER, RULES, Denoiser, Fed, batches, position

CONFIG = TrainerConfig(steps=40, save_every=3, keep=2)


def main() -> None:
    def announced(start: int, where: Any) -> Iterator[Fed]:
        for step, batch in enumerate(batches(start, where), start):
            print("batch", step, flush=True)
            yield batch

    result = train(
        Denoiser(),
        RULES,
        announced,
        position,
        Run(Path(sys.argv[1]), config={"model": "toy"}, assets={}),
        CONFIG,
        OPTIMIZER,
        mesh=make_mesh(devices=jax.devices()[:1]),
        resume="--resume" in sys.argv,
    )
    print("finished" if result.finished else "stopped", "at", result.step, flush=True)


if __name__ == "__main__":
    main()
