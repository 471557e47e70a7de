"""Split of held-out episodes: some of every task, and never a copy of one that is trained on.

Real datasets hold the same episode twice (five of thirty in one of LeRobot's own Meta-World
recordings); a random split would then measure memory and call it generalisation.
"""

from typing import Protocol

import numpy as np
from jaxtyping import Int64

from data.dataset import Runs
from data.packing.permutation import fold, grouped

_FEW = 64

Episodes = Int64[np.ndarray, "_e"]


class Splittable(Protocol):
    """Part of `Frames` that a split looks at."""

    @property
    def name(self) -> str: ...
    @property
    def lengths(self) -> Int64[np.ndarray, " e"]: ...
    @property
    def runs(self) -> Runs: ...
    @property
    def duplicate_of(self) -> Int64[np.ndarray, " e"]: ...


def split_episodes(frames: Splittable, fraction: float, seed: int = 0) -> tuple[Episodes, Episodes]:
    """Training and held-out episodes, both sorted. About `fraction` of each task's episodes is held
    out: at least one, but not all, if a task has several different episodes.

    If very many tasks have few episodes each, or all tasks have only one, this would hold out far
    too many episodes or none. The episodes of such tasks are then held out as if they had one task,
    and some of these tasks are not trained at all. An episode's task is that of its first frame.

    Raises:
      ValueError: `fraction` is not in 0..1, or there are no two different episodes.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"The held-out fraction is {fraction}, expected a number between 0 and 1.")
    different, which = np.unique(frames.duplicate_of, return_inverse=True)
    if len(different) < 2:
        raise ValueError(
            f"{frames.name}: has no two different episodes, so none can be held out; record more, "
            "or train without holding any out."
        )
    runs = frames.runs
    begin = np.flatnonzero(np.diff(runs.episode, prepend=-1))
    tasks = np.zeros(len(frames.lengths), np.int64)
    tasks[runs.episode[begin]] = runs.task[begin]
    task = np.unique(tasks[different], return_inverse=True)[1]
    number = np.bincount(task)
    small = number * fraction < 0.5
    if number.max() == 1 or small.sum() > max(_FEW, fraction * len(different)):
        task = np.where(small[task], 0, task + 1)
        number = np.bincount(task)
    held = np.minimum(np.maximum(1, np.round(fraction * number)), number - 1)
    order = grouped(task, fold(seed))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - (np.cumsum(number) - number)[task[order]]
    held_out = (rank < held[task])[which]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
