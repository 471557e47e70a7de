"""The interface through which the rest of the project uses a dataset, and the table of formats that
provide it.

Statistics, conversion, validation and viewing need only a `Dataset`; training reads what conversion
makes of it. A `Format` says how a folder is recognised, opened and checked; a user's file can add
one (docs/own_dataset.md).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int64, Shaped, UInt8

from data.errors import MissingFileError, Problem, short
from data.files.folder import Folder, open_folder
from data.files.names import LONGEST_NAME
from models.files import html, own_file
from models.files.terminal import counted

Prompts = tuple[tuple[str, ...], ...]
"""The wordings of each task, at least one."""
Report = Callable[[str, int, int], None]
"""Called with a name for the current work, the number of frames done and the number of frames in
total."""


class Runs(NamedTuple):
    """Runs of frames of one episode with one task, in order; `first` counts from the episode's
    start.

    Most episodes are a single run; `task` indexes `Dataset.prompts`.
    """

    episode: Int64[np.ndarray, " r"]
    first: Int64[np.ndarray, " r"]
    length: Int64[np.ndarray, " r"]
    task: Int64[np.ndarray, " r"]


class Subtasks(NamedTuple):
    """Steps into which tasks are divided: runs of frames with one subtask, end to end through all
    episodes. `runs.task` indexes `texts`; -1 where the frames have no subtask."""

    runs: Runs
    texts: tuple[str, ...]


def subtasks_of(frames: Any) -> Subtasks | None:
    """Subtasks of a Dataset or of Frames; None if `has_subtasks` is False or missing.

    Raises:
      DatasetError: a frame's subtask has no text.
    """
    return frames.subtasks if getattr(frames, "has_subtasks", False) else None


class Dataset(Protocol):
    """Episodes 0..e-1 of frames at a constant rate, with columns of values and camera images.

    For one thread at a time. It can be pickled, so that other threads and processes open their own.
    Attributes that require reading data may be computed on first access.

    It may also have `subtasks`, and a bool `has_subtasks` that is known without reading data.
    """

    @property
    def root(self) -> Path | str:
        """Path or URL it was opened with, for messages."""
        ...

    @property
    def name(self) -> str:
        """A plain name, or organisation/name."""
        ...

    @property
    def robot_type(self) -> str | None:
        """The robot in the dataset; datasets of one robot are scaled in the same way. None if
        unknown."""
        ...

    @property
    def fps(self) -> float:
        """Frames a second, the same in all episodes."""
        ...

    @property
    def cameras(self) -> tuple[str, ...]:
        """Full names, as in "observation.images.front"."""
        ...

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns of values, in the robot's units: "observation.state" and "action",
        unless a mixture names others. LeRobot's bookkeeping (`timestamp`, `frame_index`, …,
        data/columns.py) may be among them."""
        ...

    @property
    def features(self) -> Mapping[str, Mapping[str, Any]]:
        """Features by name. For a column: "dtype" (a numpy type's name, or "string"), "shape" of
        one frame's value ([1] for a scalar) and, if its dimensions have names, "names". For a
        camera: "dtype" ("image" or "video") and "shape" ([height, width, 3])."""
        ...

    @property
    def lengths(self) -> Int64[np.ndarray, " e"]:
        """Frames of each episode."""
        ...

    @property
    def present(self) -> Bool[np.ndarray, "e c"]:
        """True where an episode has images of a camera of `cameras`."""
        ...

    @property
    def runs(self) -> Runs:
        """Runs of frames with one task, end to end through all episodes."""
        ...

    @property
    def prompts(self) -> Prompts:
        """The wordings of each task that `runs` names."""
        ...

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of all content; data derived from a dataset is stored under it."""
        ...

    def stream(
        self, names: Sequence[str], episodes: Sequence[int] | None = None
    ) -> Iterator[Mapping[str, np.ndarray]]:
        """Columns by name, each [n, *shape] (scalars also [n]) of its dtype. Yields some whole
        episodes at a time, of all episodes or of the given ones, in their order.

        Raises:
          DatasetError: a file is missing or damaged, or a column has another type than declared.
        """
        ...

    def frames(self, i: int, camera: str) -> UInt8[np.ndarray, "t h w 3"]:
        """RGB images of episode i from `camera`.

        Raises:
          DatasetError: images are missing or damaged; names the file.
        """
        ...

    def file(self, i: int) -> Path | str:
        """Path or URL of the file that holds episode i's columns, for messages."""
        ...


