"""Short videos of episodes: the choice of episodes worth showing, and encoding as H.264 MP4.

Browsers play yuv420p H.264 everywhere, and a looping clip of some 40 frames takes 10 to 30 kB, so
a page can carry a dozen of them inline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

ENCODING = {"crf": "20", "threads": "1"}
"""Options of libx264 for a clip; the bytes do not depend on the number of cores."""


@dataclass(frozen=True, eq=False)
class Clip:
    """Pictures of one episode, one per step until its end."""

    episode: int
    """Index into the evaluation's episodes."""
    frames: UInt8[np.ndarray, "t h w 3"]


def choose(success: Sequence[bool], groups: Sequence[int], count: int) -> list[int]:
    """Indices of up to `count` episodes that show both outcomes and every group: each outcome gets
    half the places if it has enough episodes, and within an outcome groups take turns."""
    won = _take_turns([i for i, ok in enumerate(success) if ok], groups)
    lost = _take_turns([i for i, ok in enumerate(success) if not ok], groups)
    failures = min(len(lost), max(count // 2, count - len(won)))
    return sorted(won[: count - failures]) + sorted(lost[:failures])


def _take_turns(indices: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Indices reordered so that each group's first comes before any group's second."""
    seen: dict[int, int] = {}
    turn = []
    for i in indices:
        turn.append(seen.get(groups[i], 0))
        seen[groups[i]] = turn[-1] + 1
    return [i for _, i in sorted(zip(turn, indices, strict=True))]
