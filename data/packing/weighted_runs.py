"""Runs of frames with one weight each, cut from longer ones; frames of weight 0 are left out."""

import numpy as np
from jaxtyping import Float64, Int64

from data.frames import Runs


def weighted_runs(
    runs: Runs, weights: Float64[np.ndarray, " n"], starts: Int64[np.ndarray, " e"]
) -> tuple[Runs, Float64[np.ndarray, " r"]]:
    """The parts of runs, in their order, in which all frames weigh the same, and that weight.

    Args:
      weights: of all the dataset's frames, end to end.
      starts: number of each episode's first frame.
    """
    begin = starts[runs.episode] + runs.first
    end = np.append(begin + runs.length, 0)
    cut = np.zeros(len(weights) + 1, bool)
    cut[begin] = cut[end[:-1]] = True
    cut[1:-1] |= np.diff(weights) != 0
    cuts = np.flatnonzero(cut)
    piece, length = cuts[:-1], np.diff(cuts)
    run = np.searchsorted(begin, piece, "right") - 1
    kept = (piece < end[run]) & (weights[piece] > 0)
    run, piece, length = run[kept], piece[kept], length[kept]
    episode = runs.episode[run]
    parts = Runs(episode, piece - starts[episode], length, runs.task[run])
    return parts, weights[piece]
