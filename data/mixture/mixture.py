"""Several datasets as one stream: which robot each shows, how it is read and how often it is drawn.

Users write a `Mixture` in JSON, TOML or Python; `resolve` finds mistakes in it from metadata alone,
before any frame is read. `data.mixture.mixed` opens it.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import short
from data.files.names import file_within, plain_name
from data.frames import ACTION, STATE, Frames, usual_columns
from data.mixture.relabelled import Transform, Wordings, read_wordings
from data.mixture.split import Episodes
from data.mixture.trust import Consent, remembered
from data.packing.curriculum import Weight, stages, wrong_weight
from models import Scaling
from models.config import from_json
from models.files.address import parse
from models.files.foreign_json import loads

_PREFIX = "observation.images."


@dataclass(frozen=True)
class RobotConfig:
    """Settings that all datasets of one robot share.

    `cameras`: the robot's own camera names, in the order that the model sees; the names of its
    first dataset if none are given. `relative`: for each action dim, the state dim that the model
    measures it from, -1 where it is used as is. `seconds`: the time that an action chunk covers, at
    any fps; if None, a step is a frame. `increments`: action dims that give a movement since the
    last frame; over longer or shorter steps they are summed instead of picked. `state_scaling` and
    `action_scaling`: the run's settings if None.
    """

    name: str
    cameras: tuple[str, ...] = ()
    relative: tuple[int, ...] = ()
    seconds: float | None = None
    increments: tuple[int, ...] = ()
    state_scaling: Scaling | None = None
    action_scaling: Scaling | None = None


@dataclass(frozen=True)
class DatasetConfig:
    """Settings to read one dataset, and its share of the draws (`weight`, relative to the other
    datasets: a number, or points of training step and weight, linear between them).

    `path`: a folder or URL. `embodiment`: the robot's name; if empty, the mixture's only robot, or
    else the dataset's own name. `cameras`: maps the robot's name for a camera to the dataset's;
    cameras that the dataset lacks are left out, and if None the names are the same. `state` and
    `actions`: columns, end to end. `prompts`: a JSON file with a list of paraphrases for each
    instruction; `prompt` replaces an empty instruction. `episodes`: ranges [first, last) of
    episodes to use; all if empty. `transform`: path/to/file.py:function from (state [n, s], actions
    [n, h, a]), in the dataset's units, to two such arrays; `transform_sha256`: SHA-256 of its file,
    which then runs with no other content. `fps`: frames per second, if the dataset (RLDS) does not
    give it. `subtasks`: column of a LeRobot dataset that gives its subtasks, as texts or as rows of
    meta/subtasks.parquet, if it is not LeRobot's own column. `every`: frames from one sample to the
    next, counted from each episode's first. `frames`: a JSON file of the frames to draw, as
    `tools.data idle` writes it; all if empty. `weights`: how often each sample is drawn, relative
    to the dataset's other samples: a column, or a JSON file of weights by episode
    (`data.mixture.sample_weights`); equally often if empty.
    """

    path: str
    embodiment: str = ""
    weight: Weight = 1.0
    cameras: dict[str, str] | None = None
    state: tuple[str, ...] = (STATE,)
    actions: tuple[str, ...] = (ACTION,)
    prompts: str = ""
    prompt: str = ""
    episodes: tuple[tuple[int, int], ...] = ()
    transform: str = ""
    transform_sha256: str = ""
    fps: float | None = None
    subtasks: str = ""
    every: int = 1
    frames: str = ""
    weights: str = ""


@dataclass(frozen=True)
class Mixture:
    """Datasets to train on; robots that need no settings need not be listed."""

    datasets: tuple[DatasetConfig, ...]
    embodiments: tuple[RobotConfig, ...] = field(default=())


def is_mixture(path: Path) -> bool:
    """True if this names a mixture's file, and not a dataset."""
    return path.suffix in (".json", ".toml")


def in_file(weights: str) -> bool:
    """True if weights of samples are in a file, and not in a column."""
    return weights.endswith(".json")


def read_mixture(data: str | Path, consent: Consent = remembered) -> Mixture:
    """The mixture in a .json or .toml file; its relative paths start at the file's folder. Anything
    else is the path or URL of a dataset, which becomes a mixture of one. No code that the mixture
    names runs.

    Args:
      consent: decides on the transforms that the file names; `data.mixture.trust.always` for a file
        of your own.

    Raises:
      FileNotFoundError: there is no such file, or no such transform.
      ValueError: it is not valid JSON or TOML, a field is wrong, or there is no consent to a
        transform; names the file and the field.
    """
    path = Path(data)
    if not is_mixture(path):
        return Mixture((DatasetConfig(str(data)),))
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a mixture or a dataset's folder.")
    try:
        value = (loads if path.suffix == ".json" else tomllib.loads)(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: is not valid {path.suffix[1:].upper()} ({error}); fix it."
        ) from None
    mixture = from_json(Mixture, value, str(path))

    def beside(name: str) -> str:
        return name if not name or parse(name).is_remote else str(path.parent / name)

    datasets = (
        replace(
            d,
            path=beside(d.path),
            prompts=beside(d.prompts),
            transform=beside(d.transform),
            frames=beside(d.frames),
            weights=beside(d.weights) if in_file(d.weights) else d.weights,
        )
        for d in mixture.datasets
    )
    agreed = (_agreed(path, d, consent) if d.transform else d for d in datasets)
    return replace(mixture, datasets=tuple(agreed))


