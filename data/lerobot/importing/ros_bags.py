"""ROS bags, read by rosbags without ROS: files of ROS 1 (.bag), and folders of ROS 2 with SQLite or
MCAP in them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import naming_damage
from data.lerobot.importing.bags import BagMessage, bag_format
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


@contextmanager
def _open_bag(path: Path) -> Iterator[_RosBag]:
    what = "A ROS bag"
    highlevel = library("rosbags.highlevel", what)
    systems = library("rosbags.typesys", what)
    with _reading(path):
        # types of bags that do not tell theirs, as before Iron
        usual = systems.get_typestore(systems.Stores.ROS2_HUMBLE)
        reader = highlevel.AnyReader([path], default_typestore=usual)
        reader.open()
    try:
        yield _RosBag(path, reader)
    finally:
        reader.close()


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turns the errors of rosbags and SQLite about a damaged bag into one that names it."""
    return naming_damage(
        path,
        "file",
        "is no readable bag ({reason}); `ros2 bag reindex` it, or copy it again.",
        kept=(OSError, MemoryError),
    )


def _recognises(path: Path) -> bool:
    return (path.suffix == ".bag" and path.is_file()) or (path / METADATA).is_file()


ROS_BAG = bag_format("ROS bag", _recognises, _open_bag)
