"""What a dataset's cameras must hold: every frame that the metadata promises, where it promises it.

A video's packets are counted and their times read without decoding; of each camera a few episodes
are decoded, which also tells whether the written statistics of its pictures can be true.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from jaxtyping import Float64

from data.errors import DatasetError, MissingFileError
from data.files.folder import open_folder
from data.lerobot.dataset import Dataset
from data.statistics.stats import Report
from data.validation.check_metadata import numbers, written_statistics
from data.validation.problem import Problem, error, from_error, warning
from data.video.mp4 import open_video

_LOOKS, _FRAMES, _PIXELS = 3, 10, 4
_SMALLEST_SPREAD = 0.5
_DRIFT = 0.1


class _Span(NamedTuple):
    """Where a video file holds an episode: from `start` seconds, `length` frames."""

    path: Path
    start: float
    length: int
    episode: int


def check_camera(dataset: Dataset, camera: str, report: Report) -> Iterator[Problem]:
    """All problems of one camera."""
    present = np.flatnonzero(dataset.present[:, dataset.cameras.index(camera)]).tolist()
    yield from _absent(dataset, camera, present)
    problems = []
    if dataset.features[camera]["dtype"] == "video":
        problems = list(_videos(dataset, camera, present, report))
        yield from problems
    if not any(problem.severity == "error" for problem in problems):
        yield from _pictures(dataset, camera, present, report)


def _absent(dataset: Dataset, camera: str, present: list[int]) -> Iterator[Problem]:
    """A camera may be absent, but not where v2.1's number of videos says that all are there."""
    absent = np.setdiff1d(np.arange(dataset.num_episodes), present)
    if len(absent) == 0:
        return
    info = getattr(dataset, "info", {})
    if len(absent) == dataset.num_episodes:
        yield error(
            dataset.root, f"camera '{camera}'",
            "is missing in all episodes, though the metadata declares it; download its videos or "
            "pictures, or remove the camera there.",
        )  # fmt: skip
        return
    videos = sum(dataset.features[name]["dtype"] == "video" for name in dataset.cameras)
    promised = videos and info.get("total_videos") == dataset.num_episodes * videos
    tell, then = (
        (error, "though meta/info.json counts all videos; copy the dataset again.")
        if promised
        else (warning, "which are trained without it.")
    )
    yield tell(
        dataset.root, f"camera '{camera}'",
        f"is missing in {len(absent)} of {dataset.num_episodes} episodes, the first of them "
        f"{absent[0]}, {then}",
    )  # fmt: skip


def _videos(dataset: Dataset, camera: str, present: list[int], report: Report) -> Iterator[Problem]:
    spans = []
    for episode in present:
        try:
            path, start = dataset.video(episode, camera)
        except DatasetError as raised:
            yield from_error(raised)
            if not isinstance(raised, MissingFileError):
                return
        else:
            spans.append(_Span(path, float(start), int(dataset.lengths[episode]), episode))
    spans.sort(key=lambda span: (str(span.path), span.start))
    done = 0
    for path, of_file in groupby(spans, key=lambda span: span.path):
        inside = list(of_file)
        try:
            yield from _video(path, inside, dataset.fps)
        except DatasetError as raised:
            yield from_error(raised)
        done += len(inside)
        report(f"Videos of {camera}", done, len(spans))


def _video(path: Path, spans: list[_Span], fps: float) -> Iterator[Problem]:
    """One file's frames against the episodes in it, in order."""
    if not path.is_file():
        raise MissingFileError(path, "file", "the video is missing; copy the dataset again.")
    times, index = _times(path)
    needed = sum(span.length for span in spans)
    if len(times) < needed:
        yield error(
            path, "frames",
            f"holds {len(times)} frames of the {needed} that the episodes in it have "
            f"(its index lists {index}); it was cut off, copy or encode it again.",
        )  # fmt: skip
        return
    if len(times) > needed and len(spans) == 1:
        yield warning(
            path, "frames",
            f"holds {len(times)} frames, but episode {spans[0].episode} has {needed}; the last "
            "ones are not read, and all may be out of step with the rows.",
        )  # fmt: skip
    first = 0
    for span in spans:
        frame = int(np.abs(times - span.start).argmin())
        if frame < first:
            yield error(
                path, "from_timestamp",
                f"lets episode {span.episode} begin {first - frame} frames before the one before "
                "it ends; its pictures are out of step, copy or convert the dataset again.",
            )  # fmt: skip
            return
        drift = abs(float(times[frame]) - span.start) * fps
        if drift > _DRIFT:
            yield warning(
                path, "from_timestamp",
                f"is {drift:.2f} frames off the frame that episode {span.episode} begins with; "
                "the nearest is read.",
            )  # fmt: skip
            return
        first = frame + span.length
        if first > len(times):
            yield error(
                path, "frames",
                f"ends {first - len(times)} frames before episode {span.episode} does; it was cut "
                "off, copy or encode it again.",
            )  # fmt: skip
            return


def _pictures(
    dataset: Dataset, camera: str, present: list[int], report: Report
) -> Iterator[Problem]:
    """A few episodes decode, in the size that is declared, and are as varied as is written."""
    looks = np.linspace(0, len(present) - 1, _LOOKS) if present else ()
    chosen = sorted({present[int(i)] for i in looks})
    seen = []
    for done, episode in enumerate(chosen):
        report(f"Pictures of {camera}", done, len(chosen))
        try:
            frames = dataset.frames(episode, camera)
        except DatasetError as raised:
            yield from_error(raised)
            return
        seen.append(frames[:: max(1, len(frames) // _FRAMES), ::_PIXELS, ::_PIXELS])
        height, width = frames.shape[1:3]
        shape = dataset.features[camera]["shape"]
        if Counter((height, width)) - Counter(shape):
            yield error(
                dataset.root, f"feature '{camera}'",
                f"declares {list(shape)}, but the frames are {height}x{width}; correct the shape.",
            )  # fmt: skip
            return
    if seen:
        yield from _spread(dataset, camera, np.concatenate(seen).reshape(-1, 3).std(axis=0) / 255)


def _spread(dataset: Dataset, camera: str, seen: Float64[np.ndarray, "3"]) -> Iterator[Problem]:
    folder = open_folder(dataset.root)
    written: Any = written_statistics(folder).get(camera)
    if not isinstance(written, dict):
        return
    value = numbers(written.get("std"))
    if value is None or len(value) != 3:
        yield warning(
            folder.path("meta/stats.json"), f"'{camera}', 'std'",
            "holds no 3 numbers; pictures are not scaled by it here.",
        )  # fmt: skip
    elif (value < _SMALLEST_SPREAD * seen).any():
        channel = int((value / np.maximum(seen, 1e-9)).argmin())
        yield warning(
            folder.path("meta/stats.json"), f"'{camera}', 'std'",
            f"is {value[channel]:.3g} in channel {channel} where pictures have about "
            f"{seen[channel]:.2g} (squares of bytes that overflow, in LeRobot up to 0.5); pictures "
            "are not scaled by it here, other codes do.",
        )  # fmt: skip


def _times(path: Path) -> tuple[Float64[np.ndarray, "n"], int]:
    """Times in seconds, ascending, of the frames whose bytes are really there, and how many the
    file's index lists."""
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
        raise DatasetError(
            path, "file",
            "is no readable video, its index is missing or damaged; it was cut off, copy or "
            "encode it again.",
        ) from None  # fmt: skip
