"""A folder of .npz episodes, as tests/own_dataset.py reads them."""

from pathlib import Path

import numpy as np


def write_episodes(folder: Path, number: int, size: int = 16) -> Path:
    """Episodes of 5, 6, … frames, each task every second time, states that drift like a robot's."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for i in range(number):
        steps = 5 + i
        np.savez(
            folder / f"{i:03d}.npz",
            **{
                "observation.state": rng.normal(size=(steps, 3)).astype(np.float32),
                "action": rng.normal(size=(steps, 2)).astype(np.float32),
                "observation.images.front": rng.integers(
                    0, 256, (steps, size, size, 3), dtype=np.uint8
                ),
                "task": np.array(("push", "pull")[i % 2]),
            },
        )
    return folder
