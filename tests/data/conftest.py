"""A small recording of two cameras, written once, and ways to damage a copy of it."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from data.files.checksums import CHECKSUMS
from data.lerobot.writer import DatasetWriter

SHARED = Path(__file__).parents[2].parent / "shared"
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


@pytest.fixture(scope="session")
def episodes() -> list[Episode]:
    return [make_episode(number, length) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, episodes: list[Episode]) -> Path:
    return write(tmp_path_factory.mktemp("recorded") / "dataset", episodes)


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    """The recording without its checksums, for whatever a test will change in it."""
    path = Path(shutil.copytree(recorded, tmp_path / "copy"))
    (path / CHECKSUMS).unlink()
    return path


@pytest.fixture(scope="session")
def metaworld() -> Path:
    path = SHARED / "data/metaworld_v30"
    if not path.is_dir():
        pytest.skip(f"{path} is not here: LeRobot's own recording is not part of the repository")
    return path
