"""Frames of a video, read with any codec and any groups of pictures (PyAV), and videos for a page
to show.

Frames are found by their number after the first one, which is the nearest to the episode's start. A
frame that is not in the file is an error; no neighbour replaces it.
"""

import io
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from jaxtyping import UInt8

from data.errors import DatasetError, MissingFileError, naming_damage
from data.files.limits import MOST_PIXELS, require_pixels, room_for
from data.video.mp4 import open_video, unreadable
from data.video.rate import own_rate, why_lacking

CODEC = "h264"
PIXEL_FORMAT = "yuv420p"
STRICT = {"strict": "strict", "max_pixels": str(MOST_PIXELS)}
"""Decoder options that refuse images larger than any camera's, and make dav1d refuse a frame whose
bits do not end where they should, which any flipped bit causes. libavcodec's H.264 marks frames it
concealed (`is_corrupt`), but not with several threads."""

SAME_BYTES = {"mbtree": "0"}
"""Options for libx264: its macroblock tree reads uninitialised memory, so that one frame in
thousands is coded differently (as glibc's MALLOC_PERTURB_ shows)."""

_SEEK_BACK_SECONDS = (0.0, 2.0, 10.0, 60.0, float("inf"))


def encode_mp4(
    frames: UInt8[np.ndarray, "t h w 3"], fps: float, options: Mapping[str, str]
) -> bytes:
    """An H.264 MP4 with exactly these frames, for a page to show; an odd height or width grows by
    one repeated line.

    Args:
      options: libx264's options; with the same number of threads, the bytes are the same each time.
    """
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={**options, **SAME_BYTES})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = PIXEL_FORMAT
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def require_colour(path: Path, frame: av.VideoFrame) -> None:
    """Raises DatasetError if a decoded frame has more bits than colour has: 8 for grey, 10 for the
    rest. Depth has more, and the conversion to RGB would cut them off."""
    parts = frame.format.components
    bits = max(part.bits for part in parts)
    if bits > (8 if len(parts) == 1 else 10):
        raise DatasetError(
            path,
            "pixel format",
            f"is {frame.format.name}, of {bits} bits a channel, as depth has it and colour does "
            'not; mark the camera with "is_depth_map": true in its info in meta/info.json, or drop '
            "it with `data edit --drop`.",
        )


class VideoReader:
    """An open video file, kept open because parsing the index costs more than decoding an
    episode. For one thread at a time. With `depth`, frames may have any number of bits, and the
    first 8 are read."""

    def __init__(self, path: Path, *, depth: bool = False) -> None:
        """Raises MissingFileError or DatasetError if the file is missing or no video."""
        if not path.is_file():
            raise MissingFileError(path, "file", "the video is missing; copy the dataset again.")
        self.path, self._depth = path, depth
        self._container = _open(path)
        self._stream = self._container.streams.video[0]
        with naming_damage(path, "frame size", "{reason}.", caught=(ValueError,)):
            require_pixels(self._stream.width, self._stream.height)
        self._stream.thread_type, self._stream.codec_context.options = "NONE", dict(STRICT)
        self._tick = self._stream.time_base or Fraction(1)
        self._to_rgb = VideoReformatter()
        self._bytes = path.stat().st_size

    def read(self, start: float, count: int, fps: float) -> UInt8[np.ndarray, "t h w 3"]:
        """`count` frames at `fps`, the first of them `start` seconds into the file.

        Raises:
          DatasetError: one of them is not in the file, which is truncated or damaged, or the video
            is depth.
        """
        if count < 1:
            return np.zeros((0, self._stream.height, self._stream.width, 3), np.uint8)
        listed = self._stream.frames
        most = listed or self._bytes  # since a frame has at least one byte
        if most < count:
            what = f"file's index lists {most} frames" if listed else f"file has {most} bytes"
            raise DatasetError(
                self.path,
                f"frame {most}",
                f"is asked for, but the {what}: the video is shorter than the metadata says; copy "
                "or record the dataset again.",
            )
        out: np.ndarray | None = None
        apart = np.full(count, np.inf)  # periods between the frame asked for and the one taken
        if start == 0:  # the beginning of the file, where its first frame need not be at 0
            start = float((self._stream.start_time or 0) * self._tick)
        first, rate, times = None, fps, list[float]()
        for time, frame in self._decode_from(start, 0.5 / fps):
            if first is None and (time - start) * fps >= -0.5:
                first = time if (time - start) * fps <= 0.5 else start
            if first is None:
                continue
            times.append(time)
            if abs((time - times[0]) * rate - len(times) + 1) > 0.25 and len(times) <= count:
                rate = own_rate(np.array(times), fps)
            number = round((time - first) * rate)
            distance = abs((time - first) * rate - number)
            if number >= count:
                break
            if out is None and not self._depth:
                require_colour(self.path, frame)
            if number >= 0 and distance < apart[number]:
                picture = self._to_rgb.reformat(frame, format="rgb24", threads=1).to_ndarray()
                if out is None:
                    out = room_for(self.path, count, picture.shape)
                if picture.shape != out.shape[1:]:
                    raise DatasetError(
                        self.path,
                        f"frame {round(time * fps)}",
                        f"has shape {picture.shape}, expected {out.shape[1:]} like the rest; "
                        "encode the video again.",
                    )
                out[number], apart[number] = picture, distance
                if number == count - 1 and distance < 0.25:
                    break
        found = np.isfinite(apart)
        if out is None or not found.all():
            first = int(np.argmin(found))
            raise DatasetError(
                self.path,
                f"frame {round(start * fps) + first}",
                f"cannot be decoded ({int(found.sum())} of the {count} frames asked for are "
                f"there): {why_lacking(np.array(times[: count + 1]), fps)}",
            )
        return out

    def close(self) -> None:
        """Closes the file."""
        self._container.close()

    def __enter__(self) -> "VideoReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode_from(self, start: float, tolerance: float) -> Iterator[tuple[float, av.VideoFrame]]:
        """Frames with their times from the keyframe at or before `start`, or from further back
        where an open GOP (HEVC's default) makes seeking go past it; ends early on damage."""
        for back in _SEEK_BACK_SECONDS:
            target = max(0.0, start - back)
            frames = self._decode(target)
            first = next(frames, None)
            if first is None and target > 0:
                continue
            if first is None:
                return
            if first[0] <= start + tolerance or target == 0:
                yield first
                yield from frames
                return

    def _decode(self, start: float) -> Iterator[tuple[float, av.VideoFrame]]:
        try:
            self._container.seek(int(start / self._tick), stream=self._stream)
            for frame in self._container.decode(self._stream):
                if frame.pts is not None and not frame.is_corrupt:
                    yield float(frame.pts * self._tick), frame
        except av.error.FFmpegError:
            return


def _open(path: Path) -> InputContainer:
    try:
        container = open_video(path)
    except av.error.FFmpegError:
        raise unreadable(path) from None
    if not container.streams.video or container.streams.video[0].codec_context is None:
        container.close()
        raise unreadable(path)
    return container
