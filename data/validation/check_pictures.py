"""Checks of cameras: images that decode, in the declared size.

A few episodes of each camera are decoded, for a dataset of any format;
data/lerobot/checks/check_cameras.py also checks LeRobot's videos.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, UInt8

from data.dataset import Dataset, Report, depth_cameras
from data.errors import DatasetError, Problem, error, from_error, warning
from data.files.job import Done, run_job

_LOOKS, _FRAMES, _PIXELS = 3, 10, 4


def check_presence(
    dataset: Dataset, camera: str, present: Sequence[int], promised: bool = False
) -> Iterator[Problem]:
    """A camera may be absent, but not in all episodes.

    Args:
      present: episodes that have it.
      promised: True if all episodes should have it, as v2.1's number of videos says.
    """
    episodes = len(dataset.lengths)
    absent = np.setdiff1d(np.arange(episodes), present)
    if len(absent) == 0:
        return
    if len(absent) == episodes:
        yield error(
            dataset.root, f"camera '{camera}'",
            "is missing in all episodes, though the metadata declares it; download its videos or "
            "images, or remove the camera from the metadata.",
        )  # fmt: skip
        return
    tell, then = (
        (error, "though meta/info.json counts all videos; copy the dataset again.")
        if promised
        else (warning, "which are trained without it.")
    )
    yield tell(
        dataset.root, f"camera '{camera}'",
        f"is missing in {len(absent)} of {episodes} episodes, the first of them "
        f"{absent[0]}, {then}",
    )  # fmt: skip


def check_depth(dataset: Dataset) -> Iterator[Problem]:
    """Warns of depth cameras."""
    for camera in depth_cameras(dataset):
        yield warning(
            dataset.root, f"camera '{camera}'",
            "is a depth camera, which training and viewing leave out; editing, joining and "
            "converting to v3.0 keep it.",
        )  # fmt: skip


def check_pictures(
    dataset: Dataset, camera: str, present: Sequence[int], report: Report
) -> Generator[Problem, None, Float64[np.ndarray, "3"] | None]:
    """Checks that a few episodes decode, in the declared size.

    Returns:
      The standard deviation of their channels, for values of 0 to 1; None if no episode is as it
      should be.
    """
    looks = np.linspace(0, len(present) - 1, _LOOKS) if present else ()
    chosen = sorted({present[int(i)] for i in looks})
    report(f"Images of {camera}", 0, len(chosen))
    seen = []
    looking = run_job(_Looking(dataset, camera), chosen)
    for done, (problem, frames) in enumerate(looking, 1):
        report(f"Images of {camera}", done, len(chosen))
        if problem is not None:
            yield problem
            return None
        seen.append(frames)
    return np.concatenate(seen).reshape(-1, 3).std(axis=0) / 255 if seen else None


@dataclass(frozen=True)
class _Looking:
    """The check of a camera's episodes as a job: an episode's problem, or some of its pixels."""

    dataset: Dataset
    camera: str

    def __call__(
        self, episode: int, _: Done
    ) -> tuple[Problem | None, UInt8[np.ndarray, "t h w 3"]]:
        dataset, camera, none = self.dataset, self.camera, np.zeros((0, 0, 0, 3), np.uint8)
        try:
            frames = dataset.frames(episode, camera)
        except DatasetError as raised:
            return from_error(raised), none
        expected = (int(dataset.lengths[episode]), *frames.shape[1:3], 3)
        if frames.dtype != np.uint8 or frames.shape != expected:
            problem = error(
                dataset.file(episode), f"camera '{camera}'",
                f"has {frames.dtype} {list(frames.shape)} in episode {episode}, expected uint8 "
                "[frames, height, width, 3]; correct the files or the reader.",
            )  # fmt: skip
            return problem, none
        height, width = frames.shape[1:3]
        shape = dataset.features[camera]["shape"]
        if Counter((height, width)) - Counter(shape):
            problem = error(
                dataset.root, f"feature '{camera}'",
                f"declares {list(shape)}, but the frames are {height}x{width}; correct the shape.",
            )  # fmt: skip
            return problem, none
        return None, frames[:: max(1, len(frames) // _FRAMES), ::_PIXELS, ::_PIXELS].copy()
