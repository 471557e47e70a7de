"""Observations of a dataset with the action chunks that followed them, in the dataset's units, and
their images as recorded.

Use this module to look at some episodes of a dataset of any format without making a frame store;
training reads `Frames`. As in training, a mixture's `Reading` says how the columns are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8

from data.dataset import Dataset, Runs, frames_at
from data.frames import attribute_of
from data.mixture.mixture import DatasetConfig, Reading
from data.store.tables import find_duplicates


class RecordedEpisode(NamedTuple):
    """Observations of an episode at frames `at`. `actions` are the chunks that followed, whose
    steps count where `valid`; `before` is the previous frame's action, NaN at frame 0; `whole` is
    the action of every frame."""

    episode: int
    at: Int64[np.ndarray, " n"]
    state: Float32[np.ndarray, "n s"]
    actions: Float32[np.ndarray, "n h a"]
    valid: Bool[np.ndarray, "n h"]
    before: Float32[np.ndarray, "n a"]
    prompts: tuple[str, ...]
    whole: Float32[np.ndarray, "t a"]


@dataclass(frozen=True)
class Divisible:
    """A dataset in the form that `split_episodes` needs, without a store. Duplicate episodes are
    found on first access, by reading all rows."""

    dataset: Dataset

    name = attribute_of("dataset.name")
    lengths = attribute_of("dataset.lengths")
    runs = attribute_of("dataset.runs")

    @cached_property
    def duplicate_of(self) -> Int64[np.ndarray, " e"]:
        """For each episode the first one with the same states and actions."""
        return find_duplicates(self.dataset)


def read_recorded(
    dataset: Dataset,
    config: DatasetConfig,
    reading: Reading,
    episode: int,
    at: Int64[np.ndarray, " n"],
) -> RecordedEpisode:
    """Observations of an episode at some of its frames, without images.

    Raises:
      DatasetError: a column is missing or damaged.
      ValueError: action dims are increments, and steps of more or less than a frame would have to
        sum them.
    """
    if reading.increments:
        raise ValueError(
            f"{config.path}: increments are summed over steps of {reading.step:g} frames, which "
            "only training does; leave out 'seconds' and 'increments' of the embodiment, or give a "
            "dataset at the policy's own rate."
        )
    states, actions = read_joined(dataset, episode, (config.state, config.actions))
    last, ahead = len(states) - 1, np.array(reading.ahead)

    def chunks(
        frames: Int64[np.ndarray, " n"],
    ) -> tuple[Float32[np.ndarray, "n _s"], Float32[np.ndarray, "n h _a"]]:
        found = states[frames], actions[np.minimum(frames[:, None] + ahead, last)]
        return found if reading.transform is None else reading.transform(*found)

    state, followed = chunks(at)
    _, earlier = chunks(np.maximum(at - 1, 0))
    _, whole = chunks(np.arange(last + 1))
    before = np.where((at > 0)[:, None], earlier[:, 0], np.float32(np.nan))
    return RecordedEpisode(
        episode=episode,
        at=at,
        state=state,
        actions=followed,
        valid=at[:, None] + ahead <= last,
        before=before,
        prompts=_prompts(dataset.runs, reading, episode, at),
        whole=whole[:, 0],
    )


def read_joined(
    dataset: Dataset, episode: int, columns: Sequence[Sequence[str]]
) -> list[Float32[np.ndarray, "t _d"]]:
    """Every frame's values, for each list of columns with its columns side by side.

    Raises:
      DatasetError: a column is missing or damaged.
    """
    names = list(dict.fromkeys(name for chosen in columns for name in chosen))
    blocks = list(dataset.stream(names, [episode]))
    values = {
        name: np.concatenate([block[name].reshape(len(block[name]), -1) for block in blocks])
        for name in names
    }
    return [
        np.concatenate([values[name] for name in chosen], axis=1).astype(np.float32)
        for chosen in columns
    ]


def read_pictures(
    dataset: Dataset, reading: Reading, episode: int, at: Int64[np.ndarray, " n"]
) -> list[UInt8[np.ndarray, "n _h _w 3"] | None]:
    """Images at some frames for each of the robot's cameras, None for cameras that the episode
    lacks.

    Raises:
      DatasetError: they are missing or damaged.
    """
    there = dict(zip(dataset.cameras, dataset.present[episode], strict=True))
    return [
        frames_at(dataset, episode, camera, at) if camera is not None and there[camera] else None
        for camera in reading.cameras
    ]


def _prompts(
    runs: Runs, reading: Reading, episode: int, at: Int64[np.ndarray, " n"]
) -> tuple[str, ...]:
    """The first wording of the task of each frame."""
    own = np.flatnonzero(runs.episode == episode)
    which: Sequence[int] = own[np.searchsorted(runs.first[own], at, "right") - 1].tolist()
    return tuple(reading.prompts[runs.task[run]][0] for run in which)
