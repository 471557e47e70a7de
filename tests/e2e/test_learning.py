"""A policy learns from real demonstrations: actions on held-out episodes."""

import pytest

from parallel.monitor.metrics import read_metrics
from tests.e2e.shipped import ROOT, command

METAWORLD = ROOT.parent / "shared/data/metaworld_v30"


@pytest.mark.slow
def test_actions_on_held_out_metaworld_episodes_are_far_better_than_their_mean(tmp_path):
    if not METAWORLD.exists():
        pytest.skip("the Meta-World recording is not beside this checkout (../shared/data)")
    steps = ("--trainer.train-steps", "250", "--trainer.eval-every", "250")
    command("tools.train", "--data", str(METAWORLD), "--out", str(tmp_path / "run"), *steps)
    (row,) = (row for row in read_metrics(tmp_path / "run") if "val_action_mse" in row)
    assert row["val_action_mse"] < 0.5 * row["val_mean_action_mse"]
