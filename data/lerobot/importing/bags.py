"""Imports topics with different rates as episodes with one rate.

A bag is read twice: once for the times of its messages, which decide everything, and once for the
messages in use. Memory holds the images of one episode and no more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int64

from data.errors import DatasetError, naming_damage, short
from data.lerobot.importing.arrays import as_column, chosen, dim_names, oriented, placed
from data.lerobot.importing.clock import AlignedStretch, align
from data.lerobot.importing.layout import ImportLayout
from data.lerobot.importing.messages import field, header_time, joint_order, numbers, picture
from data.lerobot.importing.recording import (
    CheckedRecording,
    ImportedEpisode,
    PendingEpisode,
    RecordingFormat,
    instruction,
)


class BagMessage(NamedTuple):
    """A message of a topic, logged at `time` (nanoseconds); `decode` reads it."""

    topic: str
    time: int
    decode: Callable[[], Any]


class Bag(Protocol):
    """An open recording of topics."""

    @property
    def topics(self) -> Mapping[str, int]:
        """Number of messages by topic."""
        ...

    def messages(self, topics: Iterable[str]) -> Iterator[BagMessage]:
        """Messages of some topics. Each topic's messages come in the same order every time: the
        order of writing, if their times do not go back."""
        ...

    def written(self, topics: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Topic and logged time of the same messages, in the order of writing."""
        ...


OpenBag = Callable[[Path], AbstractContextManager[Bag]]


def bag_format(name: str, recognises: Callable[[Path], bool], open_bag: OpenBag) -> RecordingFormat:
    """The format of recordings that `open_bag` opens; `open_bag` raises DatasetError if it
    cannot."""
    return RecordingFormat(
        name, recognises, partial(_check, open_bag), partial(_episodes, open_bag)
    )


_LATEST = 2**63 - 2**61


def _check(open_bag: OpenBag, path: Path, layout: ImportLayout) -> CheckedRecording:
    """Looks for the topics; only the messages show the episodes and their shapes."""
    with open_bag(path) as bag:
        resolved = _resolved(path, bag, layout)
        shapes = dict.fromkeys([*resolved.columns, *resolved.cameras])
        return CheckedRecording(1, shapes, unused=resolved.unused(bag.topics))


@contextmanager
def _episodes(
    open_bag: OpenBag, path: Path, layout: ImportLayout
) -> Iterator[list[PendingEpisode]]:
    with open_bag(path) as bag:
        layout = _resolved(path, bag, layout)
        times = _times(path, bag, layout)
        sentence = (
            '{reason}; allow more with "silence" in the layout, set "gaps": "cut" in it to cut the '
            "recording at gaps, or leave the recording out."
        )
        with naming_damage(path, "topics", sentence, caught=(ValueError,)):
            parts = align(times, layout.fps, layout.silence, layout.gaps)
        if not parts:
            raise DatasetError(
                path,
                "topics",
                "have no two frames without a gap in which every topic has a message; leave the "
                "recording out.",
            )
        names = [f", part {number}" for number in range(len(parts))] if len(parts) > 1 else [""]
        yield [
            PendingEpisode(f"{path}{name}", partial(_read, path, bag, layout, part), part.left_out)
            for name, part in zip(names, parts, strict=True)
        ]


def _resolved(path: Path, bag: Bag, layout: ImportLayout) -> ImportLayout:
    """The layout without patterns; all of its topics have messages."""
    resolved = layout.resolved(bag.topics, path)
    for topic in _topics(path, resolved):
        if not bag.topics[topic]:
            raise DatasetError(
                path, f"'{topic}'", "has no messages; leave out the recording or the topic."
            )
    if resolved.task.path and (topic := _split(path, resolved.task.path)[0]) not in bag.topics:
        raise DatasetError(
            path, f"'{topic}'", "is not a topic of the recording; give --task 'lift the cup'."
        )
    return resolved


def _topics(path: Path, layout: ImportLayout) -> list[str]:
    """Topics that are aligned."""
    found = [_split(path, s.path)[0] for sources in layout.columns.values() for s in sources]
    return list(dict.fromkeys([*found, *layout.camera_paths]))


def _times(path: Path, bag: Bag, layout: ImportLayout) -> dict[str, Int64[np.ndarray, " n"]]:
    found: dict[str, list[int]] = {topic: [] for topic in _topics(path, layout)}
    stamped = _stamped(path, bag, found) if layout.clock == "header" else bag.written(found)
    for topic, time in stamped:
        with _reading(path, topic):
            if not 0 <= time < _LATEST:
                raise ValueError(f"has a message at {time} ns, after the year 2200 or before 1970")
        found[topic].append(time)
    return {topic: np.array(at, np.int64) for topic, at in found.items()}


