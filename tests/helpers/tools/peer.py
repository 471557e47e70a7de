"""A stand-in for LeRobot's and openpi's halves of the benchmarks (tools/bench/peers), under our own
Python: it records a few episodes with our writer, and answers at once, so that our half begins.

    python -m tests.helpers.tools.peer
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from data.lerobot.recording import video_feature
from data.lerobot.writer import DatasetWriter

_SIZES = {"av1_480": (480, 640, 2), "av1_480_3": (480, 640, 3)}
_CAMERAS = ("observation.images.front", "observation.images.wrist", "observation.images.side")
_DIMS = {"observation.state": 8, "action": 7}
_EPISODES, _FRAMES = 2, 30


def executable(path: Path) -> Path:
    """Makes a file that can be named as the Python of another environment."""
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -m tests.helpers.tools.peer\n")
    path.chmod(0o755)
    return path


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer to a line."""
    if request.get("run") == "make" and "root" in request:
        _make(Path(request["root"]), *_SIZES.get(request["kind"], (224, 224, 2)))
    took = {"seconds": 1.0, "cpu_seconds": 1.0, "samples": 1, "frames": 1, "statistics": {}}
    return took | {"parameters": 1, "versions": {"lerobot": "0"}, "backends": ["stand-in"]}


def _make(root: Path, height: int, width: int, cameras: int) -> None:
    if root.exists():
        return
    rng, names = np.random.default_rng(0), _CAMERAS[:cameras]
    features = {n: {"dtype": "float32", "shape": (d,), "names": None} for n, d in _DIMS.items()}
    features |= dict.fromkeys(names, video_feature((height, width, 3)))
    with DatasetWriter(root, fps=10, features=features) as writer:
        for _ in range(_EPISODES):
            numbers = {
                n: rng.normal(size=(_FRAMES, d)).astype(np.float32) for n, d in _DIMS.items()
            }
            shape = (_FRAMES, height // 16, width // 16, 3)
            small = {name: rng.integers(0, 256, shape, np.uint8) for name in names}
            seen = {name: x.repeat(16, axis=1).repeat(16, axis=2) for name, x in small.items()}
            writer.add_episode(numbers, seen, "lift the red block")


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
