"""Finds what is wrong with a dataset before hours of training are spent on it.

Every large public dataset that others converted failed some check; here each finding names the file
and the field, errors stop training and warnings do not. Content is never trusted: whatever the
files hold, the answer is a list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data.columns import BOOKKEEPING
from data.errors import DatasetError
from data.frames import ACTION, STATE
from data.lerobot import Dataset
from data.split import alike
from data.video import VideoReader, count_packets

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One finding; `message` is a sentence that begins with the file and the field."""

    severity: Severity
    file: str
    field: str
    message: str


def validate(path: str | Path, progress: Callable[[str], None] | None = None) -> list[Problem]:
    """All problems of the dataset at `path`, errors first; an empty list if it is sound.

    Args:
      progress: called with what is checked next.
    """
    tell = progress or (lambda what: None)
    tell("metadata")
    try:
        dataset = Dataset(Path(path))
    except DatasetError as error:
        return [_problem(error)]
    problems: dict[Problem, None] = {}
    for what, check in _CHECKS.items():
        tell(what)
        try:
            problems |= dict.fromkeys(check(dataset))
        except DatasetError as error:
            problems[_problem(error)] = None
    for camera in dataset.cameras:
        tell(camera)
        problems |= dict.fromkeys(_camera(dataset, camera))
    return sorted(problems, key=lambda problem: problem.severity)


def require_valid(path: str | Path) -> list[Problem]:
    """The warnings about the dataset at `path`.

    Raises:
      ValueError: it has errors; the message is the first one's sentence and how many more there
        are.
    """
    problems = validate(path)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(errors[0].message + more)
    return problems


def _metadata(dataset: Dataset) -> Iterator[Problem]:
    info = dataset.root / "meta/info.json"
    for field, value in (
        ("total_episodes", dataset.num_episodes),
        ("total_frames", dataset.num_frames),
    ):
        if dataset.info.get(field) != value:
            yield _found(
                info, field, f"is {dataset.info.get(field)!r}, but meta/episodes lists {value}; "
                "the dataset is incomplete or the number wrong, copy the dataset again.",
            )  # fmt: skip
    if not np.array_equal(dataset.episode_numbers, np.arange(dataset.num_episodes)):
        yield _found(
            dataset.root / "meta/episodes", "column 'episode_index'",
            f"is not 0 to {dataset.num_episodes - 1} without gaps; renumber the episodes.",
        )  # fmt: skip
    empty = np.flatnonzero(dataset.lengths < 1)
    if len(empty):
        yield _found(
            dataset.root / "meta/episodes", "column 'length'",
            f"is {dataset.lengths[empty[0]]} for episode {empty[0]}; leave empty episodes out.",
        )  # fmt: skip
    for name in (STATE, ACTION):
        if name not in dataset.column_names:
            yield _found(
                info, f"feature '{name}'", "is missing; rename the robot's own accordingly."
            )
    if not dataset.cameras:
        yield _found(info, "features", "hold no camera (dtype video or image); a policy needs one.")


def _counting(dataset: Dataset) -> Iterator[Problem]:
    """Frames are numbered without gaps and their times are those numbers over fps."""
    frame = np.concatenate([np.arange(n) for n in dataset.lengths])
    for name, expected in (("frame_index", frame), ("index", np.arange(dataset.num_frames))):
        actual = dataset.column(name)
        if not np.array_equal(actual, expected):
            at = int(np.argmax(actual != expected))
            yield _found(
                dataset.data_file(at), f"column '{name}'",
                f"is {actual[at]} where {expected[at]} should follow (frame {at} of the dataset); "
                "rows are missing or doubled, record or convert it again.",
            )  # fmt: skip
    time, half = dataset.column("timestamp"), 0.5 / dataset.fps
    wrong = ~(np.abs(time - frame / dataset.fps) < half)
    if wrong.any():
        at = int(np.argmax(wrong))
        yield _found(
            dataset.data_file(at), "column 'timestamp'",
            f"is {time[at]:g} s at frame {frame[at]} of an episode, expected "
            f"{frame[at] / dataset.fps:g} s at {dataset.fps} fps; correct fps or resample.",
        )  # fmt: skip


