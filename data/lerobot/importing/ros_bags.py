"""Reads ROS bags by rosbags, without ROS: ROS 1 files (.bag), and ROS 2 folders with SQLite or MCAP
in them.

rosbags gives messages in the order of their times, which hides a clock that was set back; so their
order in the files is also read (rosbags/rosbag1/reader.py, rosbag2's tables).
"""

import bz2
import io
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import DatasetError, naming_damage
from data.files.limits import most_bytes, require_budget, require_text
from data.lerobot.importing.bags import BagMessage, bag_format
from data.lerobot.importing.mcap_files import require_chunks, require_frame, written_messages
from data.lerobot.importing.recording import library

METADATA = "metadata.yaml"


class _RosBag:
    """An open bag; messages come in the order of their times."""

    def __init__(self, path: Path, reader: Any) -> None:
        self._path, self._reader = path, reader
        counts: Counter[str] = Counter()
        for connection in reader.connections:
            counts[connection.topic] += connection.msgcount
        self.topics: Mapping[str, int] = counts

    def messages(self, topics: Iterable[str]) -> Iterator[BagMessage]:
        wanted = set(topics)
        connections = [c for c in self._reader.connections if c.topic in wanted]
        with _reading(self._path):
            for connection, time, content in self._reader.messages(connections):
                decode = partial(self._reader.deserialize, content, connection.msgtype)
                yield BagMessage(connection.topic, time, decode)

    def written(self, topics: Iterable[str]) -> Iterator[tuple[str, int]]:
        wanted = set(topics)
        with _reading(self._path):
            for reader in self._reader.readers:
                of_bag = _in_file if hasattr(reader, "indexes") else _in_folder
                told = of_bag(reader, wanted)
                yield from ((topic, time) for topic, time in told if topic in wanted)


def _in_file(reader: Any, topics: Set[str]) -> Iterator[tuple[str, int]]:
    """Topics and times of a ROS 1 bag, by the positions of the messages in its file."""
    named = {c.id: c.topic for c in reader.connections if c.topic in topics}
    placed = (
        (entry.chunk_pos, entry.offset, topic, entry.time)
        for number, topic in named.items()
        for entry in reader.indexes[number]
    )
    return ((topic, time) for *_, topic, time in sorted(placed))


def _in_folder(reader: Any, topics: Set[str]) -> Iterator[tuple[str, int]]:
    """Topics and times of a ROS 2 bag, file after file."""
    for storage in reader.storage.storages:
        if storage.path.suffix == ".mcap":
            with storage.path.open("rb") as file:
                for _, channel, message in written_messages(file, topics):
                    yield channel.topic, message.log_time
        else:
            with closing(_database(storage.path)) as database:
                yield from database.execute(_ROWS)


_ROWS = """select topics.name, messages.timestamp from messages
           join topics on messages.topic_id = topics.id order by messages.id"""


@contextmanager
def _open_bag(path: Path) -> Iterator[_RosBag]:
    what = "A ROS bag"
    highlevel = library("rosbags.highlevel", what)
    systems = library("rosbags.typesys", what)
    with _reading(path):
        _require_sizes(path)
        # types for bags that do not hold their own, as before Iron
        usual = systems.get_typestore(systems.Stores.ROS2_HUMBLE)
        reader = highlevel.AnyReader([path], default_typestore=usual)
        reader.open()
        if any(getattr(one, "compression_mode", None) == "message" for one in reader.readers):
            _require_message_sizes(path)
        _bound(path, reader)
    try:
        yield _RosBag(path, reader)
    finally:
        reader.close()


def _require_sizes(path: Path) -> None:
    """Raises DatasetError if a file of a bag is not a regular one, or unpacks to far too much."""
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        if not file.is_file():
            if file.name == METADATA or file.suffix in _STORED:
                raise DatasetError(file, "file", "is not a regular file; copy the bag again.")
            continue
        size = file.stat().st_size
        if file.name == METADATA:
            require_text(file, "file", size)
        elif file.suffix == ".mcap":
            require_chunks(file)
        elif file.suffix == ".zstd":
            with file.open("rb") as packed:
                require_frame(file, "file", packed, size, on_disk=True)


def _require_message_sizes(path: Path) -> None:
    """Raises DatasetError if a message of a bag that packs each unpacks to far too much."""
    header = library("zstandard", "A ROS bag").FRAME_HEADER
    for file in sorted(path.glob("*.db3")):
        size = file.stat().st_size
        with closing(_database(file)) as database:
            for (content,) in database.execute(_PACKED, (header,)):
                require_frame(file, "message", io.BytesIO(content), size)


def _bound(path: Path, reader: Any) -> None:
    """Bounds what the chunks of a ROS 1 bag, compressed by bzip2, unpack to."""
    size = path.stat().st_size

    def unpacked(packed: bytes) -> bytes:
        found = bz2.BZ2Decompressor().decompress(packed, most_bytes(size) + 1)
        require_budget(path, "chunk", len(found), size)
        return found

    for one in reader.readers:
        for at, chunk in getattr(one, "chunks", {}).items():
            if chunk.decompressor is bz2.decompress:
                one.chunks[at] = chunk._replace(decompressor=unpacked)


def _database(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)


_STORED = (".db3", ".mcap", ".zstd")
"""Suffixes of a bag's files."""
_PACKED = "select data from messages where substr(data, 1, 4) = ?"


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turns the errors of rosbags and SQLite about a damaged bag into one that names it."""
    return naming_damage(
        path,
        "file",
        "is not a readable bag ({reason}); run `ros2 bag reindex` on it, or copy it again.",
        kept=(OSError, MemoryError),
    )


def _recognises(path: Path) -> bool:
    return (path.suffix == ".bag" and not path.is_dir()) or (path / METADATA).is_file()


ROS_BAG = bag_format("ROS bag", _recognises, _open_bag)
