"""A simulator for tests: a point that goes where it is told, and misbehaves as its task's name says
at step 3 of an episode, unless a file says that it has done so before."""

import ctypes
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np

TASKS = ("calm", "crash", "raise", "exit", "hang", "hang in C", "garbage", "wrong size", "chatty")


class Simulator:
    """`scars`: folder that remembers misbehaviour; `fault`: how not to start."""

    def __init__(self, scars: str = "", fault: str = "", slow: float = 0.0) -> None:
        print("hello from the simulator")
        if fault == "import" or (fault == "once" and (Path(scars) / "crash-0").exists()):
            raise ImportError("no module named bodies")
        if fault == "hang":
            time.sleep(1000)
        if fault == "garbage":
            _garbage()
        self.scars = Path(scars)
        self.slow = slow
        self.limits = np.full(2, -1.0), np.full(2, 1.0)
        self.task, self.seed, self.steps = "calm", 0, 0
        self.point = self.target = self.state = np.zeros(2)

    def spec(self) -> dict:
        return {
            "name": "fragile",
            "tasks": TASKS,
            "cameras": ["observation.images.above"],
            "picture": [4, 6],
            "state_names": ["x", "y"],
            "action_names": ["dx", "dy"],
            "fps": 10,
            "max_steps": 12,
            "goals": TASKS,
            "prompts": [[f"be {task}"] for task in TASKS],
        }

    def reset(self, task: str, seed: int) -> int:
        rng = np.random.default_rng((seed, zlib.crc32(task.encode())))
        self.point, self.target = rng.uniform(-1, 1, (2, 2))
        self.task, self.seed, self.steps, self.state = task, seed, 0, self.point
        return TASKS.index(task)

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        shade = np.uint8(np.abs(self.point).sum() * 100)
        return np.full((1, 4, 6, 3), shade), self.state.copy()

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        time.sleep(self.slow)
        self.steps += 1
        if self.steps == 3 and self.task != "calm":
            self._misbehave()
        self.point += 0.3 * np.clip(action, -1, 1)
        distance = float(np.linalg.norm(self.target - self.point))
        return -distance, distance < 0.05, False, distance < 0.05

    def expert(self) -> np.ndarray:
        return np.clip((self.target - self.point) / 0.3, -1, 1)

    def film(self, size: int) -> np.ndarray:
        return np.full((size, size, 3), self.steps, np.uint8)

    def _misbehave(self) -> None:
        scar = self.scars / f"{self.task}-{self.seed}"
        if scar.exists():
            return
        scar.touch()
        print("about to misbehave", file=sys.stderr)
        if self.task == "crash":
            ctypes.string_at(0)
        if self.task == "raise":
            raise RuntimeError("the physics exploded")
        if self.task == "exit":
            os._exit(7)
        if self.task == "hang":
            time.sleep(1000)
        if self.task == "hang in C":
            ctypes.PyDLL(None).sleep(1000)
        if self.task == "garbage":
            _garbage()
        if self.task == "wrong size":
            self.state = np.zeros(3)
        if self.task == "chatty":
            print("Frame 100%\n" * 200_000)


def _garbage() -> None:
    """Writes to whatever the process has open."""
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"segmentation fault is not a header")
        except OSError:
            continue