def _agreed(path: Path, config: DatasetConfig, consent: Consent) -> DatasetConfig:
    """The config with the SHA-256 of the only content of its transform that may run."""
    found = Transform.find(config.transform)
    if config.transform_sha256 not in ("", found.content):
        raise ValueError(
            f"{path}: transform_sha256 of {found.file} is {config.transform_sha256}, but the file "
            f"has {found.content}; get the file that the mixture was made with."
        )
    if not consent(path, found):
        raise ValueError(
            f"{path}: names '{found.function}' of {found.file} as a transform, which is code that "
            "runs with your permissions; read it, then give --trust (in Python, consent=always of "
            "data.mixture.trust)."
        )
    return replace(config, transform_sha256=found.content)


class Known(NamedTuple):
    """Metadata of a dataset: `columns` by name with their sizes, the number of its `episodes`, and
    the wordings of each of its tasks."""

    name: str
    fps: float
    cameras: tuple[str, ...]
    columns: dict[str, int]
    episodes: int
    prompts: Wordings

    @classmethod
    def of(cls, frames: Frames) -> "Known":
        """Metadata of frames opened for training."""
        columns = {name: int(stats["mean"].size) for name, stats in frames.stats.items()}
        episodes = len(frames.lengths)
        return cls(frames.name, frames.fps, frames.cameras, columns, episodes, frames.prompts)


class Reading(NamedTuple):
    """Plan to read one dataset: everything in a `Feed` but its frames, and the changes to those
    frames. `step` is the number of frames that a step of a chunk takes, `increments` the dims of
    each column that are summed over them."""

    embodiment: int
    cameras: tuple[str | None, ...]
    ahead: tuple[int, ...]
    episodes: Episodes
    prompts: Wordings
    increments: dict[str, tuple[int, ...]]
    step: float
    transform: Transform | None


def resolve(
    mixture: Mixture, known: Sequence[Known], horizon: int, before: int = 0
) -> tuple[tuple[RobotConfig, ...], tuple[Reading, ...]]:
    """The robots, with their cameras, and how each dataset is read; reads no frames.

    Args:
      known: metadata of each dataset, in the mixture's order.
      horizon: steps of an action chunk.
      before: steps before the present one with which a chunk begins.

    Raises:
      ValueError: settings and datasets do not fit together; names the dataset and the field.
      FileNotFoundError: a file of prompts or of a transform is missing.
    """
    known = [
        dataset if config.fps is None else dataset._replace(fps=config.fps)
        for config, dataset in zip(mixture.datasets, known, strict=True)
    ]
    robots = _robots(mixture, known)
    numbers = {name: number for number, name in enumerate(robots)}
    readings = [
        _reading(config, dataset, robots[name], numbers[name], horizon, before)
        for config, dataset, name in zip(
            mixture.datasets, known, _names(mixture, known), strict=True
        )
    ]
    stages([config.weight for config in mixture.datasets])  # raises if all are 0 at a step
    return tuple(robots.values()), tuple(readings)


def _names(mixture: Mixture, known: Sequence[Known]) -> list[str]:
    """The robot of each dataset."""
    only = mixture.embodiments[0].name if len(mixture.embodiments) == 1 else ""
    return [
        config.embodiment or only or dataset.name
        for config, dataset in zip(mixture.datasets, known, strict=True)
    ]


def _robots(mixture: Mixture, known: Sequence[Known]) -> dict[str, RobotConfig]:
    """Every robot by name, with its cameras: first those listed, then others in the order of the
    datasets."""
    if not mixture.datasets:
        raise ValueError("The mixture has no datasets; list at least one.")
    names = _names(mixture, known)
    robots = {robot.name: robot for robot in mixture.embodiments}
    if not set(robots) <= set(names) or len(robots) < len(mixture.embodiments):
        raise ValueError(
            f"embodiments lists {[robot.name for robot in mixture.embodiments]}, but the datasets "
            f"show {sorted(set(names))}; list each of those at most once, and no others."
        )
    for config, dataset, name in zip(mixture.datasets, known, names, strict=True):
        robot = robots.get(name, RobotConfig(name))
        if not robot.cameras:
            cameras = dataset.cameras if config.cameras is None else tuple(config.cameras)
            robot = replace(robot, cameras=cameras)
        if robot.seconds is not None and not robot.seconds > 0:
            raise ValueError(f"embodiment '{name}': seconds is {robot.seconds}; give more than 0.")
        relative = [d for d, origin in enumerate(robot.relative) if origin >= 0]
        if set(relative) & set(robot.increments):
            raise ValueError(
                f"embodiment '{name}': action dims {list(robot.increments)} are increments, and "
                f"dims {relative} relative to the state; no dim can be both."
            )
        robots[name] = robot
    for name, robot in robots.items():
        _require_names(robot)
        rates = sorted({d.fps for d, own in zip(known, names, strict=True) if own == name})
        if robot.seconds is None and len(rates) > 1:
            raise ValueError(
                f"embodiment '{name}': its datasets have {', '.join(f'{r:g}' for r in rates)} fps, "
                "so a step of a chunk would mean different times; give the 'seconds' that a chunk "
                "covers, or two embodiments."
            )
    return robots


