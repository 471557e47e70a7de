"""Layout of an import: which data of a recording become which columns and cameras, at what rate,
with what instruction.

It is a small JSON file, or the name of a known layout (data/lerobot/importing/known.py);
docs/importing.md explains every key.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from data.errors import DatasetError, short
from data.files.json_file import read_json
from data.lerobot.importing.known import KNOWN

Gaps = Literal["refuse", "cut"]
Clock = Literal["log", "header"]
TimeUnit = Literal["s", "ms", "us", "ns"]
Colour = Literal["rgb", "bgr"]


@dataclass(frozen=True)
class ColumnSource:
    """Numbers of a column: the `dims` (None: all) of the data at `path`, called `names`."""

    path: str
    dims: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CameraSource:
    """Images at `path`, with their channels stored as `colour`; `turned` if they are rotated by
    180°."""

    path: str
    colour: Colour = "rgb"
    turned: bool = False


@dataclass(frozen=True)
class TaskSource:
    """Instruction: `text`, or the text at `path`, or the words of the file's name that the pattern
    `file` captures."""

    text: str = ""
    path: str = ""
    file: str = ""


@dataclass(frozen=True)
class ImportLayout:
    """Description of the data to read from every recording.

    Attributes:
      columns, cameras: by the name in the dataset; a `*` in both names and paths stands for any
        name.
      episodes: HDF5: pattern of the groups that are one episode each; CSV: column that numbers the
        episodes.
      time: column of the frames' times, in `time_unit`; frames are then aligned to `fps`.
      silence: longest time without a message of a topic, in seconds.
      gaps: effect of a longer silence.
      clock: source of the topics' times: log or message headers.
    """

    name: str
    fps: int
    columns: Mapping[str, tuple[ColumnSource, ...]]
    cameras: Mapping[str, CameraSource]
    task: TaskSource
    robot: str | None = None
    episodes: str = ""
    time: str = ""
    time_unit: TimeUnit = "s"
    silence: float = 1.0
    gaps: Gaps = "refuse"
    clock: Clock = "log"

    @property
    def column_paths(self) -> list[str]:
        """Paths in a recording of the columns and, if there is one, the time."""
        paths = [source.path for sources in self.columns.values() for source in sources]
        return paths + [self.time] * bool(self.time)

    @property
    def camera_paths(self) -> list[str]:
        """Paths in a recording of the cameras' images."""
        return [camera.path for camera in self.cameras.values()]

    def resolved(self, names: Iterable[str], file: Path) -> "ImportLayout":
        """The same layout without patterns: each `*` is filled in from `names`.

        Raises:
          DatasetError: a path or pattern matches none of `names`.
        """
        names = sorted(names)
        columns: dict[str, tuple[ColumnSource, ...]] = {}
        for name, sources in sorted(self.columns.items(), key=_patterns_first):
            paths = _filled(name, [source.path for source in sources], names, file)
            for key, found in paths.items():
                pairs = zip(sources, found, strict=True)
                columns[key] = tuple(replace(source, path=path) for source, path in pairs)
        cameras: dict[str, CameraSource] = {}
        for name, camera in sorted(self.cameras.items(), key=_patterns_first):
            for key, (path,) in _filled(name, [camera.path], names, file).items():
                cameras[key] = replace(camera, path=path)
        return replace(self, columns=columns, cameras=cameras)


def read_layout(
    where: str, *, task: str = "", fps: int | None = None, robot: str = ""
) -> ImportLayout:
    """The layout with a known name or in a JSON file; other arguments replace its own values.

    Raises:
      ValueError, DatasetError: there is no such layout, or one of its keys is not understood; names
        the key.
    """
    said = _plain(where)
    said |= {"task": task} if task else {}
    said |= {"fps": fps} if fps is not None else {}
    said |= {"robot": robot} if robot else {}
    return _parsed(where, said)


def _plain(where: str) -> dict[str, Any]:
    if where in KNOWN:
        return dict(KNOWN[where])
    path = Path(where)
    if not path.is_file():
        raise ValueError(
            f"--layout is '{where}', neither a file nor one of {', '.join(KNOWN)}; "
            "docs/importing.md says how to write a file."
        )
    said = read_json(path, path, "correct it")
    if not isinstance(said, dict):
        raise DatasetError(path, "file", "is not a JSON object; docs/importing.md has an example.")
    like = said.pop("like", None)
    if like is None:
        return said
    if like not in KNOWN:
        raise DatasetError(path, "like", f"is {short(like)}; give one of {', '.join(KNOWN)}.")
    return dict(KNOWN[like]) | said


