"""The comparison of roundings: what is rounded, and what is measured of a policy that takes seconds
to train."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from models.model import init_params
from models.terminal import Console
from tests.helpers.models.pi_samples import CONFIG
from tests.helpers.tools.small_run import one_device
from tools.bench.models.rounding import KINDS, SCALES, TOWERS, RoundingSizes, rounded, run
from tools.recipes import training
from tools.recipes.presets import load_preset
from tools.recipes.recording import RecordConfig, record_dataset

HELPERS = Path(__file__).parents[2] / "helpers"
SUITE = f"{HELPERS}/sim/point_suite.py:POINTS"


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_kernels_of_the_towers_asked_for_are_rounded_to_three_bits_and_nothing_else(scale):
    params = init_params(CONFIG.build(), jax.random.key(0))
    for towers, begins in TOWERS.items():
        found = rounded(params, towers, scale)
        changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), params, found)
        for path, is_changed in jax.tree_util.tree_leaves_with_path(changed):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            kernel = name.startswith(begins) and name.endswith(("/kernel", "embedding"))
            assert is_changed == kernel, name
        for x, y in zip(*map(jax.tree.leaves, (params, found)), strict=True):
            assert np.abs(np.asarray(x) - y).max() <= np.abs(x).max() / 16


def test_a_policy_that_is_not_there_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tools.demo --task lift --out .*demo"):
        run(Console(quiet=True), RoundingSizes({"demo": "tabletop-lift"}, tmp_path))


@pytest.mark.slow
def test_every_rounding_of_a_policy_is_measured(tmp_path):
    folder, small = tmp_path / "points", load_preset(f"{HELPERS}/tools/small_run.py:SMALL")
    record_dataset(RecordConfig(folder / "dataset", SUITE, episodes=4, image_size=32))
    preset = replace(small, trainer=replace(small.trainer, steps=4, save_every=4, eval_every=4))
    sizes = RoundingSizes({"points": SUITE}, tmp_path, observations=3, starts=2)
    with one_device():
        training.run(training.Paths(str(folder / "dataset"), folder), preset, Console(quiet=True))
        found = run(Console(quiet=True), sizes)["policies"]["points"]
    assert all(
        0 < row["error"] < 0.5 for each in found["kernels"].values() for row in each.values()
    )
    activations = found["activations"]
    assert activations.pop("none")["error"] == 0
    assert all(0 < row["error"] < 0.5 for row in activations.values())
    assert all(row["episodes"] == 2 for row in activations.values())
    kept = found["kept"]
    assert [*kept] == [kind + also for kind in KINDS for also in ("", ", calibrated")]
    assert all(0 < row["error"] < 1 and row["episodes"] == 2 for row in kept.values())
    assert all(kept[kind]["error"] != kept[f"{kind}, calibrated"]["error"] for kind in KINDS)
