"""One compiled physics for all of the tabletop's tests."""

import pytest

from sim.tabletop import Tabletop


@pytest.fixture(scope="session")
def envs() -> dict[str, Tabletop]:
    """One environment per task, few lanes each."""
    return {task: Tabletop(task, lanes=16) for task in ("reach", "lift", "push")}