def _require_names(robot: RobotConfig) -> None:
    """Raises ValueError for unusable names. A dataset's name on the hub, and therefore its robot's,
    is organisation/name."""
    try:
        file_within(robot.name)
        for camera in robot.cameras:
            plain_name(camera)
    except ValueError as error:
        raise ValueError(
            f"embodiment {short(robot.name)}: {error}; rename the embodiment or the camera that "
            "has this name."
        ) from None


def _reading(
    config: DatasetConfig,
    known: Known,
    robot: RobotConfig,
    number: int,
    horizon: int,
    before: int,
) -> Reading:
    if remedy := wrong_weight(config.weight):
        raise ValueError(
            f"{config.path}: weight is {config.weight}; {remedy}, or leave the dataset out."
        )
    if config.every < 1:
        raise ValueError(
            f"{config.path}: every is {config.every}; give 1 to draw samples at every frame, 2 at "
            "every second frame, and so on."
        )
    absent = [name for name in (*config.state, *config.actions) if name not in known.columns]
    if absent or not config.state or not config.actions:
        state, actions = map(list, usual_columns(known.columns))
        such = f", such as state {state} and actions {actions}" if state and actions else ""
        raise ValueError(
            f"{config.path}: state is {list(config.state)} and actions {list(config.actions)}, "
            f"but its columns are {list(known.columns)}; name some of those in a mixture{such}."
        )
    if config.weights and not in_file(config.weights) and known.columns.get(config.weights) != 1:
        single = [name for name, size in known.columns.items() if size == 1]
        raise ValueError(
            f"{config.path}: weights is '{config.weights}', but its columns with one number per "
            f"frame are {single}; name one of those, or a .json file of weights."
        )
    step = 1.0 if robot.seconds is None else robot.seconds / horizon * known.fps
    increments = _by_column(config, known, robot)
    if before and increments and step != 1:
        raise ValueError(
            f"embodiment '{robot.name}' has increments and 'seconds', but the model's chunks begin "
            "before the present, where increments are not summed; leave out 'seconds'."
        )
    return Reading(
        embodiment=number,
        cameras=_cameras(config, known, robot),
        ahead=tuple(int(np.floor(k * step + 0.5)) for k in range(-before, horizon - before)),
        episodes=_chosen(config, known),
        prompts=read_wordings(config.prompts, config.prompt, known.prompts),
        increments=increments if step != 1 else {},
        step=step,
        transform=(
            Transform.read(config.transform, config.transform_sha256) if config.transform else None
        ),
    )


def _cameras(config: DatasetConfig, known: Known, robot: RobotConfig) -> tuple[str | None, ...]:
    """The dataset's name for each of the robot's cameras."""
    given = config.cameras
    if given is None:
        given = {name: name for name in robot.cameras if _full(name, known) is not None}
    found = {name: _full(own, known) for name, own in given.items()}
    wrong = sorted(set(given) - set(robot.cameras))
    wrong += [own for name, own in given.items() if found[name] is None]
    if wrong or not found:
        raise ValueError(
            f"{config.path}: cameras is {given}, where {wrong or 'all'} are unknown or missing; "
            f"map cameras of embodiment '{robot.name}' ({', '.join(robot.cameras)}) to cameras of "
            f"the dataset ({', '.join(known.cameras)})."
        )
    return tuple(found.get(name) for name in robot.cameras)


def _full(name: str, known: Known) -> str | None:
    """A camera by its full name or by the last part of it."""
    return next((full for full in (name, _PREFIX + name) if full in known.cameras), None)


def _by_column(
    config: DatasetConfig, known: Known, robot: RobotConfig
) -> dict[str, tuple[int, ...]]:
    """Increments by action column, numbered within the column."""
    sizes = [known.columns[name] for name in config.actions]
    if not all(0 <= d < sum(sizes) for d in robot.increments):
        raise ValueError(
            f"embodiment '{robot.name}': increments is {list(robot.increments)}, but {config.path} "
            f"has action dims 0 to {sum(sizes) - 1}."
        )
    first = 0
    found: dict[str, tuple[int, ...]] = {}
    for name, size in zip(config.actions, sizes, strict=True):
        own = tuple(d - first for d in robot.increments if first <= d < first + size)
        found |= {name: own} if own else {}
        first += size
    return found


def _chosen(config: DatasetConfig, known: Known) -> Episodes:
    kept = np.full(known.episodes, not config.episodes)
    for first, last in config.episodes:
        if not 0 <= first < last <= known.episodes:
            raise ValueError(
                f"{config.path}: episodes has the range [{first}, {last}]; there are episodes 0 to "
                f"{known.episodes - 1}, and a range does not include its end."
            )
        kept[first:last] = True
    return np.flatnonzero(kept)