def picture_shape(feature: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of a camera's images, whose shape may begin or end with the channels; None
    if the feature does not say."""
    about = feature.get("info") or feature.get("video_info") or {}
    height, width = about.get("video.height"), about.get("video.width")
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    shape, names = feature["shape"], flat_names(feature.get("names"))
    if len(shape) != 3:
        return None
    if names and names[0].startswith("c"):
        return shape[1], shape[2]
    if not names and shape[0] in (1, 3) and shape[2] not in (1, 3):
        return shape[1], shape[2]
    return shape[0], shape[1]


def depth_cameras(dataset: Dataset) -> tuple[str, ...]:
    """Cameras whose images have depth, not colour; they are not among the dataset's `cameras`. A
    format need not tell them."""
    found: tuple[str, ...] = getattr(dataset, "depth_cameras", ())
    return found


def dimension_names(names: object, size: int) -> list[str]:
    """Names of a feature's dimensions as `flat_names` reads them; if there are more or fewer, those
    of the first list of a dict that has as many, or else their numbers."""
    found = flat_names(names)
    if len(found) != size and isinstance(names, Mapping):
        found = next((x for x in map(flat_names, names.values()) if len(x) == size), found)
    return found if len(found) == size else [str(dim) for dim in range(size)]


def flat_names(names: object) -> list[str]:
    """Names that datasets give as a list, a list of lists (Unitree), a dict of lists ({"motors":
    […]}), a dict of places ({"x": 0}) or not at all. A name that occurs in several lists of a dict
    has the list's name before it; one that is no text, or very long, is shortened."""
    if isinstance(names, Mapping):
        if all(isinstance(place, int) for place in names.values()):
            return flat_names(sorted(names, key=lambda name: int(names[name])))
        parts = {str(head): flat_names(part) for head, part in names.items()}
        counts = Counter(name for part in parts.values() for name in part)
        return [
            name if counts[name] == 1 else f"{head} {name}"
            for head, part in parts.items()
            for name in part
        ]
    if not isinstance(names, list | tuple):
        return []
    return [
        name
        for one in names
        for name in (
            flat_names(one)
            if isinstance(one, Mapping | list | tuple)
            else [one if isinstance(one, str) and len(one) <= LONGEST_NAME else short(one)]
        )
    ]


def cut_into_episodes(
    lengths: Int64[np.ndarray, " e"], blocks: Iterable[Shaped[np.ndarray, " _n *shape"]]
) -> Iterator[Shaped[np.ndarray, " _t *shape"]]:
    """Each episode's part of blocks of whole episodes."""
    waiting: Iterator[int] = iter(lengths.tolist())
    for block in blocks:
        at = 0
        while at < len(block):
            if (length := next(waiting, None)) is None:
                raise ValueError("blocks hold more rows than the dataset's episodes have")
            yield block[at : at + length]
            at += length


def first_prompts(dataset: Dataset) -> Counter[str]:
    """Number of episodes by the prompt of their first frame."""
    runs = dataset.runs
    begin = np.flatnonzero(np.diff(runs.episode, prepend=-1))
    return Counter(dataset.prompts[task][0] for task in runs.task[begin].tolist())


def card(dataset: Dataset, tasks: Iterable[str] = ()) -> str:
    """HTML view of a dataset for notebooks, from its metadata; no data is read for it."""
    from data.columns import BOOKKEEPING  # which needs pyarrow

    lengths = dataset.lengths
    facts = {
        "episodes": f"{len(lengths):,}, {lengths.sum():,} frames at {dataset.fps:g} per second",
        "robot": dataset.robot_type or "unknown",
    }
    shown = [
        (
            *(name, told["dtype"], " × ".join(map(str, told["shape"]))),
            ", ".join(flat_names(told.get("names"))),
        )
        for name, told in dataset.features.items()
        if name in dataset.cameras or (name in dataset.column_names and name not in BOOKKEEPING)
    ]
    heads = ("column or camera", "dtype", "shape", "names")
    pieces = [html.table(heads, shown)]
    if told := [(task,) for task in tasks]:
        pieces.append(html.table(("task",), told))
    return html.card(f"{type(dataset).__name__} {dataset.name}", facts, *pieces)


class LoadedEpisode(dict[str, Any]):
    """A whole episode, by name: columns [T, *shape], frames uint8 [T, H, W, 3] and "task"; a
    notebook shows some of its frames."""

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"no {name!r}; the episode has {', '.join(map(repr, self))}")

    def __repr__(self) -> str:
        shown = [
            (name, f"{x.dtype} {list(x.shape)}" if isinstance(x, np.ndarray) else repr(x))
            for name, x in self.items()
        ]
        return _listing("Episode", shown)

    def _repr_html_(self) -> str:
        from data.columns import BOOKKEEPING

        arrays = {name: x for name, x in self.items() if isinstance(x, np.ndarray)}
        cameras = {n: x for n, x in arrays.items() if x.ndim == 4 and x.dtype == np.uint8}
        columns = [
            (name, x.dtype, " × ".join(map(str, x.shape)))
            for name, x in arrays.items()
            if name not in BOOKKEEPING
        ]
        return html.card(
            "Episode",
            {"task": self.get("task", "")},
            html.table(("name", "dtype", "shape"), columns),
            *(html.strip(frames, camera) for camera, frames in cameras.items()),
        )


