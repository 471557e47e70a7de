"""Settings that must stand before JAX starts: 8 forced devices, the thread pool that keeps them
from deadlocking on few cores, compilation without optimising (a third of the time, and tests mostly
compile) where XLA_FLAGS does not ask for another level, and one compilation cache for all tests, of
small programs too, since many compile the same. Garbage is looked for seldom: what tracing makes
stays. No bytecode is kept: of a command run in this process it would hold the checks of
tests/shapes.py, under the name where the command itself looks for its own; what tests start keeps
its own, whatever the environment says. Ctrl-C is heard though a shell began the tests as a
background job, which ignores it: some of them press it. JAX keeps its CUDA plugin where there is no
GPU, as some tests compile for one. What is left is set as for all commands."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from jaxtyping import config

CACHE = Path(__file__).parent.parent / ".jax_cache"

os.environ["NPROC"] = "32"
os.environ["XLA_FLAGS"] = (
    f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
    " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
gc.set_threshold(50_000, 20, 100)
sys.dont_write_bytecode = True
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
signal.signal(signal.SIGINT, signal.default_int_handler)

import tools  # noqa: E402, F401
from tests import shapes  # noqa: E402  it imports JAX, which reads those settings
from tests.helpers import rotation  # noqa: E402
from tests.helpers.mappings import give_programs_up  # noqa: E402

shapes.install(["models", "data", "parallel", "sim", "rl", "tools"])


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "of the slow tests and drills, those that CI takes where this commit landed last"
    parser.addoption("--since", metavar="COMMIT", help=f"{about} (tests/helpers/rotation.py)")


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if since := config.getoption("since"):
        taken = rotation.take(items, since)
        config.hook.pytest_deselected(items=list({*items} - {*taken}))
        items[:] = taken


@pytest.fixture
def unchecked():
    """Lets a test give a shape or dtype that a signature forbids, to see what refuses it."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="module")
def within_the_limit_of_mappings():
    """Between the modules; one of very many programs may ask more often."""
    yield
    give_programs_up()
