"""One compiled physics for all of the tabletop's tests."""

import pytest

from sim.environments.tabletop import Tabletop
from sim.environments.tasks import TASKS


@pytest.fixture(scope="session")
def envs() -> dict[str, Tabletop]:
    """One environment per task, few lanes each."""
    return {task: Tabletop(task, group_size=16) for task in TASKS}