class EpisodeAccess:
    """Access of notebooks and scripts to a dataset's episodes: `len(dataset)`, `dataset[3]` (from
    the end: `dataset[-1]`), and a view of it as text and as HTML."""

    def episode(self: Any, i: int) -> LoadedEpisode:
        """All of episode i: its columns, every camera's frames uint8 [T, H, W, 3] and "task".

        Raises:
          IndexError: there is no such episode.
          DatasetError: it cannot be read.
        """
        i = self._numbered(i)
        columns = self.columns(i)
        seen = [c for c, there in zip(self.cameras, self.present[i], strict=True) if there]
        frames = {camera: self.frames(i, camera) for camera in seen}
        return LoadedEpisode(columns, **frames, task=self.task(i))

    def __len__(self: Any) -> int:
        return len(self.lengths)

    def __getitem__(self: Any, i: int) -> LoadedEpisode:
        i = self._numbered(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.root}: no episode {i}; there are {len(self)}.")
        episode: LoadedEpisode = self.episode(i % len(self))
        return episode

    def _numbered(self: Any, i: object) -> int:
        if not isinstance(i, int | np.integer):
            raise TypeError(
                f"{self.root}: dataset[{short(i)}] names no episode; give its number, of 0 to "
                f"{len(self) - 1}, and then a column or camera, as in dataset[0]['action']."
            )
        return int(i)

    def __repr__(self: Any) -> str:
        from data.columns import BOOKKEEPING  # which needs pyarrow

        head = (
            f"{type(self).__name__} {self.name}: {counted(len(self), 'episode')}, "
            f"{counted(int(self.lengths.sum()), 'frame')} at {self.fps:g} fps, "
            f"robot {self.robot_type or 'unknown'}"
        )
        shown = [
            (name, f"{told['dtype']} {list(told['shape'])}")
            for name, told in self.features.items()
            if name in self.cameras or (name in self.column_names and name not in BOOKKEEPING)
        ]
        return _listing(head, shown)

    def _repr_html_(self: Any) -> str:
        return card(self)


_SHOWN, _WIDE = 16, 100
"""Most lines of a text view, and the width of one."""


