"""Weights by which a dataset's samples are drawn, from one of its columns or from a JSON file by
episode."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from data.dataset import Dataset
from data.errors import DatasetError, short
from data.files.json_file import read_named
from data.frames import Frames
from data.mixture.mixture import DatasetConfig, in_file
from data.mixture.split import Episodes

Column = Callable[[str], Float64[np.ndarray, " n"]]
"""Gives a column's values for all frames, one number per frame."""


def sample_weights(
    config: DatasetConfig, lengths: Int64[np.ndarray, " e"], chosen: Episodes, column: Column
) -> Float64[np.ndarray, " n"] | None:
    """Weights of all frames of a dataset, 0 outside of the chosen episodes. None if the weights
    within them are all equal, or the dataset's settings name no weights.

    Args:
      lengths: frames of each episode.

    Raises:
      FileNotFoundError: there is no such file.
      DatasetError: a weight is negative or not finite, all are 0, or the file belongs to another
        dataset or is malformed.
    """
    if not config.weights:
        return None
    if in_file(config.weights):
        file, field = config.weights, "weights"
        found = _read_file(config.weights, lengths)
    else:
        file, field = config.path, f"column '{config.weights}', named by 'weights'"
        found = column(config.weights)
    if not (good := np.isfinite(found) & (found >= 0)).all():
        worst = int(np.argmin(good))
        episode = int(np.searchsorted(np.cumsum(lengths), worst, "right"))
        frame = worst - int(lengths[:episode].sum())
        raise DatasetError(
            file,
            field,
            f"is {found[worst]:g} for episode {episode}, frame {frame}; give each frame 0 or more, "
            "and 0 if it should never be drawn.",
        )
    drawn = np.repeat(np.isin(np.arange(len(lengths)), chosen), lengths)
    if not (within := found[drawn]).any():
        raise DatasetError(
            file,
            field,
            "is 0 for all chosen frames; give some of them more, or leave the dataset out.",
        )
    return None if np.ptp(within) == 0 else np.where(drawn, found, 0.0)


def drawn_episodes(
    weights: Float64[np.ndarray, " n"] | None, starts: Int64[np.ndarray, " e"], chosen: Episodes
) -> Episodes:
    """Chosen episodes in which some frame has a weight above 0."""
    if weights is None:
        return chosen
    before = np.append(0, np.cumsum(weights > 0))
    ends = np.append(starts[1:], len(weights))
    return chosen[before[ends[chosen]] > before[starts[chosen]]]


def stored_column(frames: Frames) -> Column:
    """Columns of frames opened for training."""
    rows = np.arange(int(frames.lengths.sum()))
    return lambda name: frames.column(name, rows)[:, 0].astype(np.float64)


def streamed_column(dataset: Dataset) -> Column:
    """Columns of a dataset that is not decoded yet."""

    def column(name: str) -> Float64[np.ndarray, " n"]:
        blocks = [block[name].ravel() for block in dataset.stream([name])]
        return np.concatenate(blocks).astype(np.float64)

    return column


def _read_file(file: str, lengths: Int64[np.ndarray, " e"]) -> Float64[np.ndarray, " n"]:
    value = read_named(file, "weights", "weights")
    if not isinstance(value, dict) or not set(value) <= {"episodes", "default"}:
        raise DatasetError(
            file,
            "file",
            f'is {short(value)}; expected {{"episodes": {{"0": 2.0, …}}, "default": 1.0}}.',
        )
    default, told = value.get("default", 1.0), value.get("episodes", {})
    if not _is_number(default):
        raise DatasetError(file, "default", f"is {short(default)}; give a number.")
    if not isinstance(told, dict):
        raise DatasetError(
            file, "episodes", f"is {short(told)}; expected a table of weights by episode."
        )
    numbers = {str(i): i for i in range(len(lengths))}
    found = np.full(int(lengths.sum()), float(default))
    starts = np.cumsum(lengths) - lengths
    for name, own in told.items():
        if name not in numbers:
            raise DatasetError(
                file,
                f"episodes.{short(name)}",
                f"is not an episode; there are 0 to {len(lengths) - 1}, so correct the number.",
            )
        episode = numbers[name]
        found[starts[episode] :][: lengths[episode]] = _weights_of(
            file, episode, own, int(lengths[episode])
        )
    return found


def _weights_of(file: str, episode: int, own: Any, length: int) -> float | list[float]:
    """One number, or one for each frame."""
    if _is_number(own):
        return float(own)
    if not isinstance(own, list) or not all(map(_is_number, own)):
        raise DatasetError(
            file,
            f"episodes.{episode}",
            f"is {short(own)}; give a number, or a list of one for each frame.",
        )
    if len(own) != length:
        raise DatasetError(
            file,
            f"episodes.{episode}",
            f"has {len(own)} weights, but the episode has {length} frames; give one for each, or "
            "one number for all.",
        )
    return list(map(float, own))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
