"""Layout of an import: which data of a recording become which columns and cameras, at what rate,
with what instruction.

It is a small JSON file, or the name of a known layout (data/lerobot/importing/known.py);
docs/importing.md explains every key.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data.errors import DatasetError, short
from data.files.json_file import read_json
from data.lerobot.importing.known import KNOWN
from models.config import from_json

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

    def __post_init__(self) -> None:
        _check_path(self.path)
        if self.dims is not None and (not self.dims or min(self.dims) < 0):
            raise ValueError(f"dims is {list(self.dims)}; give a list of numbers from 0.")


@dataclass(frozen=True)
class CameraSource:
    """Images at `path`, with their channels stored as `colour`; `turned` if they are rotated by
    180°."""

    path: str
    colour: Colour = "rgb"
    turned: bool = False

    def __post_init__(self) -> None:
        _check_path(self.path)


@dataclass(frozen=True)
class TaskSource:
    """Instruction: `text`, or the text at `path`, or the words of the file's name that the pattern
    `file` captures."""

    text: str = ""
    path: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.file).groups if self.file else 1
        except re.error as error:
            raise ValueError(f"file is not a regular expression ({error}); correct it.") from None
        if groups != 1:
            raise ValueError(f"file is a pattern with {groups} groups; give it exactly one.")


@dataclass(frozen=True)
class ImportLayout:
    """Description of the data to read from every recording.

    Attributes:
      columns, cameras: by the name in the dataset; a `*` in both names and paths stands for any
        name, and a `#` in the paths of a column for 0, 1, … (a robot's arms, side by side).
      episodes: HDF5: pattern of the groups that are one episode each; CSV: column that numbers the
        episodes.
      only: HDF5: episodes to read: those that the array at this path lists, such as "mask/train",
        or, as "@success", those whose attribute of this name is true; all if empty.
      time: column of the frames' times, in `time_unit`; frames are then aligned to `fps`.
      silence: longest time without a message of a topic, in seconds.
      gaps: effect of a longer silence.
      clock: source of the topics' times: log or message headers.
    """

    columns: dict[str, tuple[ColumnSource, ...]]
    cameras: dict[str, CameraSource]
    task: TaskSource
    fps: int = 0
    robot: str = ""
    episodes: str = ""
    only: str = ""
    time: str = ""
    time_unit: TimeUnit = "s"
    silence: float = 1.0
    gaps: Gaps = "refuse"
    clock: Clock = "log"

    def __post_init__(self) -> None:
        if not 1 <= self.fps <= 1000:
            raise ValueError(
                f"fps is {self.fps}; give 1 to 1000 frames per second, here or with --fps."
            )
        if self.silence <= 0:
            raise ValueError(f"silence is {self.silence:g}; give seconds, such as 0.5.")

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
            every = _numbered(sources, names)
            paths = _filled(name, [source.path for source in every], names, file)
            for key, found in paths.items():
                pairs = zip(every, found, strict=True)
                columns[key] = tuple(replace(source, path=path) for source, path in pairs)
        cameras: dict[str, CameraSource] = {}
        for name, camera in sorted(self.cameras.items(), key=_patterns_first):
            for key, (path,) in _filled(name, [camera.path], names, file).items():
                cameras[key] = replace(camera, path=path)
        return replace(self, columns=columns, cameras=cameras)

    def unused(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names of what a layout without patterns takes nothing from."""
        paths = [*self.column_paths, *self.camera_paths, self.task.path, self.episodes]
        used = {*paths, *(path.rpartition(":")[0] for path in paths)}
        return tuple(sorted(name for name in names if name not in used))


def read_layout(
    where: str, *, task: str = "", fps: int | None = None, robot: str = "", only: str = ""
) -> ImportLayout:
    """The layout with a known name or in a JSON file; other arguments replace its own values.

    Raises:
      ValueError: there is no such layout, or one of its keys is not understood; names the key.
    """
    said = _plain(where)
    said |= {"task": task} if task else {}
    said |= {"fps": fps} if fps is not None else {}
    said |= {"robot": robot} if robot else {}
    said |= {"only": only} if only else {}
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
    columns, cameras, task = (said.get(key, {}) for key in ("columns", "cameras", "task"))
    if columns in ({}, []) or (isinstance(columns, dict) and [] in columns.values()):
        raise ValueError(f"{file}: layout.columns is {short(columns)}; give what each comes from.")
    if isinstance(columns, dict):
        columns = {name: _several(value) for name, value in columns.items()}
    if isinstance(cameras, dict):
        cameras = {name: _source(value) for name, value in cameras.items()}
    task = {"text": task} if isinstance(task, str) else _source(task)
    full = {**said, "columns": columns, "cameras": cameras, "task": task}
    try:
        return from_json(ImportLayout, full, f"{file}: layout")
    except ValueError as error:
        raise ValueError(f"{error} docs/importing.md explains every key.") from error


def _several(value: Any) -> list[Any]:
    return [_source(each) for each in (value if isinstance(value, list) else [value])]


def _source(value: Any) -> dict[str, Any]:
    """A source in full, for which its path alone may stand; `from` is its path."""
    said = value if isinstance(value, dict) else {"from": value}
    return {"path" if key == "from" else key: each for key, each in said.items()}


def _numbered(sources: tuple[ColumnSource, ...], names: list[str]) -> tuple[ColumnSource, ...]:
    """The sources once for each number that a `#` stands for in the first that has one; names that
    have a `#` themselves stay as they are."""
    first = next((s.path for s in sources if "#" in s.path and s.path not in names), None)
    if first is None:
        return sources
    pattern = re.compile(re.escape(first).replace(r"\#", r"(\d+)", 1))
    found = sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))}) or [0]
    return tuple(
        s if s.path in names else replace(s, path=s.path.replace("#", str(k)))
        for k in found
        for s in sources
    )


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


def _check_path(path: str) -> None:
    if not path:
        raise ValueError("from is empty; give a path in the recording.")


def _patterns_first(item: tuple[str, Any]) -> bool:
    return "*" not in item[0]


def _missing(file: Path, path: str, name: str, names: list[str]) -> DatasetError:
    return DatasetError(
        file,
        f"'{path}'",
        f"is missing, but the layout takes '{name}' from it; there are {short(names)}. Correct the "
        "layout, or leave this file out.",
    )
