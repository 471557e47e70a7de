"""Episodes out of blocks in which they lie end to end, and the prompts that they begin with."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int64, Shaped

from data.dataset import Dataset


def cut_into_episodes(
    lengths: Int64[np.ndarray, " e"], blocks: Iterable[Shaped[np.ndarray, " _n *shape"]]
) -> Iterator[Shaped[np.ndarray, " _t *shape"]]:
    """Each episode's part of blocks of whole episodes."""
    waiting: Iterator[int] = iter(lengths.tolist())
    for block in blocks:
        at = 0
        while at < len(block):
            length = next(waiting)
            yield block[at : at + length]
            at += length


def first_prompts(dataset: Dataset) -> Counter[str]:
    """Number of episodes by the prompt of their first frame."""
    runs = dataset.runs
    begin = np.flatnonzero(np.diff(runs.episode, prepend=-1))
    return Counter(dataset.prompts[task][0] for task in runs.task[begin].tolist())
