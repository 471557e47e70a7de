"""Families after the same minutes, on a suite and a model that take seconds."""

from pathlib import Path

import pytest

from models.files.terminal import Console
from tests.helpers.tools import peer
from tests.helpers.tools.small_run import MODEL, SMALL, one_device
from tools.bench import families
from tools.bench.families import FamilySizes, run
from tools.bench.learn import ShownTask
from tools.recipes import training

HELPERS = Path(__file__).parents[2] / "helpers"
TASK = ShownTask(suite=f"{HELPERS}/sim/point_suite.py:POINTS", episodes=6, image_size=32)
SIZES = FamilySizes(
    minutes=0.002,
    seeds=2,
    pace=4,
    rounds=1,
    families={"small": f"{HELPERS}/tools/small_run.py:SMALL"},
    tasks=((TASK, 3),),
)


@pytest.mark.slow
def test_every_seed_takes_the_steps_of_the_minutes_and_what_was_found_is_kept(
    tmp_path, monkeypatch
):
    python, plot = peer.executable(tmp_path / "python"), tmp_path / "families.svg"
    monkeypatch.setattr(families, "_beside", lambda: {"tiny": MODEL})
    with one_device():
        found = run(Console(quiet=True), python, tmp_path, SIZES, plot)
    row = found["tasks"]["POINTS"]["small"]
    assert row["samples"] == row["steps"] * SMALL.rows.number * SMALL.rows.samples
    assert row["starts"] == 3
    assert len(row["successes"]) == 2
    assert row["success_range"][0] <= row["success"] <= row["success_range"][1]
    assert found["ratio"] == found["steps"]["tiny"]["ratio"]
    assert "POINTS" in plot.read_text()

    def refuse(*_: object) -> None:
        raise AssertionError("what was found is not found again")

    monkeypatch.setattr(training, "run", refuse)
    assert run(Console(quiet=True), python, tmp_path, SIZES, plot)["tasks"] == found["tasks"]
