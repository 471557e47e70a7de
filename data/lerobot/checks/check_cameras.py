"""Checks a LeRobot dataset's cameras: every frame that the metadata promises must be where it
promises it.

A video's packets are counted and their times read without decoding. A few episodes of each camera
are decoded, which also shows whether the stored statistics of its images can be true.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from jaxtyping import Float64

from data.dataset import Report
from data.errors import (
    DatasetError,
    MissingFileError,
    Problem,
    caught,
    error,
    from_error,
    warning,
)
from data.files.job import Done, adding_up, run_job
from data.lerobot.checks.check_metadata import numbers, written_statistics
from data.lerobot.dataset import LeRobotDataset
from data.validation.check_pictures import check_pictures, check_presence
from data.video.mp4 import open_video, unreadable
from data.video.rate import why_lacking

_SMALLEST_SPREAD = 0.5
_DRIFT = 0.1


class _Span(NamedTuple):
    """Span of an episode in a video file: from `start` seconds, `length` frames."""

    path: Path
    start: float
    length: int
    episode: int


def check_camera(dataset: LeRobotDataset, camera: str, report: Report) -> Iterator[Problem]:
    """All problems of one camera; a depth camera's images are not decoded."""
    present = np.flatnonzero(dataset.has(camera)).tolist()
    videos = sum(feature["dtype"] == "video" for feature in dataset.features.values())
    counted = dataset.info.get("total_videos") == dataset.num_episodes * videos
    yield from check_presence(dataset, camera, present, promised=videos > 0 and counted)
    problems = []
    if dataset.features[camera]["dtype"] == "video":
        problems = list(_videos(dataset, camera, present, report))
        yield from problems
    if camera in dataset.cameras and not any(p.severity == "error" for p in problems):
        seen = yield from check_pictures(dataset, camera, present, report)
        if seen is not None:
            yield from _spread(dataset, camera, seen)


def _videos(
    dataset: LeRobotDataset, camera: str, present: list[int], report: Report
) -> Iterator[Problem]:
    files: dict[str, list[int]] = {}
    for episode in present:
        files.setdefault(_file(dataset, episode, camera), []).append(episode)
    units = [files[name] for name in sorted(files)]
    told = adding_up(partial(report, f"Videos of {camera}"), len(present))
    lost: list[tuple[int, Problem, bool]] = []
    problems: list[Problem] = []
    for without, found in run_job(_Videos(dataset, camera), units, told):
        lost += without
        problems += found
    for _, problem, goes_on in sorted(lost, key=lambda one: one[0]):
        yield problem
        if not goes_on:
            return
    yield from problems


@dataclass(frozen=True)
class _Videos:
    """The check of a camera's videos as a job; a unit is the episodes of one file. It returns the
    episodes whose video is not available, each with its problem and True if the check continues
    with other episodes, and the problems of the rest."""

    dataset: LeRobotDataset
    camera: str

    def __call__(
        self, episodes: list[int], done: Done
    ) -> tuple[list[tuple[int, Problem, bool]], list[Problem]]:
        spans, lost, problems = list[_Span](), [], list[Problem]()
        for episode in episodes:
            try:
                path, start = self.dataset.video(episode, self.camera)
            except DatasetError as raised:
                goes_on = isinstance(raised, MissingFileError)
                lost.append((episode, from_error(raised), goes_on))
            else:
                length = int(self.dataset.lengths[episode])
                spans.append(_Span(path, float(start), length, episode))
        spans.sort(key=lambda span: (str(span.path), span.start))
        for path, of_file in groupby(spans, key=lambda span: span.path):
            problems += caught(_video(path, list(of_file), self.dataset.fps))
        done(len(episodes))
        return lost, problems


def _file(dataset: LeRobotDataset, episode: int, camera: str) -> str:
    """Name of the video file; empty if the metadata does not give it."""
    try:
        return dataset.video_file(episode, camera)
    except DatasetError:
        return ""


def _video(path: Path, spans: list[_Span], fps: float) -> Iterator[Problem]:
    """Checks one file's frames against the episodes in it, in order."""
    if not path.is_file():
        raise MissingFileError(path, "file", "the video is missing; copy the dataset again.")
    times, index = _times(path)
    needed = sum(span.length for span in spans)
    if len(times) < needed:
        yield error(
            path, "frames",
            f"holds {len(times)} of the {needed} frames that its episodes have (its index lists "
            f"{index}): {why_lacking(times, fps)}",
        )  # fmt: skip
        return
    from_start = len(times) - int(np.abs(times - spans[0].start).argmin())
    if from_start > needed and len(spans) == 1:
        yield warning(
            path, "frames",
            f"holds {from_start} frames, but episode {spans[0].episode} has {needed}; the extra "
            "frames are not read, and all frames may be out of step with the rows.",
        )  # fmt: skip
    first = 0
    for span in spans:
        frame = int(np.abs(times - span.start).argmin())
        if frame < first:
            yield error(
                path, "from_timestamp",
                f"puts the start of episode {span.episode} {first - frame} frames before the end "
                "of the previous one, so its images are out of step; copy or convert the dataset "
                "again.",
            )  # fmt: skip
            return
        drift = abs(float(times[frame]) - span.start) * fps
        if drift > _DRIFT:
            yield warning(
                path, "from_timestamp",
                f"is {drift:.2f} frames away from the first frame of episode {span.episode}; the "
                "nearest frame is read.",
            )  # fmt: skip
            return
        first = frame + span.length
        if first > len(times):
            yield error(
                path, "frames",
                f"ends {first - len(times)} frames before episode {span.episode} does: it was cut "
                "off; copy or encode it again.",
            )  # fmt: skip
            return


def _spread(
    dataset: LeRobotDataset, camera: str, seen: Float64[np.ndarray, "3"]
) -> Iterator[Problem]:
    folder = dataset.folder
    written: Any = written_statistics(folder).get(camera)
    if not isinstance(written, dict):
        return
    value = numbers(written.get("std"))
    if value is None or len(value) != 3:
        yield warning(
            folder.path("meta/stats.json"), f"'{camera}', 'std'",
            "does not have 3 numbers; Chiliad does not scale images by it.",
        )  # fmt: skip
    elif (value < _SMALLEST_SPREAD * seen).any():
        channel = int((value / np.maximum(seen, 1e-9)).argmin())
        yield warning(
            folder.path("meta/stats.json"), f"'{camera}', 'std'",
            f"is {value[channel]:.3g} in channel {channel}, but the images have about "
            f"{seen[channel]:.2g} (in LeRobot up to 0.5, squares of bytes overflow); Chiliad does "
            "not scale images by it, but other software does.",
        )  # fmt: skip


def _times(path: Path) -> tuple[Float64[np.ndarray, " n"], int]:
    """Times in seconds, ascending, of the frames whose bytes are really there, and the number of
    frames that the file's index lists."""
    times = []
    try:
        with open_video(path) as container:
            stream = container.streams.video[0]
            for packet in container.demux(stream):
                if packet.size > 0 and not packet.is_corrupt and packet.pts is not None:
                    times.append(float(packet.pts * packet.time_base))
            return np.sort(np.array(times)), stream.frames
    except (av.error.FFmpegError, IndexError):
        if times:
            return np.sort(np.array(times)), 0
        raise unreadable(path) from None
