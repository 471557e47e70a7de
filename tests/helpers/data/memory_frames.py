"""Frames held in memory, for tests: every picture and number tells which frame it is of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from data.frames import ACTION, STATE, Runs, fit_of
from data.statistics.stats import Stats, describe


@dataclass(frozen=True)
class MemoryFrames:
    """Episodes of one task each, or of the runs given; absent cameras are (episode, camera)."""

    name: str = "memory"
    lengths: Any = (7, 12, 5, 9)
    cameras: tuple[str, ...] = ("front", "wrist")
    prompts: tuple[tuple[str, ...], ...] = (("lift it", "raise the block"), ("push",))
    image_size: int = 8
    fps: float = 10
    state_dim: int = 3
    action_dim: int = 2
    absent: frozenset[tuple[int, str]] = frozenset()
    tasks: tuple[tuple[int, int, int, int], ...] = ()
    digest: str = field(default="memory")
    resize: str = "antialiased"
    fits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.array(self.lengths, np.int64))

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def runs(self) -> Runs:
        if self.tasks:
            return Runs(*np.array(self.tasks, np.int64).T)
        episode = np.arange(len(self.lengths))
        tasks = episode % len(self.prompts)
        return Runs(episode, np.zeros_like(episode), self.lengths, tasks)

    @property
    def present(self) -> np.ndarray:
        return np.array(
            [[(e, c) not in self.absent for c in self.cameras] for e in range(len(self.lengths))]
        )

    @property
    def duplicate_of(self) -> np.ndarray:
        return np.arange(len(self.lengths))

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(len(self.name))
        total = int(self.lengths.sum())
        sizes = {STATE: self.state_dim, ACTION: self.action_dim, "gripper": 1}
        return {name: rng.normal(size=(total, d)).astype(np.float32) for name, d in sizes.items()}

    @cached_property
    def stats(self) -> dict[str, Stats]:
        return {name: describe(values) for name, values in self.columns.items()}

    def column(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.columns[name][rows]

    def picture(self, row: int, camera: str) -> np.ndarray:
        shade = 1 + (row * 7 + 100 * self.cameras.index(camera)) % 255
        return np.full((*fit_of(self, camera).shape, 3), shade, np.uint8)

    def images(self, rows: np.ndarray, camera: str, out: Sequence[np.ndarray]) -> None:
        for row, into in zip(rows.tolist(), out, strict=True):
            episode = int(np.searchsorted(self.starts, row, "right")) - 1
            assert (episode, camera) not in self.absent
            into[...] = self.picture(row, camera)
