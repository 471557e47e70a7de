"""A small recording of two cameras and six episodes, and how it is written."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.lerobot.writer import DatasetWriter

SHARED = Path(__file__).parents[4] / "shared"
LENGTHS = (7, 12, 5, 9, 12, 8)
TASKS = ("lift the red block", "reach the green block", "push it")
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "grip"]},
    FRONT: {"dtype": "video", "shape": (48, 64, 3), "names": ["height", "width", "channels"]},
    WRIST: {"dtype": "video", "shape": (48, 48, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": (3,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
}


class Episode(NamedTuple):
    columns: dict[str, np.ndarray]
    frames: dict[str, np.ndarray]
    task: str


def make_episode(number: int, length: int) -> Episode:
    """Pictures in which every frame of every episode looks different, and random numbers."""
    rng = np.random.default_rng(number)
    columns = {
        "observation.state": rng.normal(size=(length, 4)).astype(np.float32),
        "action": rng.normal(size=(length, 3)).astype(np.float32),
        "next.success": np.arange(length) == length - 1,
    }
    frames = {
        camera: np.stack(
            [_picture(number, step, *FEATURES[camera]["shape"][:2]) for step in range(length)]
        )
        for camera in (FRONT, WRIST)
    }
    return Episode(columns, frames, TASKS[number % len(TASKS)])


def _picture(number: int, step: int, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    picture = np.stack([60 + 2 * x, 60 + 2 * y, np.full_like(x, 30 * number + 40)], axis=-1)
    picture[8:16, 3 * step : 3 * step + 8] = 230
    return picture.astype(np.uint8)


def write(path: Path, episodes: list[Episode], **options: float) -> Path:
    with DatasetWriter(path, fps=20, features=FEATURES, robot_type="test", **options) as writer:
        for episode in episodes:
            writer.add_episode(*episode)
    return path


PARQUET = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def psnr(a, b):
    return 10 * np.log10(255**2 / ((a.astype(float) - b) ** 2).mean())


def assert_same_episodes(dataset, episodes):
    for i, (columns, frames, task) in enumerate(episodes):
        read = dataset.episode(i)
        assert read["task"] == task
        for name, values in columns.items():
            assert np.array_equal(read[name].reshape(values.shape), values)
        for camera, pictures in frames.items():
            assert read[camera].shape == pictures.shape
            for step, picture in enumerate(read[camera]):
                assert psnr(picture, pictures[step]) > 32
                nearest = np.argmin(((pictures.astype(float) - picture) ** 2).mean(axis=(1, 2, 3)))
                assert nearest == step
