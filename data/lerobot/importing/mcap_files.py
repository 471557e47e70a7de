"""MCAP files, read by the mcap packages: messages of ROS 2 (CDR), protobuf and JSON."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import naming_damage
from data.lerobot.importing.bags import BagMessage, bag_format
from data.lerobot.importing.recording import library


class _McapBag:
    """An open MCAP file; messages come in the order in which they were written."""

    def __init__(self, path: Path, reader: Any, factories: Sequence[Any]) -> None:
        self._path, self._reader, self._factories = path, reader, factories
        self._decoders: dict[int, Callable[[bytes], Any]] = {}
        summary = self._reader.get_summary()
        if summary is None or summary.statistics is None:
            raise ValueError("it has no index, as of a recording that was cut off")
        counts = summary.statistics.channel_message_counts
        topics: Counter[str] = Counter()
        for number, channel in summary.channels.items():
            topics[channel.topic] += counts.get(number, 0)
        self.topics: Mapping[str, int] = topics

    def messages(self, topics: Iterable[str]) -> Iterator[BagMessage]:
        read = self._reader.iter_messages(list(topics), log_time_order=False)
        with _reading(self._path):
            for schema, channel, message in read:
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
            f"has messages of encoding '{encodings[0]}' with {encodings[1]}; cdr with ros2msg, "
            "protobuf and json are read"
        )


@contextmanager
def _open_mcap(path: Path) -> Iterator[_McapBag]:
    what = "An MCAP file"
    reader = library("mcap.reader", what)
    decoders = [library(name, what) for name in ("mcap_ros2.decoder", "mcap_protobuf.decoder")]
    with path.open("rb") as file:
        with _reading(path):
            factories = [decoder.DecoderFactory() for decoder in decoders]
            bag = _McapBag(path, reader.make_reader(file), factories)
        yield bag


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turns mcap's errors about a damaged file into one that names it."""
    return naming_damage(
        path,
        "file",
        "is no readable MCAP ({reason}); repair it by `mcap recover`, or copy it again.",
        kept=(OSError, MemoryError),
    )


MCAP = bag_format("MCAP", lambda path: path.suffix == ".mcap" and path.is_file(), _open_mcap)
