"""Topics of different rates on one clock: at every tick, each topic's last message so far.

Times are whole nanoseconds. All is decided by times alone, before a message is decoded.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from data.lerobot.importing.layout import Gaps

SECOND = 10**9


class AlignedStretch(NamedTuple):
    """Frames of an episode: times of its ticks, and the number of each topic's message in use."""

    ticks: Int64[np.ndarray, " t"]
    messages: dict[str, Int64[np.ndarray, " t"]]


def align(
    times: Mapping[str, Int64[np.ndarray, " n"]], fps: int, silence: float, gaps: Gaps
) -> list[AlignedStretch]:
    """Ticks at `fps` from the moment at which every topic has spoken to the last message, cut where
    a topic is silent for more than `silence` seconds.

    Raises:
      ValueError: a topic has no message, goes back in time, or is silent for longer where `gaps` is
        "refuse"; the sentence names it and the time. Or nothing is left.
    """
    for topic, at in times.items():
        if not len(at):
            raise ValueError(f"{topic} has no message")
        if len(back := np.flatnonzero(np.diff(at) < 0)):
            here = int(back[0])
            raise ValueError(
                f"{topic} goes back in time, from {_seconds(at[here] - at[0])} s after its first "
                f"message to {_seconds(at[here + 1] - at[0])} s"
            )
    begin = min(int(at[0]) for at in times.values())
    start = max(int(at[0]) for at in times.values())
    end = max(int(at[-1]) for at in times.values())
    count = (end - start) * fps // SECOND + 1
    ticks = start + np.arange(count, dtype=np.int64) * SECOND // fps
    kept = np.ones(count, bool)
    bound = round(silence * SECOND)
    for topic, at in times.items():
        edges = np.concatenate([[begin], at, [end]])
        for gap in np.flatnonzero(np.diff(edges) > bound):
            first, last = int(edges[gap]), int(edges[gap + 1])
            if gaps == "refuse":
                raise ValueError(
                    f"{topic} is silent from {_seconds(first - begin)} s to "
                    f"{_seconds(last - begin)} s, longer than {silence:g} s"
                )
            after = ticks < last if gap + 2 < len(edges) else ticks <= last
            kept &= ~((ticks > first) & after)
    return [
        AlignedStretch(
            ticks[run],
            {t: np.searchsorted(at, ticks[run], "right") - 1 for t, at in times.items()},
        )
        for run in _runs(kept)
    ]


def _runs(kept: Bool[np.ndarray, " n"]) -> list[slice]:
    """Runs of two frames or more."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    pairs = edges.reshape(-1, 2).tolist()
    return [slice(first, stop) for first, stop in pairs if stop - first > 1]


def _seconds(nanoseconds: float) -> str:
    return f"{nanoseconds / SECOND:.2f}"
