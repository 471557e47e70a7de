"""Episodes divided into ranges of about the same number of frames: units of a job."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64

from data.dataset import Dataset

UNIT_FRAMES = 1 << 20
"""Frames of a unit of work on columns."""


def shard_episodes(
    lengths: Int64[np.ndarray, " e"], shard_frames: int
) -> Int64[np.ndarray, " shards_plus_1"]:
    """The first episode of each shard, and then the number of episodes. A shard takes as many
    episodes as fit into `shard_frames` frames, and at least one."""
    ends = np.cumsum(lengths)
    firsts = [0]
    while firsts[-1] < len(lengths):
        first = firsts[-1]
        before = int(ends[first] - lengths[first])
        last = int(np.searchsorted(ends, before + shard_frames, "right"))
        firsts.append(max(first + 1, last))
    return np.array(firsts, np.int64)


def episode_ranges(lengths: Int64[np.ndarray, " e"]) -> list[range]:
    """Ranges of episodes with about `UNIT_FRAMES` frames each; one, if there are no more in all."""
    firsts = shard_episodes(lengths, UNIT_FRAMES).tolist()
    return [range(*pair) for pair in pairwise(firsts)] or [range(0)]


def streamed(dataset: Dataset, names: Sequence[str], episodes: Sequence[int]) -> Any:
    """Column blocks of some episodes, as `Dataset.stream` gives them. Rows that belong to no
    episode are looked for only if the range is all episodes (see `require_no_strays`)."""
    every = episodes == range(len(dataset.lengths))
    return dataset.stream(names, None if every else list(episodes))


def require_no_strays(dataset: Dataset, ranges: Sequence[range]) -> None:
    """Looks for rows that belong to no episode, if the dataset's format can have some. Streaming by
    several ranges ends with it, as streaming the whole dataset does.

    Raises:
      DatasetError: there are such rows.
    """
    look = getattr(dataset, "require_no_strays", None)
    if look is not None and len(ranges) > 1:
        look()
