"""MCAP files, read by the mcap packages: messages of ROS 2 (CDR), protobuf and JSON."""

import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from data.errors import naming_damage
from data.files.limits import most_values, require_budget
from data.lerobot.importing.bags import BagMessage, bag_format
from data.lerobot.importing.recording import library


class _McapBag:
    """An open MCAP file; messages come in the order in which they were written."""

    def __init__(self, path: Path, file: IO[bytes], factories: Sequence[Any]) -> None:
        self._path, self._file, self._factories = path, file, factories
        self._decoders: dict[int, Callable[[bytes], Any]] = {}
        summary = library("mcap.reader", "An MCAP file").make_reader(file).get_summary()
        if summary is None or summary.statistics is None:
            raise ValueError("it has no index, like a recording that was cut off")
        counts = summary.statistics.channel_message_counts
        if (messages := sum(counts.values())) > most_values(path.stat().st_size):
            raise ValueError(f"it claims to hold {messages} messages")
        topics: Counter[str] = Counter()
        for number, channel in summary.channels.items():
            topics[channel.topic] += counts.get(number, 0)
        self.topics: Mapping[str, int] = topics

    def messages(self, topics: Iterable[str]) -> Iterator[BagMessage]:
        with _reading(self._path):
            for schema, channel, message in written_messages(self._file, topics):
                decode = partial(self._decoded, schema, channel, message.data)
                yield BagMessage(channel.topic, message.log_time, decode)

    def written(self, topics: Iterable[str]) -> Iterator[tuple[str, int]]:
        return ((message.topic, message.time) for message in self.messages(topics))

    def _decoded(self, schema: Any, channel: Any, content: bytes) -> Any:
        if channel.id not in self._decoders:
            self._decoders[channel.id] = self._decoder(schema, channel)
        return self._decoders[channel.id](content)

    def _decoder(self, schema: Any, channel: Any) -> Callable[[bytes], Any]:
        if channel.message_encoding == "json":
            return json.loads
        for factory in self._factories:
            decoder = factory.decoder_for(channel.message_encoding, schema)
            if decoder is not None:
                return decoder
        encodings = channel.message_encoding, schema.encoding if schema else "no schema"
        raise ValueError(
            f"has messages of encoding '{encodings[0]}' with {encodings[1]}; only cdr with "
            "ros2msg, protobuf and json can be read"
        )


def written_messages(file: IO[bytes], topics: Iterable[str]) -> Iterator[tuple[Any, Any, Any]]:
    """Schema, channel and message of all messages of some topics, in the order in which they were
    written, one chunk at a time. (mcap's seeking reader would read all chunks before the first
    message.)"""
    file.seek(0)
    reader = library("mcap.reader", "An MCAP file").NonSeekingReader(file, validate_crcs=True)
    return reader.iter_messages(list(topics), log_time_order=False)  # type: ignore[no-any-return]


def require_chunks(path: Path) -> None:
    """Checks how much the chunks of an MCAP file unpack to, by its records' headers alone.

    Raises:
      DatasetError: one unpacks to far more than a file of this size may ask for.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        at = file.seek(_MAGIC)
        while len(head := file.read(_HEAD)) == _HEAD:
            at, length = at + _HEAD, int.from_bytes(head[1:], "little")
            if head[0] == _CHUNK:
                told = file.read(min(length, 128))
                asked, name = struct.unpack_from("<16xQ4xI", told)
                begin, place = struct.calcsize("<16xQ4xI") + name + 8, f"chunk at byte {at}"
                require_budget(path, place, asked, size)
                if told[begin - name - 8 : begin - 8] == b"zstd":
                    file.seek(at + begin)
                    require_frame(path, place, file, size)
            at = file.seek(at + length)


def require_frame(
    file: Path, place: str, packed: IO[bytes], size: int, *, on_disk: bool = False
) -> None:
    """Checks how much the frame of zstd that comes next in `packed` unpacks to: by its header or,
    where that does not say, by unpacking it a piece at a time.

    Raises:
      DatasetError: far more than a file of `size` bytes may ask for.
    """
    zstandard = library("zstandard", "Compressed data")
    head = packed.read(_FRAME)
    count = zstandard.frame_content_size(head)
    require_budget(file, place, count, size, on_disk=on_disk)
    if count < 0:
        packed.seek(-len(head), os.SEEK_CUR)
        count, unpacker = 0, zstandard.ZstdDecompressor()
        with unpacker.stream_reader(packed, closefd=False) as content:
            while block := content.read(_PIECE):
                count += len(block)
                require_budget(file, place, count, size, on_disk=on_disk)


_FRAME, _PIECE = 18, 1 << 20
"""Most bytes of the header of a frame of zstd, and of a piece of its content."""
_MAGIC, _HEAD, _CHUNK = 8, 9, 6
"""Bytes of the file's magic and of a record's opcode and length, and the opcode of a chunk."""


@contextmanager
def _open_mcap(path: Path) -> Iterator[_McapBag]:
    what = "An MCAP file"
    decoders = [library(name, what) for name in ("mcap_ros2.decoder", "mcap_protobuf.decoder")]
    with path.open("rb") as file:
        with _reading(path):
            require_chunks(path)
            bag = _McapBag(path, file, [decoder.DecoderFactory() for decoder in decoders])
        yield bag


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turns mcap's errors about a damaged file into one that names it."""
    return naming_damage(
        path,
        "file",
        "is not a readable MCAP file ({reason}); repair it with `mcap recover`, or copy it again.",
        kept=(OSError, MemoryError),
    )


MCAP = bag_format("MCAP", lambda path: path.suffix == ".mcap" and not path.is_dir(), _open_mcap)
