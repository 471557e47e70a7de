"""Time to success, on a suite and a model that take seconds."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.files.terminal import Console
from sim.statistics import Rate
from tests.helpers.tools.small_run import one_device
from tools.bench.learn import BASELINE, LearnSizes, LearntTask, Setting, run, succeeds
from tools.recipes import training

HELPERS = Path(__file__).parents[2] / "helpers"
TASK = LearntTask(
    suite=f"{HELPERS}/sim/point_suite.py:POINTS",
    episodes=6,
    steps=8,
    preset=f"{HELPERS}/tools/small_run.py:SMALL",
    tasks=("points",),
    image_size=32,
    success=0.0,
)
SIZES = LearnSizes(
    seeds=1,
    checks=2,
    starts=2,
    tasks=(TASK,),
    settings={
        BASELINE: Setting(lambda preset: preset, (1e-3, 2e-3)),
        "many chunks": Setting(
            lambda preset: replace(preset, model=preset.model.changed(chunks=4))
        ),
    },
)

LEARNT = "POINTS-points"
UNCHANGED = {BASELINE: Setting(lambda preset: preset)}


@pytest.mark.slow
def test_the_first_checkpoint_that_succeeds_counts_and_what_was_found_is_kept(
    tmp_path, monkeypatch
):
    console = Console(quiet=True)
    with one_device():
        found = run(console, LEARNT, tmp_path, SIZES)
    samples = 32 * TASK.steps // SIZES.checks
    for row in found["rows"].values():
        assert row["reached"] == 1
        assert (row["samples"], row["samples_range"]) == (samples, [samples, samples])
        assert 0 < row["seconds_range"][0] <= row["seconds"] <= row["seconds_range"][1]
    assert found["rows"][BASELINE]["tuning_runs"] == 2
    assert found["ratio"] >= 1

    impossible = replace(SIZES, tasks=(replace(TASK, success=1.1),), settings=UNCHANGED)
    with one_device():
        never = run(console, LEARNT, tmp_path, impossible)["rows"][BASELINE]
    assert (never["reached"], never["samples"], never["seconds"]) == (0, None, None)

    def refuse(*_: object) -> None:
        raise AssertionError("what was found is not found again")

    monkeypatch.setattr(training, "run", refuse)
    assert run(console, LEARNT, tmp_path, SIZES) == found
    with pytest.raises(ValueError, match="--task is 'cook'; choose one of POINTS-points"):
        run(console, "cook", tmp_path, SIZES)


@pytest.mark.parametrize(
    ("failures", "verdict", "blocks"),
    [((), True, 4), ((0, 1), False, 1), ((0, 15), False, 4), ((15,), True, 4)],
)
def test_a_checkpoint_acts_only_until_too_many_starts_have_failed(failures, verdict, blocks):
    acted = []

    def evaluate(block: range, *_: object, **__: object) -> SimpleNamespace:
        acted.append(block)
        return SimpleNamespace(success=Rate.of(start not in failures for start in block))

    assert succeeds(evaluate, range(16), replace(TASK, success=0.9), block=4) is verdict
    assert len(acted) == blocks


def test_an_episode_that_the_simulator_lost_is_no_success_of_a_checkpoint():
    def evaluate(block: range, *_: object, **__: object) -> SimpleNamespace:
        kept = [start for start in block if start != 1]
        return SimpleNamespace(success=Rate.of(start != 0 for start in kept))

    assert not succeeds(evaluate, range(10), replace(TASK, success=0.9), block=5)
    assert succeeds(evaluate, range(11), replace(TASK, success=0.9), block=5)
