"""The comparison of solvers: the methods that are left out are what they are called, and what is
measured of a policy that takes seconds to train."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.terminal import Console
from tests.helpers.tools.small_run import one_device
from tools.bench.models.solver import SolverSizes, errors, heun, midpoint, run
from tools.recipes import training
from tools.recipes.presets import load_preset
from tools.recipes.recording import RecordConfig, record_dataset

HELPERS = Path(__file__).parents[2] / "helpers"
START = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (3, 5, 2)), jnp.float32)
SUITE = f"{HELPERS}/sim/point_suite.py:POINTS"


@pytest.mark.parametrize("solve", [midpoint, heun])
def test_methods_of_two_evaluations_are_of_the_second_order(solve):
    end = 1 / (1 / np.asarray(START, np.float64) + 0.5)
    coarse, fine = (
        float(np.mean(np.asarray(solve(lambda x, t: t * x**2, START, steps)) - end))
        for steps in (10, 20)
    )
    assert coarse / fine == pytest.approx(4, rel=0.2)


def test_every_method_is_counted_by_its_evaluations():
    calls = []

    def velocity(x, t):
        calls.append(float(t))
        return t * x**2

    assert midpoint(velocity, START, 2) is not None
    assert calls == pytest.approx([1, 0.75, 0.5, 0.25])
    calls.clear()
    assert heun(velocity, START, 2) is not None
    assert calls == pytest.approx([1, 0.5, 0.5])
    found = errors(lambda x, t: t * x**2, START, (1, 2, 3, 4), 1)
    missing = {name: [n for n, x in row.items() if x is None] for name, row in found.items()}
    assert missing == {"euler": [], "ab2": [], "midpoint": ["1", "3"], "heun": ["2", "4"]}
    assert found["heun"]["1"] == found["euler"]["1"] == found["ab2"]["1"]
    assert found["ab2"]["4"] < found["euler"]["4"] < found["euler"]["2"]


def test_a_policy_that_is_not_there_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tools.demo --task lift --out .*demo"):
        run(Console(quiet=True), SolverSizes({"demo": "tabletop-lift"}, tmp_path))


@pytest.mark.slow
def test_a_policy_acts_by_every_solver_and_is_not_asked_twice(tmp_path):
    folder, small = tmp_path / "points", load_preset(f"{HELPERS}/tools/small_run.py:SMALL")
    record_dataset(RecordConfig(folder / "dataset", SUITE, episodes=4, image_size=32))
    preset = replace(small, trainer=replace(small.trainer, steps=4, save_every=4, eval_every=4))
    sizes = SolverSizes(
        {"points": SUITE},
        tmp_path,
        evaluations=(1, 2),
        observations=3,
        starts=2,
        held_out=2,
        judged=(("ab2", 2),),
    )
    with one_device():
        training.run(training.Paths(str(folder / "dataset"), folder), preset, Console(quiet=True))
        found = run(Console(quiet=True), sizes)
    measured = found["policies"]["points"]
    assert set(measured["errors"]["ab2"]) == {"1", "2"}
    assert all(row[n]["episodes"] == 2 for row in measured["validation"].values() for n in "12")
    assert list(measured["held_out"]) == ["ab2"]
    kept = {path: path.read_text() for path in folder.glob("solver-*.jsonl")}
    assert len(kept) == 2
    with one_device():
        again = run(Console(quiet=True), sizes)
    assert json.dumps(again) == json.dumps(found)
    assert kept == {path: path.read_text() for path in kept}
