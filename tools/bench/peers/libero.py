"""LIBERO's own environment and our simulator in turn, on the first task of libero_spatial.

python libero.py SIMULATOR.py, in LIBERO's environment, prints rates and ratios as JSON.
"""

import sys

if __name__ == "__main__":  # this file is not the package libero
    del sys.path[0]

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from runpy import run_path
from statistics import median
from types import SimpleNamespace

import numpy as np

_SUITE, _SIZE, _ROUNDS, _STEPS = "libero_spatial", 128, 5, 10
_LOOKS = (1, 5, 10)


def main(script: Path) -> None:
    sys.path.append(str(script.parent))
    ours = SimpleNamespace(**run_path(str(script)))
    task = ours.describe(_SUITE)["tasks"][0]
    simulator = ours.Simulator(_SUITE, [task], _SIZE)
    simulator.reset(task, 0)

    from libero.libero.envs import OffScreenRenderEnv

    file, starts = simulator.files[0], simulator.starts[0]
    bare = OffScreenRenderEnv(bddl_file_name=file, camera_heights=_SIZE, camera_widths=_SIZE)

    def bare_reset() -> None:
        bare.seed(0)
        bare.reset()
        bare.set_init_state(starts[0])
        for _ in range(ours.SETTLING):
            bare.step(ours.NOTHING)

    actions = np.random.default_rng(0).uniform(-0.3, 0.3, (_STEPS, 7))

    def bare_act() -> None:
        for action in actions:
            bare.step(action)

    def act(look: int) -> None:
        for i, action in enumerate(actions):
            simulator.step(action)
            if i % look == look - 1:
                simulator.observe()

    runs: dict[str, Callable[[], None]] = {"LIBERO's own": bare_act}
    runs |= {f"ours, a look in {look}": partial(act, look) for look in _LOOKS}
    runs["ours, no pictures"] = partial(act, _STEPS + 1)
    bare_reset()
    took = [[_seconds(run) for run in runs.values()] for _ in range(_ROUNDS)]
    table = [
        {
            "what": what,
            "steps/s": _STEPS / median(times),
            "ratio": median(round[0] / time for round, time in zip(took, times, strict=True)),
        }
        for what, times in zip(runs, zip(*took, strict=True), strict=True)
    ]
    resets = {
        "reset_s": median(_seconds(lambda: simulator.reset(task, 0)) for _ in range(3)),
        "bare_reset_s": _seconds(bare_reset),
    }
    print(json.dumps({"table": table, **resets}))


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
