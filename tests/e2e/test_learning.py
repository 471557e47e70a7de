"""Policies learn: the demo's fast task in closed loop, real demonstrations on held-out episodes.

Both run the shipped commands in a process of their own, with a user's settings and not the tests'.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.metrics import read_metrics

ROOT = Path(__file__).parents[2]
METAWORLD = ROOT.parent / "shared/data/metaworld_v30"


def command(*arguments: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
def test_the_fast_demo_reaches_what_it_is_told_and_uses_word_and_image(tmp_path):
    command("tools.demo", "--task", "reach", "--out", str(tmp_path / "demo"))
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["success"] >= 0.9
    assert summary["untrained_success"] <= 0.05
    assert summary["wrong_prompt_success"] <= 0.1
    assert summary["wrong_prompt_named_success"] >= 0.8
    assert summary["blank_image_success"] <= 0.1
    assert summary["fill"] >= 0.97


@pytest.mark.slow
def test_actions_on_held_out_metaworld_episodes_are_far_better_than_their_mean(tmp_path):
    if not METAWORLD.exists():
        pytest.skip("the Meta-World recording is not beside this checkout (../shared/data)")
    steps = ("--trainer.steps", "250", "--trainer.eval-every", "250")
    command("tools.train", "--data", str(METAWORLD), "--out", str(tmp_path / "run"), *steps)
    (row,) = (row for row in read_metrics(tmp_path / "run") if "val_action_mse" in row)
    assert row["val_action_mse"] < 0.5 * row["val_mean_action_mse"]
