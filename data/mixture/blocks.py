"""States and action chunks of every frame of some episodes, a block at a time, as a feed reads
them: for statistics, and to tokenize all chunks before training.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from data.frames import Feed

_ROWS = 1 << 18


class Block(NamedTuple):
    """A processor's input for some frames: `valid` is false outside of the episode,
    where chunks repeat its first or last action."""

    state: Float[np.ndarray, "n s"]
    chunk: Float[np.ndarray, "n h a"]
    valid: Bool[np.ndarray, "n h"]
    episode: Int64[np.ndarray, " n"]
    frame: Int64[np.ndarray, " n"]


def read_blocks(
    feeds: Sequence[Feed],
    episodes: Sequence[Int64[np.ndarray, " _e"]],
    steps: int | None = None,
) -> Iterator[Block]:
    """The frames of these episodes of each feed. If `steps` is given, chunks have only
    `steps` steps, from the present one on.

    Raises:
      DatasetError: a column is damaged.
    """
    for feed, chosen in zip(feeds, episodes, strict=True):
        frames = feed.frames
        ahead, kept = np.array(feed.ahead), slice(None)
        if steps is not None:
            present = int(np.argmax(ahead >= 0))
            kept = slice(present, present + steps)
        ahead = ahead if feed.transform else ahead[kept]
        starts, ends = frames.starts[chosen], frames.starts[chosen] + frames.lengths[chosen]
        total = int((ends - starts).sum())
        before = np.cumsum(ends - starts) - (ends - starts)
        size = max(1, _ROWS // len(ahead))
        for low in range(0, total, size):
            place = np.arange(low, min(low + size, total))
            own = np.searchsorted(before, place, "right") - 1
            frame = place - before[own]
            rows = starts[own] + frame
            wanted = rows[:, None] + ahead
            valid = (wanted >= starts[own, None]) & (wanted < ends[own, None])
            wanted = np.clip(wanted, starts[own, None], ends[own, None] - 1)
            state = _columns(feed, feed.state, rows)
            chunk = _columns(feed, feed.actions, wanted)
            if feed.transform is not None:
                state, chunk = feed.transform(state, chunk)
                chunk, valid = chunk[:, kept], valid[:, kept]
            yield Block(state, chunk, valid, chosen[own], frame)


def _columns(
    feed: Feed, names: Sequence[str], rows: Int64[np.ndarray, "*n"]
) -> Float[np.ndarray, "*n _d"]:
    return np.concatenate([feed.frames.column(name, rows) for name in names], axis=-1)
