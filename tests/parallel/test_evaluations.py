"""Checkpoints that stay, and runs that end early, by what evaluations found."""

import re
from dataclasses import replace

import pytest

from parallel import checkpoint
from parallel.evaluations import Evaluations
from parallel.hooks import Hook
from parallel.mesh import make_mesh
from parallel.monitor.metrics import read_metrics
from parallel.runs.retention import Retention
from parallel.trainer import TrainerConfig, check_start
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, position

CONFIG = TrainerConfig(
    train_steps=24,
    save_every=2,
    eval_every=2,
    keep=1,
    keep_every=6,
    keep_best="val_loss",
    patience=3,
)
LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 0.5, 10: float("nan"), 12: 0.5, 14: 0.7, 16: 0.1}


def run(directory, config, resume=False):
    where = Run(directory, config={"model": "toy"}, assets={})
    measured = Hook(2, lambda step, state, stopping: {"val_loss": LOSSES[step]})
    options = {"resume": resume, "hooks": [measured]}
    return train(Denoiser(), RULES, batches, position, where, config, OPTIMIZER, **options)


def judged(values, patience=2):
    found = Evaluations("val_loss", patience)
    for k, value in enumerate(values, 1):
        found.add(10 * k, {"val_loss": value})
    return found.verdict


def test_the_last_every_nth_and_the_best_stay():
    steps = [10, 20, 30, 40, 50]
    best = {10: 2.0, 30: 0.5, 40: 0.7, 99: 0.1}
    assert Retention(1, 20, best).stays(steps) == {20, 30, 40, 50}
    assert Retention(2).stays(steps) == {40, 50}
    assert Retention(1, best={10: 1.0, 20: 1.0}).stays(steps) == {10, 50}
    assert Retention(3).stays([10]) == {10}


def test_a_run_is_judged_by_evaluations_without_a_better_one():
    assert judged([3, 2, 1]) == judged([3, 2, 2.5]) == judged([1, 2, 0.5, 3]) == ""
    assert judged([3, 2, 2, 5], patience=0) == ""
    said = "val_loss was lowest after step 20 (2), and not lower in the 2 evaluations since"
    assert judged([3, 2, 2, 5]) == judged([3, 2, float("nan"), float("inf")]) == said
    nan = float("nan")
    assert judged([nan, nan]) == "val_loss was not finite in any of 2 evaluations"


@pytest.mark.slow
def test_a_run_stops_early_says_so_and_resumes_to_the_same_end(tmp_path, capsys):
    whole = run(tmp_path / "whole", CONFIG)
    assert (whole.step, whole.finished) == (14, True)
    kept = checkpoint.steps(tmp_path / "whole" / "checkpoints")
    assert kept == [6, 8, 12, 14]  # every 6th, the best, the last
    said = capsys.readouterr().out
    assert re.search(
        r"Stopped early after step 14 of 24: val_loss was lowest after step 8 \(0\.5\), and not "
        r"lower in the 3 evaluations since\. The best checkpoint is \S+/whole/checkpoints/8; "
        r"--resume with --trainer\.patience 0 continues from the last\.",
        said,
    )
    run(tmp_path / "parts", replace(CONFIG, train_steps=10))
    assert checkpoint.steps(tmp_path / "parts" / "checkpoints") == [6, 8, 10]
    again = run(tmp_path / "parts", CONFIG, resume=True)
    assert again.step == 14
    assert checkpoint.steps(tmp_path / "parts" / "checkpoints") == kept
    before = (tmp_path / "parts" / "metrics.jsonl").read_bytes()
    once_more = run(tmp_path / "parts", CONFIG, resume=True)
    assert (once_more.step, once_more.finished) == (14, True)
    assert "Stopped early after step 14" in capsys.readouterr().out
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == before
    assert (
        run(tmp_path / "parts", replace(CONFIG, train_steps=16, patience=0), resume=True).step == 16
    )
    assert checkpoint.steps(tmp_path / "parts" / "checkpoints") == [6, 12, 16]
    assert [row["val_loss"] for row in read_metrics(tmp_path / "parts") if "val_loss" in row][
        -1
    ] == 0.1


def test_a_run_that_may_stop_early_keeps_the_best_that_it_names(tmp_path, capsys):
    config = replace(CONFIG, keep_best="", keep_every=0)
    for resume in (False, True):
        assert run(tmp_path, config, resume).step == 14
        assert f"The best checkpoint is {tmp_path}/checkpoints/8; " in capsys.readouterr().out
    assert checkpoint.steps(tmp_path / "checkpoints") == [8, 14]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval_every": 0}, "keep_best is val_loss, but trainer.eval_every is 0"),
        ({"eval_every": 0, "keep_best": ""}, "patience is 3, but trainer.eval_every is 0"),
        ({"save_every": 5}, "keep_best is val_loss, .* every 5 steps .* evaluations made every 2 "),
        (
            {"save_every": 5, "keep_best": ""},
            "patience is 3, .* every 5 steps .* evaluations made every 2 ",
        ),
    ],
)
def test_settings_by_which_nothing_could_be_judged_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        check_start(8, make_mesh(), replace(CONFIG, **changes), OPTIMIZER)


def test_a_metric_that_evaluations_do_not_give_is_named_with_those_that_they_give():
    with pytest.raises(ValueError, match=r"judged by 'val_lost' .* evaluations give a, val_loss"):
        Evaluations("val_lost").add(10, {"val_loss": 1.0, "a": 2.0})
