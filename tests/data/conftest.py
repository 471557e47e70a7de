"""A small recording of two cameras, written once, and a copy of it to damage."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.files.checksums import CHECKSUMS
from tests.helpers.data.recording import LENGTHS, SHARED, Episode, make_episode, write


@pytest.fixture(autouse=True)
def usual_priority() -> Iterator[None]:
    """SVT-AV1, as root, leaves the thread that encodes at real-time priority, which all that begins
    later inherits and starves the machine with."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    yield
    os.sched_setscheduler(0, *before)


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
