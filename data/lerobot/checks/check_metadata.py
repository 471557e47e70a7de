"""Checks a LeRobot dataset's meta/ for the faults of real files.

Wrong locations, ranges and statistics are warnings: rows are found by their own `episode_index` and
statistics are computed from the rows, so such datasets are read correctly here. Other readers trust
the metadata.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from data.columns import BOOKKEEPING, open_parquet, read_columns, to_numpy
from data.errors import DatasetError, Problem, error, short, warning
from data.files.folder import Folder
from data.files.json_file import read_json
from data.frames import ACTION, STATE, usual_columns
from data.lerobot.dataset import LeRobotDataset
from data.lerobot.metadata import file_name, robot_type
from data.lerobot.subtasks import FILE, INDEX
from data.statistics.stats import QUANTILES, Stats, numeric_columns
from models.files.terminal import counted

_STATISTICS = "meta/stats.json"
_LISTING = "meta/episodes"
_PLACE = ("data/chunk_index", "data/file_index")
_RANGE = ("dataset_from_index", "dataset_to_index")
_MOMENTS = ("min", "max", "mean", "std")
_TOLERANCE, _QUANTILE_TOLERANCE = 1e-2, 5e-2


def check_info(dataset: LeRobotDataset, columns: Sequence[str] = ()) -> Iterator[Problem]:
    """Checks the numbers of episodes and frames, and that there is something to learn from:
    `columns`, or columns of the usual names."""
    info, listing = (dataset.path(name) for name in ("meta/info.json", dataset.metadata.listing))
    for field, value in (
        ("total_episodes", dataset.num_episodes),
        ("total_frames", dataset.num_frames),
    ):
        if dataset.info.get(field) != value:
            yield error(
                info, field, f"is {short(dataset.info.get(field))}, but {listing} lists {value}; "
                "the dataset is incomplete or the number is wrong; copy the dataset again.",
            )  # fmt: skip
    if not np.array_equal(dataset.episode_numbers, np.arange(dataset.num_episodes)):
        yield error(
            listing, "column 'episode_index'",
            f"is not 0 to {dataset.num_episodes - 1} without gaps; renumber the episodes.",
        )  # fmt: skip
    if dataset.info.get("robot_type") and robot_type(dataset.info) is None:
        yield warning(
            info, "robot_type",
            f"is {short(dataset.info['robot_type'])}, expected a name; the robot is treated as "
            "unknown, so write its name there.",
        )  # fmt: skip
    empty = np.flatnonzero(dataset.lengths < 1)
    if len(empty):
        yield error(
            listing, "column 'length'",
            f"is {dataset.lengths[empty[0]]} for episode {empty[0]}; leave empty episodes out.",
        )  # fmt: skip
    numeric = [n for n in numeric_columns(dataset) if n not in BOOKKEEPING and n[:5] != "next."]
    usual = usual_columns(numeric)
    others = [name for name in numeric if name not in (*usual[0], *usual[1])]
    for name, known in () if columns else zip((STATE, ACTION), usual, strict=True):
        if not known and others:
            yield warning(
                info, f"feature '{name}'",
                f"is missing; to train, name the columns that hold it in a mixture, out of "
                f"{', '.join(others)}.",
            )  # fmt: skip
        elif not known:
            yield error(
                info, f"feature '{name}'", "is missing; give the dataset's own column this name."
            )
    if not dataset.cameras:
        yield error(info, "features", "hold no camera (dtype video or image); a policy needs one.")


def check_frame_numbers(dataset: LeRobotDataset) -> Iterator[Problem]:
    """Warns if the rows have no frame numbers."""
    if dataset.counts_frames:
        yield warning(
            dataset.file(0), "column 'frame_index'",
            "is missing, so frames are numbered in the order of the rows; convert the dataset with "
            "--to v3.0, which writes it.",
        )  # fmt: skip


def check_tasks(dataset: LeRobotDataset, tasks: Mapping[int, int]) -> Iterator[Problem]:
    """Checks the text of every task; `tasks` maps the task indices of frames to an episode with
    each."""
    known = dataset.tasks
    for index, episode in tasks.items():
        text = known.get(index)
        if not isinstance(text, str) or not text.strip():
            yield error(
                dataset.path(dataset.metadata.tasks_file), f"task_index {index}",
                f"is the task of episode {episode} but has no text; add its instruction.",
            )  # fmt: skip


def check_subtasks(dataset: LeRobotDataset) -> Iterator[Problem]:
    """Checks that every frame's subtask has a text, if the dataset has subtasks."""
    if dataset.has_subtasks:
        _ = dataset.subtasks
    elif INDEX in dataset.features:
        yield warning(
            dataset.path(FILE), "file",
            f"is missing, so '{INDEX}' has no texts and no subtasks are learnt; copy the file.",
        )  # fmt: skip


def check_listing(dataset: LeRobotDataset) -> Iterator[Problem]:
    """Checks the files and rows that v3.0's list of episodes gives for each episode."""
    folder = dataset.folder
    try:
        columns = _listing(folder)
    except DatasetError as unread:
        yield warning(unread.file, unread.field, unread.sentence)
        return
    if len(columns.get("episode_index", ())) != dataset.num_episodes:
        return
    ends = np.cumsum(dataset.lengths)
    for name, expected in zip(_RANGE, (ends - dataset.lengths, ends), strict=True):
        wrong = np.flatnonzero(columns.get(name, expected) != expected)
        if len(wrong):
            at = wrong[0]
            yield warning(
                folder.path(_LISTING), f"column '{name}'",
                f"is {columns[name][at]} for episode {at}, but its rows say {expected[at]} "
                f"({counted(len(wrong), 'such episode')}); Chiliad finds rows by their own "
                "episode_index, but "
                "other readers mix up episodes.",
            )  # fmt: skip
    if all(name in columns for name in _PLACE):
        yield from _places(dataset, folder, *(columns[name] for name in _PLACE))


