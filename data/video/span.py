"""A stretch of frames of a video as packets, cut out without decoding.

Decoding begins at a keyframe, so the packets from the last one before the first frame are included.
Readers find the frames by their times and never show those before. Packets that the frames do not
need are left out, among them leading pictures, whose references lie before the keyframe.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream
from jaxtyping import Bool, Int64

from data.errors import DatasetError
from data.video.mp4 import open_video
from data.video.rate import DAMAGED, own_rate, why_lacking


@dataclass(frozen=True)
class PacketSpan:
    """Packets in decoding order with their stream. `first` is the pts of the first wanted frame;
    `begins` is False if a decoder can begin here only where the file begins here too."""

    stream: VideoStream
    packets: list[Packet]
    first: int
    begins: bool


class Packets:
    """An open video with the times of its packets, to cut any number of spans from. For one thread
    at a time.

    Raises:
      DatasetError: it is no video, or a packet is damaged or has no time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._container = open_video(path)
            self._stream = self._container.streams.video[0]
            packets = [p for p in self._container.demux(self._stream) if p.size]
        except (av.error.FFmpegError, IndexError) as error:
            raise _cut_off(path, f"cannot be read ({str(error).splitlines()[0]})") from None
        if not packets or any(p.is_corrupt or p.pts is None or p.dts is None for p in packets):
            raise _cut_off(path, "has packets that are damaged or have no times")
        self.tick: Fraction = self._stream.time_base or Fraction(1)
        self._pts: Int64[np.ndarray, " n"] = np.array([p.pts for p in packets])
        self._dts: Int64[np.ndarray, " n"] = np.array([p.dts for p in packets])
        self._key: Bool[np.ndarray, " n"] = np.array([p.is_keyframe for p in packets])

    def span(self, start: float, first: int, count: int, fps: float) -> PacketSpan:
        """The packets of `count` frames from the `first` of an episode on, which begins `start`
        seconds into the file; frames are those that `VideoReader` reads.

        Raises:
          DatasetError: they are not all there, or nothing says where decoding can begin.
        """
        shown = np.sort(self._pts)
        times = shown * float(self.tick)
        if start == 0:
            start = times[0]
        near = int(np.abs(times - start).argmin())
        begin = times[near] if abs(times[near] - start) * fps <= 0.5 else start
        rate = own_rate(times[near : near + first + count], fps)
        asked = begin + (first + np.array([0, count - 1])) / rate
        ends = np.abs(times[:, None] - asked).argmin(axis=0)
        if (np.abs(times[ends] - asked) * fps > 0.5).any() or ends[1] - ends[0] < count - 1:
            why = why_lacking(times[near : near + first + count], fps)
            raise _cut_off(self.path, f"does not hold frames {first} to {first + count - 1}", why)
        low, high = int(shown[ends[0]]), int(shown[ends[1]])
        keys = np.flatnonzero(self._key & (self._pts <= low))
        if not len(keys):
            raise DatasetError(
                self.path,
                "frame 0",
                "is not a keyframe, so no frame before the first keyframe can be decoded; encode "
                "the video again.",
            )
        key = int(keys[np.argmax(self._pts[keys])])
        last = int(np.flatnonzero((low <= self._pts) & (self._pts <= high))[-1])
        packets = self._from(key, last - key + 1)
        kept = [p for p in packets if (p.pts or 0) >= int(self._pts[key])]
        if len(kept) > 1 and kept[1] is not packets[1]:  # no gap, which would shift all seeking
            kept[0].dts = (kept[1].dts or 0) - int(np.median(np.diff(np.sort(self._dts))))
        return PacketSpan(self._stream, kept, low, _is_beginning(self._stream, kept[0]))

    def close(self) -> None:
        """Closes the file."""
        self._container.close()

    def _from(self, key: int, count: int) -> list[Packet]:
        """Packets in decoding order from a keyframe on."""
        found: list[Packet] = []
        self._container.seek(int(self._dts[key]), stream=self._stream)
        for packet in self._container.demux(self._stream):
            if packet.size and (found or packet.dts == self._dts[key]):
                found.append(packet)
            if len(found) == count:
                return found
        raise _cut_off(self.path, f"ends {count - len(found)} packets early")


def _is_beginning(stream: VideoStream, packet: Packet) -> bool:
    """True if a decoder that has decoded other pictures may continue with this keyframe: for H.264
    and HEVC an IDR picture, which lets it forget all pictures before."""
    name = stream.codec_context.name
    if name not in _IDR:
        return True
    content, at = bytes(packet), 0
    configuration, place = stream.codec_context.extradata or b"", _WIDTH_AT[name]
    width = 1 + (configuration[place] & 3) if len(configuration) > place else 4
    while at + width < len(content):
        size = int.from_bytes(content[at : at + width], "big")
        kind = content[at + width]
        if (kind & 31 if name == "h264" else kind >> 1 & 63) in _IDR[name]:
            return True
        at += width + size
    return False


_IDR = {"h264": (5,), "hevc": (19, 20)}
"""Types of the NAL units of IDR pictures (ISO/IEC 14496-10, 23008-2)."""
_WIDTH_AT = {"h264": 4, "hevc": 21}
"""Byte of the decoder configuration record that gives the width of a unit's length (14496-15)."""


def _cut_off(path: Path, what: str, why: str = DAMAGED) -> DatasetError:
    return DatasetError(path, "file", f"{what}: {why}")
