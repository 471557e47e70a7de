"""The dataset that the ladder is measured on: LeRobot v3.0 with h264, made once by our own writer.

A robot with two cameras of 256 × 256 (LIBERO's size) and instructions of 4 to 60 words, most of
them short. Pictures are textures that a camera pans over with a sensor's noise, so that a frame
costs what a real one does; a keyframe every second frame is what LeRobot itself writes.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from data.frames import ACTION, STATE
from data.lerobot.growing import is_growing
from data.lerobot.recording import video_feature
from data.lerobot.writer import DatasetWriter

CAMERAS = ("observation.images.front", "observation.images.wrist")
_STATE, _ACTION, _FPS = 8, 7, 10
_WORDS = (
    "pick lift push pull open close turn place the a red blue green small large block bowl cup "
    "drawer plate stove shelf left right behind before onto into from and then slowly until it is "
    "there gripper handle"
)
_SHORTEST, _LONGEST = 4, 60


def make(root: Path, episodes: int, frames: int, size: int) -> Path:
    """The dataset at `root`, recorded unless it is there: `episodes` of `frames` frames, pictures
    with `size` pixels a side."""
    if root.exists() and not is_growing(root):
        return root
    shutil.rmtree(root, ignore_errors=True)  # what an interrupted benchmark left
    draw = np.random.default_rng(0)
    numbers = {STATE: _STATE, ACTION: _ACTION}
    columns = {n: {"dtype": "float32", "shape": (d,), "names": None} for n, d in numbers.items()}
    features = columns | dict.fromkeys(CAMERAS, video_feature((size, size, 3)))
    with DatasetWriter(root, fps=_FPS, features=features) as writer:
        for task in instructions(draw, episodes):
            writer.add_episode(
                {name: walk(draw, frames, dims) for name, dims in numbers.items()},
                {camera: np.stack(list(video(draw, frames, size))) for camera in CAMERAS},
                task,
            )
    return root


def instructions(draw: np.random.Generator, number: int) -> Iterator[str]:
    """Tasks of 4 to 60 words in random order; the logarithms of their lengths are spread evenly."""
    lengths = np.geomspace(_SHORTEST, _LONGEST, number).round().astype(int)
    for length in draw.permutation(lengths).tolist():
        yield " ".join(draw.choice(_WORDS.split(), length).tolist())


def walk(draw: np.random.Generator, frames: int, dims: int) -> Float32[np.ndarray, "t d"]:
    """A random walk."""
    return np.cumsum(draw.normal(scale=0.1, size=(frames, dims)), axis=0).astype(np.float32)


def video(
    draw: np.random.Generator, frames: int, size: int
) -> Iterator[UInt8[np.ndarray, "s s 3"]]:
    """A smooth texture that the camera pans over, and noise of each frame's own."""
    coarse = draw.uniform(30, 220, (16, 24, 3))
    rows = np.linspace(0, len(coarse) - 1.001, size)
    columns = np.linspace(0, coarse.shape[1] - 1.001, size + 2 * frames)
    scene = _between(_between(coarse, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
    for step in range(frames):
        seen = scene[:, 2 * step : 2 * step + size]
        noise = draw.standard_normal(seen.shape, np.float32)
        yield np.clip(seen + 4 * noise, 0, 255).astype(np.uint8)


def _between(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Values along the first axis at these places, by linear interpolation."""
    low = at.astype(int)
    part = (at - low)[:, None, None]
    return values[low] * (1 - part) + values[low + 1] * part