def check_statistics(dataset: LeRobotDataset, stats: Mapping[str, Stats]) -> Iterator[Problem]:
    """Checks meta/stats.json against `stats`, which are exact."""
    folder = dataset.folder
    written = written_statistics(folder)
    moments, quantiles = [], []
    for name, exact in stats.items():
        of_name = written.get(name)
        if isinstance(of_name, Mapping) and "float" in dataset.features[name]["dtype"]:
            moments += _differing(name, of_name, exact, _MOMENTS, _TOLERANCE)
            quantiles += _differing(name, of_name, exact, list(QUANTILES), _QUANTILE_TOLERANCE)
    for differing, why in (
        (moments, "they were computed from other rows"),
        (quantiles, "LeRobot up to 0.5 averages the quantiles of the episodes"),
    ):
        if differing:
            (name, key, sentence), others = differing[0], len(differing) - 1
            more = f", as in {others} more column{'s' * (others > 1)}" if others else ""
            yield warning(
                folder.path(_STATISTICS), f"'{name}', '{key}'",
                f"{sentence}{more} ({why}); Chiliad computes statistics from the rows, but other "
                "software scales by these.",
            )  # fmt: skip


def written_statistics(folder: Folder) -> dict[str, Any]:
    """Content of meta/stats.json; empty if there is none.

    Raises:
      DatasetError: the file is not a JSON object.
    """
    if not folder.exists(_STATISTICS):
        return {}
    file, remedy = folder.path(_STATISTICS), "delete it, or copy it again"
    written = read_json(folder.local(_STATISTICS), file, remedy)
    if not isinstance(written, dict):
        raise DatasetError(file, "file", f"is not a JSON object ({short(written)}); {remedy}.")
    return written


def numbers(value: object) -> Float64[np.ndarray, " n"] | None:
    """Nested lists of numbers as one flat array; None if they hold something else."""
    try:
        return np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _differing(
    name: str, written: Mapping[str, Any], exact: Stats, keys: Sequence[str], tolerance: float
) -> list[tuple[str, str, str]]:
    """The first of `keys` that is more than `tolerance` standard deviations off, in words."""
    size = np.maximum(np.abs(exact["min"]), np.abs(exact["max"])).reshape(-1)
    allowed = tolerance * np.maximum(exact["std"].reshape(-1), 1e-5 * size + 1e-12)
    for key in (key for key in keys if key in written):
        value, right = numbers(written[key]), exact[key].reshape(-1)
        if value is None or value.shape != right.shape:
            return [(name, key, f"does not have {len(right)} numbers")]
        off = np.abs(value - right) / allowed
        if not (off <= 1).all():
            dim = int(np.argmax(np.nan_to_num(off, nan=np.inf)))
            found = (
                f"is {value[dim]:.4g} in dimension {dim}, but in the rows it is {right[dim]:.4g}"
            )
            return [(name, key, found)]
    return []


def _places(
    dataset: LeRobotDataset,
    folder: Folder,
    chunk: Int64[np.ndarray, " e"],
    file: Int64[np.ndarray, " e"],
) -> Iterator[Problem]:
    """Checks the episodes at which the file changes: two of each file."""
    place = chunk * (int(file.max()) + 1) + file
    changes = np.flatnonzero(np.diff(place))
    edges = np.unique(np.concatenate([[0], changes, changes + 1, [len(place) - 1]]))
    for episode in edges[dataset.lengths[edges] > 0]:
        actual = str(dataset.file(int(episode)))
        at = {"chunk_index": int(chunk[episode]), "file_index": int(file[episode])}
        named = file_name(folder, dataset.info, "data_path", **at)
        if actual != str(folder.path(named)):
            yield warning(
                folder.path(_LISTING), "column 'data/file_index'",
                f"says {named} for episode {episode}, but its rows are in {actual} (LeRobot's "
                "converter writes this); Chiliad finds rows by their own episode_index, but other "
                "readers fail.",
            )  # fmt: skip
            return


def _listing(folder: Folder) -> dict[str, np.ndarray]:
    """The integer columns of the list of episodes that are checked, as far as they exist."""
    parts: dict[str, list[np.ndarray]] = {}
    wanted = ("episode_index", *_PLACE, *_RANGE)
    for name in folder.list(f"{_LISTING}/*/*.parquet"):
        path, file = folder.local(name), folder.path(name)
        with open_parquet(path, file) as opened:
            there = [n for n in wanted if n in opened.schema_arrow.names]
            table = read_columns(opened, there, file)
        for column in table.column_names:
            values = to_numpy(file, column, table[column], {"dtype": "int64", "shape": (1,)})
            parts.setdefault(column, []).append(values.reshape(-1))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    order = np.argsort(columns.get("episode_index", np.zeros(0)), kind="stable")
    return {n: values[order] for n, values in columns.items() if len(values) == len(order)}
