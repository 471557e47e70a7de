"""Single frames of a video, reached without opening or scanning the file again.

A seek table gives the place of every packet in the file and the time of its frame. To get a frame,
the packets from the keyframe before it are read at their offsets and given to a decoder (PyAV). The
table is made by one pass over the file that decodes nothing, and is kept on disk.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path

import av
import google_crc32c
import numpy as np
import pyarrow as pa
from av.video.reformatter import VideoReformatter
from jaxtyping import Float, Int64, UInt8, UInt32

from data.errors import DatasetError, MissingFileError
from data.files import cached
from data.files.limits import MOST_PIXELS, room_for
from data.video.mp4 import open_video, unreadable
from data.video.rate import DAMAGED, own_rate, why_lacking
from data.video.video import STRICT, require_colour

_FORMAT = 2
_LONG_GOP = 8
_KEPT_BYTES = 1 << 30
_OPEN_TABLES = 256
_STRICT_PNG = {"err_detect": "crccheck+explode", "max_pixels": str(MOST_PIXELS)}


@dataclass(frozen=True, eq=False)
class SeekTable:
    """The packets of a video in decoding order, and its frames in order of time.

    A packet lies at byte `offset` of the file with `size` bytes and has its time `pts` in ticks of
    `tick` seconds; decoding can begin at the packets `keys`. Frame f is that of packet `shown[f]`.
    `crc` is the packets' CRC-32C, if they were copied to the file.
    """

    path: Path
    codec: str
    extradata: bytes
    tick: Fraction
    offset: Int64[np.ndarray, " p"]
    size: Int64[np.ndarray, " p"]
    pts: Int64[np.ndarray, " p"]
    keys: Int64[np.ndarray, " k"]
    shown: Int64[np.ndarray, " f"]
    crc: UInt32[np.ndarray, " p"] | None = None

    def at(
        self, start: Float[np.ndarray, " n"], step: Int64[np.ndarray, " n"], fps: float
    ) -> Int64[np.ndarray, " n"]:
        """The frame `step` frames after each `start` in seconds, as `VideoReader.read` counts.

        Raises:
          DatasetError: none is within half a period of where it should be.
        """
        times, tick = self._times, float(self.tick)
        begin, half = np.where(start == 0, times[0], start / tick), 0.5 / fps / tick
        first = np.minimum(np.searchsorted(times, begin - half), len(times) - 1)
        last = np.minimum(first + step, len(times) - 1)
        rate = np.array(  # frames a tick
            [own_rate(times[a : b + 1], fps * tick) for a, b in zip(first, last, strict=True)]
        )
        begin = np.where(np.abs(times[first] - begin) <= half, times[first], begin)
        wanted = begin + step / rate
        after = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
        before = np.maximum(after - 1, 0)
        nearer = np.abs(times[before] - wanted) < np.abs(times[after] - wanted)
        found = np.where(nearer, before, after)
        missing = np.abs(times[found] - wanted) * rate > 0.5
        if missing.any():
            seconds = wanted[np.argmax(missing)] * tick
            why = why_lacking(times[int(first.min()) : int(last.max()) + 1] * tick, fps)
            raise self._unreadable(f"at {seconds:g} s", "is not there", why)
        return found

    def decode(self, frames: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Some frames with their numbers, given in ascending order; those of one GOP are decoded
        together, and GOPs of more than 8 frames are cached for later calls, up to 1 GiB of them.

        Raises:
          DatasetError: one cannot be decoded, or is depth.
        """
        for key, group in groupby(frames, self._key):
            yield from self._decode_group(key, list(group))

    def read(
        self, start: float, steps: Int64[np.ndarray, " n"], fps: float
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """The frames `steps` frames after `start` in seconds, decoded from the keyframes before
        them: `VideoReader.read`, without the frames between.

        Raises:
          DatasetError: one is not there, or cannot be decoded.
        """
        numbers = self.at(np.full(len(steps), start), steps, fps)
        out = np.zeros((0, 0, 0, 3), np.uint8)
        for number, frame in self.decode(np.unique(numbers).tolist()):
            picture = rgb(frame)
            if not out.size:
                out = room_for(self.path, len(steps), picture.shape)
            if picture.shape != out.shape[1:]:
                raise self._unreadable(str(number), f"has shape {picture.shape}, unlike the rest")
            out[numbers == number] = picture
        return out

    @cached_property
    def _times(self) -> Int64[np.ndarray, " f"]:
        return self.pts[self.shown]

    def _key(self, frame: int) -> int:
        """The place in `keys` from which a frame is decoded. An open GOP's leading pictures, shown
        before its keyframe, need the GOP before."""
        key = int(np.searchsorted(self.keys, self.shown[frame], "right")) - 1
        while key > 0 and self.pts[self.keys[key]] > self._times[frame]:
            key -= 1
        return key

    def _decode_group(self, key: int, frames: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Frames reached from one keyframe."""
        stop = int(self.shown[np.asarray(frames)].max()) + 1
        times = self._times[np.asarray(frames)].tolist()
        long = self._packets(key) > _LONG_GOP
        found = (_kept.get((self, key)) or {}) if long else {}
        if not all(time in found for time in times):
            found = self._decode_packets(int(self.keys[key]), stop)
            if long:
                _kept.put((self, key), found)
        for frame, time in zip(frames, times, strict=True):
            if time not in found:
                raise self._unreadable(str(frame), "comes before the first keyframe")
            yield frame, found[time]

    def _packets(self, key: int) -> int:
        """Number of packets from one keyframe to the next."""
        last = key + 1 == len(self.keys)
        return int((len(self.pts) if last else self.keys[key + 1]) - self.keys[key])

    def _decode_packets(self, first: int, stop: int) -> "_Frames":
        """The frames of all packets from a keyframe on, by their time, except leading pictures. A
        missing frame is an error, as it may have corrupted those after it."""
        decoder = _decoder(self.codec, self.extradata)
        frames: list[av.VideoFrame] = []
        with suppress(av.error.FFmpegError):
            for number in range(first, stop):
                packet = self._packet(number)
                packet.pts, packet.is_keyframe = int(self.pts[number]), number == first
                frames += decoder.decode(packet)
            frames += decoder.decode(None)
        decoder.flush_buffers()
        if frames:
            require_colour(self.path, frames[0])
        found = {frame.pts or 0: frame for frame in frames if not frame.is_corrupt}
        times = self.pts[first:stop]
        for time in np.sort(times[times >= times[0]]).tolist():
            if time not in found:
                frame = int(np.searchsorted(self._times, time))
                raise self._unreadable(str(frame), "cannot be decoded")
        return found

    def _packet(self, number: int) -> av.Packet:
        packet = self._file.packet(int(self.offset[number]), int(self.size[number]))
        if self.crc is not None and google_crc32c.value(packet) != self.crc[number]:
            raise self._unreadable(str(number), "does not hold the bytes it was written with")
        return packet

    @cached_property
    def _file(self) -> "_File":
        return _File(self.path)

    def _unreadable(self, frame: str, what: str, why: str = DAMAGED) -> DatasetError:
        sentence = f"{what} (the file has {len(self.shown)}): {why}"
        return DatasetError(self.path, f"frame {frame}", sentence)


def rgb(frame: av.VideoFrame) -> UInt8[np.ndarray, "h w 3"]:
    """A decoded frame's pixels. Converters are cached, because making one costs more than using
    it."""
    converters = _local.__dict__.setdefault("converters", {})
    kind = (frame.format.name, frame.width, frame.height)
    if kind not in converters:
        converters[kind] = VideoReformatter()
    rgb = converters[kind].reformat(frame, format="rgb24", threads=1)
    lines = np.frombuffer(rgb.planes[0], np.uint8).reshape(rgb.height, -1)
    return lines[:, : 3 * rgb.width].reshape(rgb.height, rgb.width, 3)


def seek_table(path: Path, cache: Path | None = None) -> SeekTable:
    """The seek table of a video, from folder `cache` if the file has been seen before; without a
    folder the table is kept in memory.

    Raises:
      MissingFileError: there is no such file.
      DatasetError: it is not a video that stores its packets unchanged, as an mp4 does.
    """
    try:
        about = path.stat()
    except FileNotFoundError:
        raise MissingFileError(path, "file", "is missing; copy the dataset again.") from None
    return _table(path, cache, about.st_size, about.st_mtime_ns)


def write_table(table: SeekTable, path: Path) -> None:
    """Writes the numbers of a table and their checksum, whole or not at all."""
    is_key = np.zeros(len(table.pts), bool)
    is_key[table.keys] = True
    shown = np.append(table.shown, np.full(len(table.pts) - len(table.shown), -1))
    columns = {"offset": table.offset, "size": table.size, "pts": table.pts, "shown": shown}
    if table.crc is not None:
        columns["crc"] = table.crc
    about = {
        "codec": table.codec,
        "extradata": table.extradata,
        "tick": str(table.tick),
        "frames": str(len(table.shown)),
    }
    rows = pa.table({**columns, "key": is_key}).replace_schema_metadata(about)
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, rows.schema) as file:
        file.write_table(rows)
    cached.write_bytes(path, buffer.getvalue().to_pybytes())


def read_table(path: Path, video: Path) -> SeekTable:
    """Table that `write_table` wrote for a file, mapped into memory.

    Raises:
      FileNotFoundError: there is no such file.
      DatasetError: it is damaged.
    """
    rows = pa.ipc.open_file(pa.py_buffer(cached.read_bytes(path))).read_all()
    about = rows.schema.metadata
    columns = {name: rows[name].to_numpy() for name in rows.column_names}
    return SeekTable(
        path=video,
        codec=about[b"codec"].decode(),
        extradata=about[b"extradata"],
        tick=Fraction(about[b"tick"].decode()),
        offset=columns["offset"],
        size=columns["size"],
        pts=columns["pts"],
        keys=np.flatnonzero(columns["key"]),
        shown=columns["shown"][: int(about[b"frames"])],
        crc=columns.get("crc"),
    )


@lru_cache(_OPEN_TABLES)
def _table(path: Path, cache: Path | None, size: int, time: int) -> SeekTable:
    if cache is None:
        return _scan(path)
    looked_at = f"{_FORMAT}:{path.absolute()}:{size}:{time}:{av.__version__}"
    kept = cache / f"{hashlib.sha256(looked_at.encode()).hexdigest()[:16]}.arrow"
    if not kept.is_file():
        write_table(_scan(path), kept)
    return read_table(kept, path)


def _scan(path: Path) -> SeekTable:
    """Reads a whole video's packets, except those after the place where it was cut off."""
    packets: list[av.Packet] = []
    try:
        with open_video(path) as container:
            stream = next(s for s in container.streams.video if s.codec_context is not None)
            codec, tick = stream.codec_context, stream.time_base or Fraction(1)
            with suppress(av.error.FFmpegError):
                for packet in container.demux(stream):
                    if packet.is_corrupt:
                        break
                    if packet.size:
                        packets.append(packet)
    except (av.error.FFmpegError, StopIteration):
        raise unreadable(path) from None
    plain = all(packet.pos is not None and packet.pts is not None for packet in packets)
    if not packets or not plain or not packets[0].is_keyframe or not _lies_in(path, packets[0]):
        raise DatasetError(
            path,
            "packets",
            "cannot be read directly: each must be stored unchanged in the file and have a time, "
            "and the first must be a keyframe; convert the dataset to a frame store, or encode the "
            "videos as mp4.",
        )
    pts = np.array([packet.pts for packet in packets])
    ordered = np.argsort(pts, kind="stable")
    hidden = np.array([packet.is_discard for packet in packets])
    return SeekTable(
        path=path,
        codec=codec.codec.name,
        extradata=codec.extradata or b"",
        tick=tick,
        offset=np.array([packet.pos for packet in packets]),
        size=np.array([packet.size for packet in packets]),
        pts=pts,
        keys=np.flatnonzero([packet.is_keyframe for packet in packets]),
        shown=ordered[~hidden[ordered]],
    )


def _lies_in(path: Path, packet: av.Packet) -> bool:
    return bytes(packet) == bytes(_File(path).packet(packet.pos or 0, packet.size))


def _decoder(codec: str, extradata: bytes) -> av.VideoCodecContext:
    """A decoder for this thread alone, without threads of its own."""
    decoders = _local.__dict__.setdefault("decoders", {})
    if (codec, extradata) not in decoders:
        decoder = av.CodecContext.create(codec, "r")
        decoder.extradata, decoder.thread_count = extradata or None, 1
        decoder.options = dict(_STRICT_PNG if codec == "png" else STRICT)
        decoders[codec, extradata] = decoder
    return decoders[codec, extradata]


_local = threading.local()
_Gop = tuple[SeekTable, int]
_Frames = dict[int, av.VideoFrame]


class _Kept:
    """Cache of the last decoded frames of long GOPs, as many as fit into `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._gops: OrderedDict[_Gop, _Frames] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, gop: _Gop) -> _Frames | None:
        """The cached frames of a GOP."""
        with self._lock:
            if gop in self._gops:
                self._gops.move_to_end(gop)
            return self._gops.get(gop)

    def put(self, gop: _Gop, frames: _Frames) -> None:
        """Keeps these frames of a GOP instead of any others of it."""
        with self._lock:
            self._used += _bytes(frames) - _bytes(self._gops.pop(gop, {}))
            self._gops[gop] = frames
            while self._used > self._limit:
                self._used -= _bytes(self._gops.popitem(last=False)[1])


_kept = _Kept(_KEPT_BYTES)


def _bytes(frames: _Frames) -> int:
    return sum(plane.buffer_size for frame in frames.values() for plane in frame.planes)


class _File:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY)

    def packet(self, offset: int, size: int) -> av.Packet:
        """The bytes at this offset, in FFmpeg's own memory, because its decoders read a little past
        the end."""
        packet = av.Packet(size)
        if os.preadv(self._number, [packet], offset) != size:
            raise av.error.EOFError(0, "file is shorter than its index says")
        return packet

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._number)
