"""Rate at which an episode's frames follow each other in its video.

Cameras of 29.97 fps are listed as 30. Frame k of an episode is the k-th after its first, but k / 30
seconds is half a frame off after 17 seconds. Times that are rounded to coarse ticks or that jitter
stay near k / 30, however long the video is, and are left alone.
"""

import numpy as np
from jaxtyping import Real

DAMAGED = "it was cut off or damaged; copy or encode it again."
_SAME = 2e-3
_UNEVEN, _LOST = 0.2, 1.5
"""Part of a period, and of all gaps, by which frames are uneven; periods in which one is lost."""


def own_rate(times: Real[np.ndarray, " n"], fps: float) -> float:
    """Frames per second by which the last of these frames is found from the first one, given their
    times in seconds (or both in another unit): `fps`, or the video's own rate instead.
    """
    if abs(float(times[-1] - times[0]) * fps - len(times) + 1) <= 0.5:
        return fps
    gaps = np.diff(times)
    single = gaps[np.abs(gaps * fps - 1) < 0.5]  # so that lost frames do not count
    period = float(single.mean()) if len(single) else 0.0
    return 1 / period if abs(period * fps - 1) < _SAME else fps


def why_lacking(times: Real[np.ndarray, " n"], fps: float) -> str:
    """The end of a sentence on a video that lacks a frame, from the times in seconds of those it
    has: another or a variable rate, lost frames, or else damage."""
    gaps = np.diff(times) * fps
    if len(gaps) and (np.abs(gaps - 1) > _UNEVEN).mean() > _UNEVEN:
        low, high = np.quantile(gaps, [0.1, 0.9]) / fps
        if high - low < _UNEVEN / fps:
            rate = 1 / float(np.median(gaps / fps))
            return f"its rate is {rate:.4g} fps, expected {fps:g}; correct fps, or encode it again."
        return (
            f"its frames are {low:.3g} to {high:.3g} s apart (a variable frame rate), expected "
            f"{1 / fps:.3g} s; encode it again at {fps:g} fps, with one frame for each row."
        )
    if (gaps > _LOST).any():
        at = float(times[np.argmax(gaps > _LOST)])
        return (
            f"frames are lost, the first of them after {at:.3g} s, as by a slow camera; "
            "leave the episode out, or encode it again with one frame for each row."
        )
    return DAMAGED