def _listing(head: str, rows: Sequence[tuple[str, str]]) -> str:
    """A text view that fits a screen."""
    wide = max((len(name) for name, _ in rows), default=0)
    lines = [head, *(f"  {name:{wide}}  {told}" for name, told in rows[:_SHOWN])]
    more = [f"  … and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "\n".join(x if len(x) <= _WIDE else f"{x[: _WIDE - 1]}…" for x in [*lines, *more])


def frames_at(
    dataset: Dataset, i: int, camera: str, at: Int64[np.ndarray, " n"]
) -> UInt8[np.ndarray, "n h w 3"]:
    """Frames `at` of episode i from `camera`. A dataset with its own `frames_at`, such as
    LeRobot's, need not decode the whole episode; for any other, the whole episode is read.

    Raises:
      IndexError: the episode has no such frame.
      DatasetError: as `Dataset.frames`.
    """
    read = getattr(dataset, "frames_at", None)
    return dataset.frames(i, camera)[at] if read is None else read(i, camera, at)


@dataclass(frozen=True)
class Format:
    """One kind of dataset: how a folder is recognised by its files, opened and checked.

    Opening reads only metadata. `select` opens a subset of the episodes; None if the format cannot.
    `validate` yields all problems of an opened dataset of which these columns are trained on (if
    none, those of its usual names); None for the problems that a dataset of any format can have
    (data/validation/check_dataset.py).
    """

    name: str
    recognises: Callable[[Folder], bool]
    open: Callable[[str | Path], Dataset]
    select: Callable[[str | Path, Sequence[int]], Dataset] | None = None
    validate: Callable[[Any, Report, Sequence[str]], Iterable[Problem]] | None = None


_SHIPPED = (("data.lerobot.format", "LEROBOT"), ("data.rlds.format", "RLDS"))
"""Module and name of each `Format`; a folder that no format recognises is opened as the first."""

_own: dict[str, Format] = {}


def register(own: Format) -> None:
    """Adds a format to the table of this process, before all others, and replaces one registered
    under the same name."""
    _own.pop(own.name, None)
    _own[own.name] = own


def use_format(where: str) -> None:
    """Registers the `Format` at path/to/file.py:NAME. This runs the file's Python code.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it has no `Format` of that name.
    """
    register(own_file.load(where, Format, "format"))


def formats() -> tuple[Format, ...]:
    """All formats, in the order in which they are tried: the last registered first."""
    shipped = (getattr(import_module(module), name) for module, name in _SHIPPED)
    return (*reversed(_own.values()), *shipped)


def find_format(path: str | Path) -> Format:
    """The format of the dataset at `path`.

    Raises:
      MissingFileError: no format recognises it, and formats besides the shipped ones are
        registered.
    """
    folder, known = open_folder(path), formats()
    for kind in known:
        if kind.recognises(folder):
            return kind
    if _own:
        raise MissingFileError(
            folder.url,
            "files",
            f"match none of the known formats ({', '.join(kind.name for kind in known)}); give the "
            "folder of a dataset, or correct `recognises` of your format.",
        )
    return known[0]


def open_dataset(path: str | Path, episodes: Sequence[int] | None = None) -> Dataset:
    """Opens a LeRobot dataset (v2.0, v2.1, v3.0), an RLDS one (a TFDS directory, or the folder of
    its versions) or one of a registered format. No data is read yet.

    Args:
      path: its folder, `hf://org/name[@revision][/folder]`, or a URL that fsspec knows.
      episodes: LeRobot only: the `episode_index` of each episode to keep; files of other episodes
        stay untouched.

    Returns:
      The format's own class, which may offer more than a `Dataset`
      (data.lerobot.dataset.LeRobotDataset).

    Raises:
      MissingFileError: there is no dataset, or a file of it is missing.
      DatasetError: an unknown version, or broken metadata; names the file and field.
      ValueError: the dataset does not have a requested episode, or its format cannot open a subset
        of the episodes.
    """
    kind = find_format(path)
    if episodes is None:
        return open_as(kind, path)
    if kind.select is None:
        raise ValueError(
            f"{path}: has format {kind.name}, which cannot select single episodes; leave "
            "`episodes` out."
        )
    return kind.select(path, episodes)


def open_as(kind: Format, path: str | Path) -> Dataset:
    """Opens a dataset of a known format.

    Raises:
      MissingFileError, DatasetError: as `open_dataset`.
      ValueError: the opened object lacks an attribute of `Dataset`.
    """
    dataset = kind.open(path)
    given = (*vars(dataset), *dir(type(dataset)))
    lacking = [name for name in vars(Dataset) if name[0] != "_" and name not in given]
    if lacking:
        raise ValueError(
            f"{path}: format {kind.name} opens a {type(dataset).__name__}, which lacks "
            f"{', '.join(lacking)}; see data/dataset.py for what a Dataset needs."
        )
    return dataset
