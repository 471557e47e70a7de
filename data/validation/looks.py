"""Cameras that show nothing, that stand still while the robot moves, or that show the same as
another one, found in small pictures of a few moments of each episode.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from data.dataset import Dataset, Report, frames_at
from data.errors import DatasetError, Problem, from_error, warning
from data.files.job import Done, adding_up, run_job
from data.frames import usual_columns
from data.statistics.idle import by_episode, usual_extent
from data.statistics.stats import Stats, compute, numeric_columns
from data.validation.conventions import listed
from models.files.terminal import counted

_EPISODES, _MOMENTS, _DECODED = 64, 4, 1 << 13
"""Most episodes and moments to look at; and most frames of a dataset that reads whole episodes."""
SIDE = 16
"""Pixels of a small picture's side."""
_DARK, _BLANK, _STILL = 16, 6, 18
"""Largest value, of 0 to 255, of a black picture; largest difference within one of a single colour,
and between those of a still scene, which codecs change."""
_SAME, _EDGES = 4, 24
"""Mean and largest difference between pictures of one scene from two encoders."""
_MOVES = 0.05
"""Least part of its usual range that some dimension passes through where the robot moves."""

Thumbs = UInt8[np.ndarray, "m 16 16 3"]


class OddLook(NamedTuple):
    """A finding in one episode: its `kind` ("blank", "frozen" or "same"), and the end of a sentence
    that begins with the camera."""

    kind: str
    camera: str
    sentence: str


def thumbs(pictures: UInt8[np.ndarray, "m _h _w 3"]) -> Thumbs:
    """Small pictures, whose pixels are means."""
    small = (Image.fromarray(x).resize((SIDE, SIDE), Image.Resampling.BOX) for x in pictures)
    return np.stack([np.asarray(x) for x in small])


def odd_looks(seen: Mapping[str, Thumbs], moves: bool) -> Iterator[OddLook]:
    """Findings in one episode, of which each camera was seen at the same moments.

    Args:
      moves: True if the robot moves between them.
    """
    shown = {}
    for camera, small in seen.items():
        pictures = small.astype(np.int16)
        black = pictures.max() < _DARK
        if black or np.ptp(pictures, axis=(1, 2)).max() < _BLANK:
            yield OddLook("blank", camera, "is black" if black else "is of a single colour")
            continue
        shown[camera] = pictures
        if moves and len(pictures) > 2 and np.ptp(pictures, axis=0).max() < _STILL:
            sentence = "shows the same picture throughout, though the robot moves,"
            yield OddLook("frozen", camera, sentence)
    names = list(shown)
    for k, camera in enumerate(names):
        for other in names[:k]:
            apart = np.abs(shown[camera] - shown[other])
            if apart.mean() < _SAME and apart.max() < _EDGES:
                yield OddLook("same", camera, f"shows the same as camera '{other}'")


def check_looks(dataset: Dataset, columns: Sequence[str], report: Report) -> Iterator[Problem]:
    """Checks a few moments of at most 64 episodes.

    Args:
      columns: columns that show whether the robot moves; those of a usual name if there are none.
    """
    lengths = dataset.lengths
    there = np.flatnonzero(lengths > 0)
    most = _EPISODES
    if not hasattr(dataset, "frames_at"):
        most = min(most, max(1, _DECODED // max(1, int(lengths.mean()))))
    places = np.linspace(0, len(there) - 1, min(most, len(there))).round().astype(int)
    chosen = there[places].tolist() if dataset.cameras else []
    state, actions = usual_columns(numeric_columns(dataset))
    names = list(columns) or [*state, *actions]
    stats = compute(dataset, chosen, names) if names and chosen else {}
    moved = moving(dataset, chosen, stats)
    done = adding_up(lambda done, total: report("Looking", done, total), len(chosen))
    found: dict[OddLook, list[int]] = {}
    looking = run_job(_Looking(dataset, moved), chosen, done)
    for episode, odd in zip(chosen, looking, strict=True):
        for one in odd:
            if isinstance(one, Problem):
                yield one
            else:
                found.setdefault(one, []).append(episode)
    for one, episodes in found.items():
        every = len(episodes) == len(chosen) > 1
        where = "all" if every else f"{listed(episodes)} of the"
        yield warning(
            dataset.root, f"camera '{one.camera}'",
            f"{one.sentence} in {where} {counted(len(chosen), 'episode')} looked at; "
            f"leave {'the camera' if every else 'them'} out, or record again.",
        )  # fmt: skip


def moving(dataset: Dataset, episodes: Sequence[int], stats: Mapping[str, Stats]) -> set[int]:
    """The episodes, of at least one frame, in which the robot moves between the moments that are
    looked at, by the columns of these statistics."""
    names = list(stats)
    if not names or not episodes:
        return set()
    extent = usual_extent(stats, names)
    values = by_episode(dataset, names, episodes)
    return {
        episode
        for episode, rows in zip(episodes, values, strict=True)
        if (np.ptp(rows[_moments(len(rows))], axis=0) > _MOVES * extent)[extent > 0].any()
    }


@dataclass(frozen=True)
class _Looking:
    """A look at one episode as a job: its findings, or the problem of an unreadable picture."""

    dataset: Dataset
    moved: set[int]

    def __call__(self, episode: int, done: Done) -> list[OddLook | Problem]:
        dataset, seen = self.dataset, dict[str, Thumbs]()
        at = _moments(int(dataset.lengths[episode]))
        try:
            for camera, there in zip(dataset.cameras, dataset.present[episode], strict=True):
                if there:
                    seen[camera] = thumbs(frames_at(dataset, episode, camera, at))
        except DatasetError as raised:
            return [from_error(raised)]
        done(1)
        return list(odd_looks(seen, episode in self.moved))


def _moments(length: int) -> Int64[np.ndarray, " m"]:
    """Frames of an episode that are looked at."""
    return np.unique(np.linspace(0, length - 1, _MOMENTS).round().astype(np.int64))
