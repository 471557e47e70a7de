"""The record of the whole suite: each part's counts and seconds, and the last run of each kind."""

from pathlib import Path

import pytest

from tests.helpers import everything
from tests.helpers.everything import kept, run_part, timed

TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_passes(number): pass

@pytest.mark.slow
def test_is_skipped(): pytest.skip("why")

@pytest.mark.slow
def test_fails(): assert False

@pytest.mark.slow
def test_is_in_error(absent): pass

def test_is_of_another_part(): pass
"""


@pytest.mark.slow
def test_a_part_is_counted_with_the_seconds_of_its_files_and_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n  drill: kills\n")
    folder = tmp_path / "tests" / "rl"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    told, seconds = run_part("slow", ("tests/rl",), tmp_path)
    assert run_part("drill", ("tests/rl",), tmp_path) is None
    assert [told[key] for key in ("passed", "skipped", "failed")] == [2, 1, 2]
    assert list(seconds["slow"]) == ["tests/rl/test_small.py"]
    monkeypatch.setattr(everything, "LONG", -1.0)
    assert run_part("slow", ("tests/rl",), tmp_path)[1]["slow"].keys() == seconds["drills"].keys()
    assert "tests/rl/test_small.py::test_passes[1]" in seconds["drills"]


def test_a_run_takes_the_place_of_the_last_one_of_its_kind_alone() -> None:
    def run(python: str, part: str, passed: int) -> dict:
        fixed = {"jax": "0.12.0", "commit": "c", "load_before": 0.1}
        return {"python": python, "part": part, "passed": passed, **fixed}

    known = {"runs": [run("3.11.7", "fast", 1), run("3.13.0", "fast", 2)]}
    runs = kept(kept(known, run("3.13.0", "slow, rl", 3)), run("3.13.0", "fast", 4))["runs"]
    found = [(each["python"], each["part"], each["passed"]) for each in runs]
    assert found == [("3.11.7", "fast", 1), ("3.13.0", "fast", 4), ("3.13.0", "slow, rl", 3)]


def test_seconds_of_a_part_take_the_place_of_those_of_its_package_alone() -> None:
    known = {"slow": {"tests/rl/gone.py": 1.0, "tests/sim/b.py": 2.0}, "drills": {}}
    seconds = {"slow": {"tests/rl/a.py": 3.0}, "drills": {"tests/rl/a.py::test": 3.0}}
    found = timed(known, "slow, rl", seconds)
    assert found == {"slow": {"tests/rl/a.py": 3.0, "tests/sim/b.py": 2.0}, "drills": {}}
    assert timed(known, "fast", seconds) == known
