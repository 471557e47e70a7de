"""Aligns topics of different rates on one clock: at every tick, each topic's last message so far.

Times are integer nanoseconds. They alone decide the alignment, not the messages' content.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from data.files.limits import most_frames
from data.lerobot.importing.layout import Gaps

SECOND = 10**9
ROUNDING = 1000
"""Nanoseconds by which a message may come after its tick: the rounding of seconds since 1970 as
floats."""


class AlignedStretch(NamedTuple):
    """Frames of an episode: the times of its ticks, and the number of each topic's message in use
    at each tick. `left_out`, on the last stretch, is the seconds of the recording that are in no
    stretch."""

    ticks: Int64[np.ndarray, " t"]
    messages: dict[str, Int64[np.ndarray, " t"]]
    left_out: float = 0.0


def align(
    times: Mapping[str, Int64[np.ndarray, " n"]], fps: int, silence: float, gaps: Gaps
) -> list[AlignedStretch]:
    """Ticks at `fps` from the moment at which every topic has had a message to the last message,
    cut where a topic is silent for more than `silence` seconds; empty if nothing is left.

    Raises:
      ValueError: a topic has no message, goes back in time, or is silent for longer while `gaps` is
        "refuse"; the message names it and the time. Or the times are too far apart.
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
    silent: list[tuple[int, int]] = []
    for topic, at in times.items():
        edges = np.concatenate([[begin], at, [end]])
        for gap in np.flatnonzero(np.diff(edges) > round(silence * SECOND)):
            first, last = int(edges[gap]), int(edges[gap + 1])
            if gaps == "refuse":
                raise ValueError(
                    f"{topic} is silent from {_seconds(first - begin)} s to "
                    f"{_seconds(last - begin)} s, longer than {silence:g} s"
                )
            silent.append((first, last + int(gap == len(at))))
    spans = list(_between(silent, start, end))
    span, messages = sum(last - first for first, last in spans), sum(map(len, times.values()))
    if (frames := span * fps // SECOND) > most_frames(messages):
        raise ValueError(
            f"the times span {_seconds(span)} s, {frames} frames at {fps} fps, with only "
            f"{messages} messages"
        )
    stretches = [_ticks(start, *span, fps) for span in spans]
    found = [AlignedStretch(t, _last(times, t)) for t in stretches if len(t) > 1]
    if silent and found:
        kept = sum(int(one.ticks[-1] - one.ticks[0]) for one in found)
        found[-1] = found[-1]._replace(left_out=round((end - start - kept) / SECOND, 3))
    return found


def _last(
    times: Mapping[str, Int64[np.ndarray, " n"]], ticks: Int64[np.ndarray, " t"]
) -> dict[str, Int64[np.ndarray, " t"]]:
    """Number of each topic's last message at every tick."""
    until = ticks + ROUNDING
    return {topic: np.searchsorted(at, until, "right") - 1 for topic, at in times.items()}


def _between(silent: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Start and end of what lies between stretches of silence."""
    for first, last in sorted(silent):
        if first >= start:
            yield start, first
        start = max(start, last)
    yield start, end


def _ticks(start: int, first: int, last: int, fps: int) -> Int64[np.ndarray, " t"]:
    """Ticks from `first` to `last` of a clock that began at `start`."""
    low = -((start - first) * fps // SECOND)
    high = -((start - last - 1) * fps // SECOND)
    return start + np.arange(low, high, dtype=np.int64) * SECOND // fps


def _seconds(nanoseconds: float) -> str:
    return f"{nanoseconds / SECOND:.2f}"
