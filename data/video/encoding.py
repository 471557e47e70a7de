"""Encoding of frames into a video file, with one of three codecs.

Groups of pictures are short and closed, so that any frame is cheap to reach and the files of
several episodes can be joined without re-encoding.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import Int64, UInt8

from data.video.video import PIXEL_FORMAT, SAME_BYTES

Codec = Literal["h264", "hevc", "av1"]

_ENCODERS = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1"}
_OPTIONS = {
    "h264": {"preset": "veryfast", "threads": "2"} | SAME_BYTES,
    "hevc": {
        "preset": "veryfast",
        "x265-params": "open-gop=0:log-level=none:pools=2:frame-threads=1",
    },
    "av1": {"preset": "8"},
}
"""Numbers of threads are fixed, because the bytes that two of these encoders write depend on them,
and the default depends on the machine's cores."""
_CRF = {"h264": 14, "hevc": 16, "av1": 20}
_WORST = {"h264": 51, "hevc": 51, "av1": 63}


@dataclass(frozen=True)
class VideoEncoding:
    """Codec, constant rate factor (0 is best; one that suits the codec if None) and frames from one
    keyframe to the next.

    Raises:
      ValueError: a number is out of the codec's range.
    """

    codec: Codec = "h264"
    crf: int | None = None
    keyframe_interval: int = 2

    def __post_init__(self) -> None:
        if self.codec not in get_args(Codec):
            raise ValueError(f"codec is '{self.codec}'; give {', '.join(get_args(Codec))}.")
        if not 0 <= self.quality <= _WORST[self.codec]:
            raise ValueError(
                f"crf is {self.quality}, but {self.codec} takes 0 (best) to {_WORST[self.codec]}."
            )
        if self.keyframe_interval < 1:
            raise ValueError(
                f"The keyframe interval is {self.keyframe_interval}; give 1 for keyframes only, 2 "
                "for every second frame …"
            )

    @property
    def quality(self) -> int:
        """Constant rate factor in use."""
        return _CRF[self.codec] if self.crf is None else self.crf


class EncodedFrames(NamedTuple):
    """Frames of the shape [t, h, w, 3] as the video at `path`, which `write_video` made with the
    usual encoding. `path` is None for a shape that was not asked for, which is not encoded."""

    path: Path | None
    shape: tuple[int, ...]
    pixels: Int64[np.ndarray, "3 256"]

    @property
    def dtype(self) -> np.dtype:
        """Type of the frames' values."""
        return np.dtype(np.uint8)

    @property
    def length(self) -> int:
        """Number of frames."""
        return self.shape[0]


def even(picture: UInt8[np.ndarray, "_h _w 3"]) -> UInt8[np.ndarray, "_h2 _w2 3"]:
    """An image that a video can hold: an odd height or width grows by one repeated line."""
    height, width = picture.shape[:2]
    if not (height % 2 or width % 2):
        return picture
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def write_video(
    path: Path, frames: UInt8[np.ndarray, "t h w 3"], fps: float, encoding: VideoEncoding
) -> None:
    """Writes an mp4 with these frames, the first of them a keyframe; the same bytes each time.

    Raises:
      ValueError: height or width is odd, which the pixel format cannot have.
      OSError: it cannot be written.
    """
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(
            f"{path.name}: frames of {height} × {width} pixels cannot be encoded as "
            f"{PIXEL_FORMAT}; crop or resize them to even numbers."
        )
    rate = Fraction(fps).limit_denominator(1001)
    options = {"g": str(encoding.keyframe_interval), "crf": str(encoding.quality)}
    to_yuv = VideoReformatter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _usual_priority(), av.open(str(path), "w", options={"movflags": "faststart"}) as out:
        options |= _OPTIONS[encoding.codec]
        stream = cast(VideoStream, out.add_stream(_ENCODERS[encoding.codec], rate, options))
        stream.height, stream.width, stream.pix_fmt = height, width, PIXEL_FORMAT
        stream.codec_context.time_base = 1 / rate
        for number, picture in enumerate(np.ascontiguousarray(frames)):
            rgb = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = to_yuv.reformat(rgb, format=PIXEL_FORMAT, threads=1)
            frame.pts = number
            if number == 0:
                frame.pict_type = PictureType.I
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


@contextmanager
def _usual_priority() -> Iterator[None]:
    """Restores the thread's priority after a block that encodes: SVT-AV1, as root, leaves its
    thread at real-time priority, which everything started later would inherit."""
    os.environ.setdefault("SVT_LOG", "1")  # errors only
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if (os.sched_getscheduler(0), os.sched_getparam(0)) != before:
            os.sched_setscheduler(0, *before)