def _parsed(file: str, said: Mapping[str, Any]) -> ImportLayout:
    if unknown := sorted(said.keys() - _KEYS):
        raise DatasetError(
            file, unknown[0], f"is not a key of a layout; the keys are {sorted(_KEYS)}."
        )
    fps = said.get("fps")
    if type(fps) is not int or not 1 <= fps <= 1000:
        raise DatasetError(
            file,
            "fps",
            f"is {short(fps)}; give a whole number of frames per second, here or with --fps.",
        )
    columns = _mapping(file, "columns", said.get("columns"))
    cameras = _mapping(file, "cameras", said.get("cameras", {}))
    silence = said.get("silence", 1.0)
    if type(silence) not in (int, float) or not 0 < silence < float("inf"):
        raise DatasetError(file, "silence", f"is {short(silence)}; give seconds, such as 0.5.")
    return ImportLayout(
        name=file,
        fps=fps,
        columns={name: _columns(file, name, value) for name, value in columns.items()},
        cameras={name: _camera(file, name, value) for name, value in cameras.items()},
        task=_task(file, said.get("task", "")),
        robot=_text(file, "robot", said.get("robot", "")) or None,
        episodes=_text(file, "episodes", said.get("episodes", "")),
        time=_text(file, "time", said.get("time", "")),
        time_unit=_choice(file, "time_unit", said.get("time_unit", "s"), TimeUnit),
        silence=float(silence),
        gaps=_choice(file, "gaps", said.get("gaps", "refuse"), Gaps),
        clock=_choice(file, "clock", said.get("clock", "log"), Clock),
    )


_KEYS = {
    "fps", "robot", "task", "columns", "cameras", "episodes", "time", "time_unit", "silence",
    "gaps", "clock",
}  # fmt: skip


def _mapping(file: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or (key == "columns" and not value):
        raise DatasetError(
            file,
            key,
            f"is {short(value)}; give an object that maps names in the dataset to sources.",
        )
    return value


def _columns(file: str, name: str, value: Any) -> tuple[ColumnSource, ...]:
    given = value if isinstance(value, list) and value else [value]
    return tuple(_column(file, f"columns/{name}", one) for one in given)


def _column(file: str, key: str, value: Any) -> ColumnSource:
    said = _source(file, key, value, {"dims", "names"})
    dims, names = said.get("dims"), said.get("names")
    if dims is not None and not (
        isinstance(dims, list) and dims and all(type(d) is int and d >= 0 for d in dims)
    ):
        raise DatasetError(file, key, f"has dims {short(dims)}; give a list of numbers from 0.")
    if names is not None and not (
        isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    ):
        raise DatasetError(file, key, f"has names {short(names)}; give a list of texts.")
    return ColumnSource(
        said["from"],
        None if dims is None else tuple(dims),
        None if names is None else tuple(names),
    )


def _camera(file: str, name: str, value: Any) -> CameraSource:
    key = f"cameras/{name}"
    said = _source(file, key, value, {"colour", "turned"})
    turned = said.get("turned", False)
    if type(turned) is not bool:
        raise DatasetError(file, key, f"has turned {short(turned)}; give true or false.")
    colour = _choice(file, f"{key}/colour", said.get("colour", "rgb"), Colour)
    return CameraSource(said["from"], colour, turned)


def _task(file: str, value: Any) -> TaskSource:
    if isinstance(value, str):
        return TaskSource(text=value)
    if isinstance(value, dict) and list(value) == ["file"] and isinstance(value["file"], str):
        try:
            groups = re.compile(value["file"]).groups
        except re.error as error:
            raise DatasetError(
                file, "task/file", f"is not a regular expression ({error}); correct it."
            ) from None
        if groups != 1:
            raise DatasetError(
                file, "task/file", f"is a pattern with {groups} groups; give it exactly one."
            )
        return TaskSource(file=value["file"])
    return TaskSource(path=_source(file, "task", value, set())["from"])


def _source(file: str, key: str, value: Any, more: set[str]) -> dict[str, Any]:
    said = {"from": value} if isinstance(value, str) else value
    if (
        not isinstance(said, dict)
        or not isinstance(said.get("from"), str)
        or not said["from"]
        or said.keys() - more - {"from"}
    ):
        also = f" and optionally {', '.join(sorted(more))}" if more else ""
        raise DatasetError(
            file, key, f"is {short(value)}; give a path as text, or an object with 'from'{also}."
        )
    return said


def _text(file: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DatasetError(file, key, f"is {short(value)}; give a text.")
    return value


def _choice(file: str, key: str, value: Any, kind: Any) -> Any:
    if value not in get_args(kind):
        raise DatasetError(file, key, f"is {short(value)}; give {' or '.join(get_args(kind))}.")
    return value


def _filled(name: str, paths: list[str], names: list[str], file: Path) -> dict[str, list[str]]:
    """Names in the dataset and their paths, for a name and paths that may be patterns."""
    if "*" not in name:
        for path in paths:
            if path not in names and path.rpartition(":")[0] not in names:
                raise _missing(file, path, name, names)
        return {name: paths}
    found: dict[str, list[str]] = {}
    pattern = re.compile(re.escape(paths[0]).replace(r"\*", "([^/]+)", 1))
    for candidate in names:
        if match := pattern.fullmatch(candidate):
            found[name.replace("*", match[1])] = [p.replace("*", match[1]) for p in paths]
    if not found:
        raise _missing(file, paths[0], name, names)
    return found


def _patterns_first(item: tuple[str, Any]) -> bool:
    return "*" not in item[0]


def _missing(file: Path, path: str, name: str, names: list[str]) -> DatasetError:
    return DatasetError(
        file,
        f"'{path}'",
        f"is missing, but the layout takes '{name}' from it; there are {short(names)}. Correct the "
        "layout, or leave this file out.",
    )
