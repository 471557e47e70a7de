"""Statistics of images by counting: 256 counts per channel give the exact mean, spread and
quantiles of the counted pixels.

Long episodes and large images are subsampled as in LeRobot. Counts of episodes add up, each
weighted by the frames that it stands for, so the statistics of a dataset are estimates of those of
all its frames and not an average of averages.
"""

import base64
import zlib

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from data.statistics.stats import QUANTILES, Stats, named_stats

_MIN_FRAMES = 100
_LARGE, _TARGET = 300, 150


class Histogram:
    """Counts of each of the 256 values in each channel: `counts` [3, 256], int64 unless
    weighted."""

    def __init__(
        self, counts: Int64[np.ndarray, "3 256"] | Float64[np.ndarray, "3 256"] | None = None
    ) -> None:
        self.counts = np.zeros((3, 256), np.int64) if counts is None else counts

    @classmethod
    def of(cls, frames: UInt8[np.ndarray, "t h w 3"]) -> "Histogram":
        """Counts of some frames: at least 100 of them, evenly spaced, with fewer pixels if they are
        large."""
        length, (height, width) = len(frames), frames.shape[1:3]
        chosen = np.linspace(0, length - 1, _counted(length)).round().astype(int)
        stride = max(height, width) // _TARGET if max(height, width) >= _LARGE else 1
        pixels = frames[chosen, ::stride, ::stride].reshape(-1, 3)
        return cls(np.stack([np.bincount(channel, minlength=256) for channel in pixels.T]))

    def weighed(self, length: int) -> "Histogram":
        """Counts of an episode of `length` frames, as if all of them had been counted."""
        return Histogram(self.counts * (length / _counted(length)))

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(self.counts + other.counts)

    def to_text(self) -> str:
        """Counts as text, for a journal."""
        return base64.b64encode(zlib.compress(self.counts.astype("<i8").tobytes())).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> "Histogram":
        """Counts from the text that `to_text` made."""
        counts = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8")
        return cls(counts.reshape(3, 256).astype(np.int64))

    def stats(self, frames: int) -> Stats:
        """Statistics in 0..1 of shape [3, 1, 1], with `frames` as the count."""
        levels = np.arange(256) / 255
        total = self.counts.sum(axis=1)
        cumulative = self.counts.cumsum(axis=1)
        mean = self.counts @ levels / total
        variance = self.counts @ levels**2 / total - mean**2
        seen = self.counts > 0
        low, high = seen.argmax(axis=1), 255 - seen[:, ::-1].argmax(axis=1)
        values = [levels[low], levels[high], mean, np.sqrt(np.maximum(variance, 0))]
        for q in QUANTILES.values():
            rank = np.floor(q * (total - 1))[:, None]
            values.append(levels[(cumulative > rank).argmax(axis=1)])
        return named_stats(values, (3, 1, 1), frames)


def _counted(length: int) -> int:
    """Number of an episode's frames that are counted."""
    return min(length, max(_MIN_FRAMES, int(length**0.75)))