def _stamped(path: Path, bag: Bag, topics: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Topic and time in the header of each message."""
    for message in bag.messages(topics):
        with _reading(path, message.topic):
            time = header_time(message.decode())
        yield message.topic, time


def _read(path: Path, bag: Bag, layout: ImportLayout, part: AlignedStretch) -> ImportedEpisode:
    """An episode, read from the bag's messages up to the last one in use."""
    count = len(part.ticks)
    values: dict[tuple[str, int], list[np.ndarray]] = {
        (name, number): []
        for name, sources in layout.columns.items()
        for number in range(len(sources))
    }
    orders: dict[tuple[str, int], list[str]] = {}
    frames: dict[str, np.ndarray | None] = dict.fromkeys(layout.cameras)
    for topic, number, message in _used(bag, part):
        ticks = np.flatnonzero(part.messages[topic] == number)
        with _reading(path, f"{topic}, message {number}"):
            decoded = message.decode()
            for name, sources in layout.columns.items():
                for place, source in enumerate(sources):
                    here, where = _split(path, source.path)
                    if here == topic:
                        order = joint_order(decoded, where) if source.names is None else []
                        _require_same_order(order, orders.setdefault((name, place), order))
                        found = numbers(decoded, where, source.names)
                        found = chosen(path, f"'{source.path}'", found, source.dims)
                        _same(found, values[name, place])
                        values[name, place] += [found] * len(ticks)
            for name, camera in layout.cameras.items():
                if camera.path == topic:
                    image = picture(decoded)
                    first, *others = ticks.tolist()
                    into = placed(path, topic, frames[name], first, count, image)
                    into[others] = image
                    frames[name] = into
    columns = {
        name: as_column([np.stack(values[name, number]) for number in range(len(sources))])
        for name, sources in layout.columns.items()
    }
    shown = {
        name: oriented(pictures, layout.cameras[name])
        for name, pictures in frames.items()
        if pictures is not None
    }
    task = instruction(path, layout.task, partial(_text, path, bag, int(part.ticks[0])))
    return ImportedEpisode(columns, shown, task, dim_names(layout))


def _used(bag: Bag, part: AlignedStretch) -> Iterator[tuple[str, int, BagMessage]]:
    """Messages of the part, with their topics and numbers, until there are no more."""
    wanted = {topic: np.unique(at) for topic, at in part.messages.items()}
    seen, left = dict.fromkeys(wanted, -1), sum(map(len, wanted.values()))
    for message in bag.messages(wanted):
        topic = message.topic
        seen[topic] += 1
        at = np.searchsorted(wanted[topic], seen[topic])
        if at < len(wanted[topic]) and wanted[topic][at] == seen[topic]:
            yield topic, seen[topic], message
            left -= 1
            if not left:
                return


def _same(found: np.ndarray, before: list[np.ndarray]) -> None:
    if before and len(before[-1]) != len(found):
        raise ValueError(f"has {len(found)} values, but earlier messages have {len(before[-1])}")


def _require_same_order(order: list[str], before: list[str]) -> None:
    if order != before:
        raise ValueError(
            f'has joints {short(order)}, but earlier messages have {short(before)}; give "names" '
            "in the layout"
        )


def _text(path: Path, bag: Bag, start: int, where: str) -> str:
    """A topic's last text by the start of an episode, or its first one after."""
    topic, name = _split(path, where)
    text = ""
    for message in bag.messages([topic]):
        if text and message.time > start:
            break
        with _reading(path, topic):
            found = field(message.decode(), name)
            text = found if isinstance(found, str) else ""
    return text


def _split(path: Path, where: str) -> tuple[str, str]:
    topic, colon, name = where.rpartition(":")
    if not colon or not name:
        raise DatasetError(
            path,
            f"'{where}'",
            "names no field; write TOPIC:FIELD, such as /joints:position.",
        )
    return topic, name


def _reading(path: Path, place: str) -> AbstractContextManager[None]:
    """Turns errors about a message into one that names file, topic and message."""
    sentence = "{reason}; correct the layout, or leave the recording out."
    return naming_damage(path, place, sentence, kept=(OSError, MemoryError))
