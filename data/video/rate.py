"""Rate at which an episode's frames follow each other in its video.

Cameras of 29.97 fps are listed as 30. Frame k of an episode is the k-th after its first, but k / 30
seconds is half a frame off after 17 seconds. Times that are rounded to coarse ticks or that jitter
stay near k / 30, however long the video is, and are left alone.
"""

import numpy as np
from jaxtyping import Real

_SAME = 2e-3


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
