"""Joins videos end to end in one file without decoding them: copies packets and shifts their times.

Each episode begins a whole number of frame periods after the first, so its frames keep the times
that a reader looks for. Codec, size and parameter sets are given to a decoder once per file, so all
videos in a file must share them; if a video does not, the next file begins.
"""

import errno
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from data.errors import DatasetError
from data.files.names import fill
from data.lerobot.recording import VIDEO_PATH, next_file
from data.video.mp4 import open_video
from data.video.span import PacketSpan

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class CopiedVideos:
    """The mp4 files of one camera, made of copied videos. A new file begins beyond the size limit,
    or where a video cannot be joined to those before."""

    def __init__(self, root: Path, camera: str, megabytes: float) -> None:
        self.root, self.camera, self.limit = root, camera, megabytes * 2**20
        self.chunk, self.file = 0, -1
        self._open: tuple[OutputContainer, VideoStream] | None = None
        self._kind: Any = None
        self._end = self._last = self._size = 0

    def add(self, path: Path, frames: int, fps: float) -> dict[str, int | float]:
        """Appends the video at `path`; returns its location, as columns of meta/episodes.

        Raises:
          DatasetError: the file is not a video, is damaged, or has fewer than `frames`.
          OSError: the disk that is written to is full or fails.
        """
        try:
            with open_video(path) as source:
                stream = source.streams.video[0]
                packets = [p for p in source.demux(stream) if p.size]
                return self._append(stream, _whole(path, packets, frames), frames, fps)
        except (av.error.FFmpegError, IndexError) as error:
            if getattr(error, "errno", None) in _OF_THE_DISK:
                raise
            raise DatasetError(
                path,
                "file",
                f"cannot be copied ({str(error).splitlines()[0]}): it was cut off or damaged; "
                "copy or encode it again.",
            ) from None

    def add_span(self, span: PacketSpan, frames: int, fps: float) -> dict[str, int | float]:
        """Appends a stretch of another video; returns its location, as `add` does."""
        if not span.begins:
            self.close()
        return self._append(span.stream, span.packets, frames, fps, span.first)

    def close(self) -> None:
        """Writes the index of the last file."""
        if self._open is not None:
            self._open[0].close()
            self._open = None

    def _append(
        self,
        stream: VideoStream,
        packets: list[Packet],
        frames: int,
        fps: float,
        first: int | None = None,
    ) -> dict[str, int | float]:
        """Appends packets; the frame at pts `first` is the episode's first."""
        tick = stream.time_base or Fraction(1)
        shown, decoded = sorted(p.pts or 0 for p in packets), [p.dts or 0 for p in packets]
        steps = sorted(b - a for a, b in pairwise(shown)) or [round(1 / (fps * tick))]
        step = max(1, steps[len(steps) // 2])
        codec, size = stream.codec_context, sum(p.size for p in packets)
        kind = codec.name, codec.extradata, codec.width, codec.height, codec.pix_fmt, tick
        joins = self._end - shown[0] + decoded[0] > self._last and self._size + size <= self.limit
        if self._open is None or self._kind != kind or not joins:
            self._open = self._begin(stream)
            self._kind, self._end, self._size = kind, 0, 0
        start, shift = self._end, self._end - shown[0]
        out, copy = self._open
        for packet, pts, dts in zip(packets, [p.pts or 0 for p in packets], decoded, strict=True):
            packet.pts, packet.dts, packet.stream = pts + shift, dts + shift, copy
            out.mux(packet)
        self._last = decoded[-1] + shift
        self._end, self._size = shift + shown[-1] + step, self._size + size
        begin = float((start if first is None else first + shift) * tick)
        where = {
            "chunk_index": self.chunk,
            "file_index": self.file,
            "from_timestamp": begin,
            "to_timestamp": begin + frames / fps,
        }
        return {f"videos/{self.camera}/{key}": value for key, value in where.items()}

    def _begin(self, stream: VideoStream) -> tuple[OutputContainer, VideoStream]:
        self.close()
        self.chunk, self.file = next_file(self.chunk, self.file)
        name = fill(VIDEO_PATH, video_key=self.camera, chunk_index=self.chunk, file_index=self.file)
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        out = av.open(str(path), "w", options={"movflags": "faststart"})
        copy = out.add_stream_from_template(stream, opaque=True)
        copy.time_base = stream.time_base
        return out, copy


def _whole(path: Path, packets: list[Packet], frames: int) -> list[Packet]:
    """The packets, if all of them are sound and there are enough for the frames."""
    sound = [p for p in packets if not p.is_corrupt and p.pts is not None and p.dts is not None]
    if len(sound) != len(packets) or len(sound) < frames:
        raise DatasetError(
            path,
            "frames",
            f"holds only {len(sound)} intact frames of {max(frames, len(packets))}: it was cut off "
            "or damaged; copy or encode it again.",
        )
    if not packets[0].is_keyframe:
        raise DatasetError(
            path,
            "frame 0",
            "is not a keyframe, so no other video can be put before it; encode the video again.",
        )
    return packets
