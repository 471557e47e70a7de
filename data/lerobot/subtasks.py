"""Subtasks of a LeRobot dataset, as LeRobot's versions write them: a column `subtask_index` with
the texts in meta/subtasks.parquet (0.4), or rows of style "subtask" in the column
`language_persistent` (0.6's lerobot-annotate), which are repeated in every frame of an episode.

A user's own column can be named instead: of texts, or of integers that index the same table.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from data.columns import arrow_type, read_table, to_numpy
from data.dataset import Runs, Subtasks, cut_into_episodes
from data.errors import DatasetError, short
from data.files.folder import Folder

FILE = "meta/subtasks.parquet"
INDEX, ANNOTATIONS = "subtask_index", "language_persistent"

_LATE = 1e-3
"""Fraction of a frame by which a float32 time may differ from the frame's time."""


def telling_column(
    folder: Folder, features: Mapping[str, Mapping[str, Any]], asked: str = ""
) -> str | None:
    """The column that holds subtasks, from metadata alone; None if there is none.

    Args:
      asked: the column to use.

    Raises:
      DatasetError: there is no such column, or it cannot hold subtasks.
    """
    info = folder.path("meta/info.json")
    if not asked:
        if INDEX in features and folder.exists(FILE):
            return INDEX
        return ANNOTATIONS if ANNOTATIONS in features else None
    if asked not in features:
        raise DatasetError(
            info,
            f"feature '{asked}'",
            f"should hold subtasks but does not exist, only {', '.join(features)}; name one of "
            "these.",
        )
    dtype, shape = features[asked]["dtype"], tuple(features[asked]["shape"])
    if asked != ANNOTATIONS and (arrow_type(dtype) is None or shape not in ((), (1,))):
        raise DatasetError(
            info,
            f"feature '{asked}'",
            f"is {dtype} {list(shape)}, which cannot hold subtasks; name a column of texts, or of "
            f"whole numbers whose texts {FILE} holds.",
        )
    if dtype != "string" and asked != ANNOTATIONS and not folder.exists(FILE):
        raise DatasetError(
            folder.path(FILE),
            "file",
            f"is missing, but '{asked}' refers to its texts; copy the file.",
        )
    return asked


def read_texts(folder: Folder) -> tuple[str, ...]:
    """Texts of meta/subtasks.parquet by their index.

    Raises:
      DatasetError: the texts are not numbered from 0 in their order, by which LeRobot finds them.
    """
    file = folder.path(FILE)
    table = read_table(folder.local(FILE), file=file)
    texts = [name for name in table.column_names if name != INDEX]
    if INDEX not in table.column_names or len(texts) != 1:
        raise DatasetError(
            file,
            "columns",
            f"are {table.column_names}, expected {INDEX} and one column of texts; write the file "
            "again.",
        )
    numbers = to_numpy(file, INDEX, table[INDEX], {"dtype": "int64", "shape": (1,)}).reshape(-1)
    values = to_numpy(file, texts[0], table[texts[0]], {"dtype": "string", "shape": (1,)})
    if not np.array_equal(numbers, np.arange(len(numbers))):
        raise DatasetError(
            file,
            f"column '{INDEX}'",
            f"is {short(numbers.tolist())}, expected 0 to {len(numbers) - 1} in order; LeRobot "
            "finds a text by its row, so write the table again.",
        )
    found = tuple(str(text) for text in values.reshape(-1))
    for number, text in enumerate(found):
        if not text.strip():
            raise DatasetError(
                file, f"{INDEX} {number}", "has an empty text; write the subtask's text."
            )
    return found


def of_indices(
    file: Path | str,
    column: str,
    lengths: Int64[np.ndarray, " e"],
    blocks: Iterable[np.ndarray],
    texts: tuple[str, ...],
) -> Subtasks:
    """Subtasks of frames that have the index of a text, or -1.

    Args:
      file: name of the dataset in messages.
      blocks: indices of all frames, some whole episodes at a time.

    Raises:
      DatasetError: an index has no text.
    """

    def episodes() -> Iterator[Int64[np.ndarray, " t"]]:
        for episode, found in enumerate(cut_into_episodes(lengths, blocks)):
            indices = found.astype(np.int64)
            wrong = np.flatnonzero((indices < -1) | (indices >= len(texts)) | (indices != found))
            if len(wrong):
                raise DatasetError(
                    file,
                    f"column '{column}'",
                    f"is {found[wrong[0]]} at step {wrong[0]} of episode {episode}, but {FILE} has "
                    f"texts of 0 to {len(texts) - 1} (-1: none); add the text or correct the "
                    "column.",
                )
            yield indices

    return Subtasks(_runs(episodes()), texts)


def of_texts(lengths: Int64[np.ndarray, " e"], blocks: Iterable[np.ndarray]) -> Subtasks:
    """Subtasks of frames that have a text, or an empty one."""
    known: dict[str, int] = {}

    def number(text: str) -> int:
        return known.setdefault(text, len(known)) if text.strip() else -1

    runs = _runs(
        np.array([number(str(text)) for text in episode], np.int64)
        for episode in cut_into_episodes(lengths, blocks)
    )
    return Subtasks(runs, tuple(known))


def of_annotations(
    lengths: Int64[np.ndarray, " e"], fps: float, rows: Iterable[tuple[Any, pa.Array]]
) -> Subtasks:
    """Subtasks of episodes, each annotated in its first frame: a row holds from its `timestamp` to
    that of the next row.

    Args:
      rows: for each episode, the file, for messages, and the cells of its frames.

    Raises:
      DatasetError: a cell is not a list of such rows.
    """
    known: dict[str, int] = {}

    def episodes() -> Iterator[Int64[np.ndarray, " t"]]:
        for length, (file, cells) in zip(lengths.tolist(), rows, strict=True):
            indices = np.full(length, -1, np.int64)
            for time, text in _annotated(file, cells[0].as_py()):
                first = max(0, int(np.ceil(time * fps - _LATE)))
                indices[first:] = known.setdefault(text, len(known))
            yield indices

    return Subtasks(_runs(episodes()), tuple(known))


def _annotated(file: Path | str, cell: Any) -> list[tuple[float, str]]:
    """Times and texts of an episode's subtasks, in their order."""
    found = []
    for row in cell or ():
        if not isinstance(row, Mapping) or not {"style", "content", "timestamp"} <= row.keys():
            raise DatasetError(
                file,
                f"column '{ANNOTATIONS}'",
                f"holds {short(row)}, expected rows with style, content and timestamp; annotate "
                "the dataset again.",
            )
        time, text = row["timestamp"], row["content"]
        if row["style"] == "subtask" and isinstance(text, str) and text.strip():
            if not isinstance(time, int | float) or not np.isfinite(time):
                raise DatasetError(
                    file,
                    f"column '{ANNOTATIONS}'",
                    f"has a subtask at the time {short(time)}, expected seconds; annotate the "
                    "dataset again.",
                )
            found.append((float(time), text))
    return sorted(found, key=lambda each: each[0])


def _runs(episodes: Iterable[Int64[np.ndarray, " t"]]) -> Runs:
    pieces: list[Int64[np.ndarray, "4 r"]] = [np.zeros((4, 0), np.int64)]
    for episode, indices in enumerate(episodes):
        first = np.flatnonzero(np.diff(indices, prepend=indices[:1] - 1))
        length = np.diff(first, append=len(indices))
        pieces.append(np.stack([np.full_like(first, episode), first, length, indices[first]]))
    return Runs(*np.ascontiguousarray(np.concatenate(pieces, axis=1)))
