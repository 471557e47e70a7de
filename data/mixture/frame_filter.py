"""Frames of a dataset that a mixture draws from if it leaves some out. They come from the file that
`python -m tools.data idle --json` writes."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from data.dataset import Runs
from data.errors import short
from data.files.json_file import read_named
from data.statistics.idle import digest_of_lengths


class FrameFilter(NamedTuple):
    """Ranges of frames, `first` to `stop` (not included), in order, counted in their episodes."""

    episode: Int64[np.ndarray, " k"]
    first: Int64[np.ndarray, " k"]
    stop: Int64[np.ndarray, " k"]


def read_filter(file: str, lengths: Int64[np.ndarray, " e"]) -> FrameFilter:
    """Ranges that a file keeps of episodes with these lengths; episodes that it does not list are
    kept whole.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it belongs to another dataset, is malformed, or keeps nothing.
    """
    value = read_named(file, "frames", "frames")
    if not isinstance(value, dict) or not isinstance(value.get("keep"), dict):
        raise ValueError(
            f"{file}: has no table 'keep'; write it with `python -m tools.data idle --json`."
        )
    counts = {"episodes": len(lengths), "frames": int(lengths.sum())}
    for name, count in counts.items():
        if value.get(name) != count:
            raise ValueError(
                f"{file}: was made for a dataset with {short(value.get(name))} {name}, but this "
                f"one has {count}; make a new one with `python -m tools.data idle --json`."
            )
    if value.get("lengths", same := digest_of_lengths(lengths)) != same:
        raise ValueError(
            f"{file}: was made for a dataset with as many frames but other episode lengths, such "
            "as this one before an edit; make a new one with `python -m tools.data idle --json`."
        )
    keep = {str(i): [[0, length]] for i, length in enumerate(lengths.tolist())}
    for episode, ranges in value["keep"].items():
        if episode not in keep or not _fits(ranges, keep[episode][0][1]):
            raise ValueError(
                f"{file}: keep has {short(ranges)} for episode {short(episode)}; expected ranges "
                "[first, stop) within it, in order."
            )
        keep[episode] = ranges
    rows = [(int(i), *pair) for i, ranges in keep.items() for pair in ranges]
    if not rows:
        raise ValueError(f"{file}: keeps no frame at all; leave the dataset out.")
    return FrameFilter(*np.array(rows, np.int64).T)


def runs_within(runs: Runs, kept: FrameFilter, starts: Int64[np.ndarray, " e"]) -> Runs:
    """The parts of runs that are kept, in their order; `starts` is the number of each episode's
    first frame."""
    begin = starts[runs.episode] + runs.first
    low, high = starts[kept.episode] + kept.first, starts[kept.episode] + kept.stop
    cuts = np.unique(np.concatenate([begin, begin + runs.length, low, high]))
    piece, length = cuts[:-1], np.diff(cuts)
    run = np.searchsorted(begin, piece, "right") - 1
    of = np.searchsorted(low, piece, "right") - 1
    inside = (run >= 0) & (of >= 0)
    inside &= (piece < (begin + runs.length)[run]) & (piece < high[of])
    run, piece, length = run[inside], piece[inside], length[inside]
    episode = runs.episode[run]
    return Runs(episode, piece - starts[episode], length, runs.task[run])


def _fits(ranges: Any, length: int) -> bool:
    if not isinstance(ranges, list):
        return False
    at = 0
    for pair in ranges:
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not whole or not at <= pair[0] < pair[1] <= length:
            return False
        at = pair[1]
    return True