def _values(dataset: Dataset) -> Iterator[Problem]:
    """Columns have the declared type; states and actions are finite and move."""
    for name in dataset.column_names:
        try:
            values = dataset.column(name)
        except DatasetError as error:
            yield _problem(error)
            continue
        if name in BOOKKEEPING or values.dtype.kind != "f":
            continue
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            at = int(np.argmax(bad))
            episode, step = dataset.locate(at)
            yield _found(
                dataset.data_file(at), f"column '{name}'",
                f"is not finite (NaN or infinite) at step {step} of episode {episode} and in "
                f"{bad.sum()} frames in all; repair or remove those episodes.",
                "error" if name in (STATE, ACTION) else "warning",
            )  # fmt: skip
        elif name in (STATE, ACTION):
            flat = values.reshape(len(values), -1)
            still = np.flatnonzero(flat.min(axis=0) == flat.max(axis=0))
            if len(still):
                yield _found(
                    dataset.data_file(0), f"column '{name}'",
                    f"never changes in dimension {', '.join(map(str, still))}; "
                    "nothing can be learnt of it.", "warning",
                )  # fmt: skip


def _tasks(dataset: Dataset) -> Iterator[Problem]:
    table = dataset.root / "meta/tasks.parquet"
    of_frame = dataset.column("task_index")
    for index in np.unique(of_frame).tolist():
        text = dataset.tasks.get(index)
        if not isinstance(text, str) or not text.strip():
            episode, _ = dataset.locate(int(np.argmax(of_frame == index)))
            yield _found(
                table, f"task_index {index}",
                f"has no text, but episode {episode} is of this task; add the instruction.",
            )  # fmt: skip
    ends = np.cumsum(dataset.lengths)
    inside = np.setdiff1d(np.flatnonzero(np.diff(of_frame)) + 1, ends)
    if len(inside):
        episode, step = dataset.locate(int(inside[0]))
        yield _found(
            dataset.data_file(int(inside[0])), "column 'task_index'",
            f"changes at step {step} of episode {episode} ({len(inside)} such changes in all); "
            "each episode is trained with the instruction of its first frame.", "warning",
        )  # fmt: skip


def _doubles(dataset: Dataset) -> Iterator[Problem]:
    values = [dataset.column(name) for name in (STATE, ACTION) if name in dataset.column_names]
    first = alike(np.cumsum(dataset.lengths) - dataset.lengths, dataset.lengths, *values)
    doubled = np.flatnonzero(first != np.arange(dataset.num_episodes))
    if len(doubled) and values:
        yield _found(
            dataset.data_files[0], "columns of state and action",
            f"are the same in episodes {first[doubled[0]]} and {doubled[0]} ({len(doubled)} "
            "doubled episodes in all); they count twice, hold out both or none.", "warning",
        )  # fmt: skip


def _camera(dataset: Dataset, camera: str) -> Iterator[Problem]:
    """Each file of a camera holds the frames that the metadata promises, and its last one
    decodes."""
    try:
        if dataset.features[camera]["dtype"] == "image":
            dataset.frames(dataset.num_episodes - 1, camera)
            return
        ends: dict[Path, float] = {}
        for episode, length in enumerate(dataset.lengths):
            path, start = dataset.video(episode, camera)
            ends[path] = max(ends.get(path, 0.0), start + length / dataset.fps)
    except DatasetError as error:
        yield _problem(error)
        return
    for path, end in ends.items():
        try:
            yield from _video(path, end, dataset.fps, dataset.features[camera]["shape"])
        except DatasetError as error:
            yield _problem(error)


def _video(path: Path, end: float, fps: float, shape: list[int]) -> Iterator[Problem]:
    needed = round(end * fps)
    with VideoReader(path) as reader:
        present = count_packets(path)
        if present < needed:
            yield _found(
                path, "frames",
                f"holds {present} frames of the {needed} that meta/episodes asks for "
                f"(its index lists {reader.frames}); it was cut off, copy or encode it again.",
            )  # fmt: skip
            return
        height, width = reader.read(end - 1 / fps, 1, fps).shape[1:3]
    if not {height, width} <= set(shape):
        yield _found(
            path, "frame size",
            f"is {height}x{width}, but meta/info.json declares {shape}; correct the shape.",
        )  # fmt: skip


def _found(file: Path | str, field: str, sentence: str, severity: Severity = "error") -> Problem:
    return Problem(severity, str(file), field, str(DatasetError(file, field, sentence)))


def _problem(error: DatasetError) -> Problem:
    return _found(error.file, error.field, error.sentence)


_CHECKS: dict[str, Callable[[Dataset], Iterator[Problem]]] = {
    "metadata": _metadata,
    "types and values": _values,
    "numbering and times": _counting,
    "tasks": _tasks,
    "doubled episodes": _doubles,
}
