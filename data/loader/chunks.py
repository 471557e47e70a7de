"""Every action chunk of a feed, as training shows it, without pictures: to train a FAST tokenizer,
and to know how many tokens a sample needs before the first batch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64

from data.frames import Feed
from models import Processor

_ROWS = 4096


class Chunks(NamedTuple):
    """Chunks that begin at some frames of some episodes, in the model's units and dims; `mask` is
    false past an episode's end."""

    episode: Int64[np.ndarray, " n"]
    frame: Int64[np.ndarray, " n"]
    actions: Float32[np.ndarray, "n h a"]
    mask: Bool[np.ndarray, "n h a"]


def all_chunks(feed: Feed, processor: Processor, episodes: Sequence[int]) -> Iterator[Chunks]:
    """The chunks of every frame of these episodes, some thousand at a time.

    Raises:
      DatasetError: a column is damaged.
    """
    chosen = np.asarray(episodes, np.int64)
    lengths = feed.frames.lengths[chosen]
    ends = np.cumsum(lengths)
    for start in range(0, int(lengths.sum()), _ROWS):
        at = np.arange(start, min(start + _ROWS, int(ends[-1])))
        which = np.searchsorted(ends, at, "right")
        yield _chunks(feed, processor, chosen[which], at - (ends - lengths)[which])


def _chunks(
    feed: Feed,
    processor: Processor,
    episode: Int64[np.ndarray, " n"],
    frame: Int64[np.ndarray, " n"],
) -> Chunks:
    frames = feed.frames
    start, length = frames.starts[episode, None], frames.lengths[episode, None]
    steps = frame[:, None] + np.array(feed.ahead)
    rows = start + np.minimum(steps, length - 1)
    states = np.concatenate([frames.column(n, start[:, 0] + frame) for n in feed.state], axis=-1)
    actions = np.concatenate([frames.column(n, rows) for n in feed.actions], axis=-1)
    if feed.transform is not None:
        states, actions = feed.transform(states, actions)
    _, chunk, mask = processor.numbers(states, actions, steps < length, embodiment=feed.embodiment)
    return Chunks(episode, frame, chunk, mask)
