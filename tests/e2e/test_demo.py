"""The demo as a user runs it, shrunk to half its demonstrations and steps: what it leaves behind,
that the policy learnt to lift what it is told, and that it cannot eat somebody's files."""

import json

import pytest

from data import open_dataset
from models import load_policy
from models.files.terminal import Console
from parallel.monitor.metrics import read_metrics
from tests.e2e.shipped import command
from tools import demo

SHRUNK = ("--episodes", "1024", "--train-steps", "1200", "--evaluations", "64")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "demo"
    command("tools.demo", *SHRUNK, "--out", str(path))
    return path


@pytest.mark.slow
def test_the_demo_leaves_a_dataset_a_policy_a_summary_and_a_report(out):
    assert open_dataset(out / "dataset").num_episodes == 1024
    assert load_policy(out).processor.embodiments[0].cameras == ("observation.images.front",)
    assert len([row for row in read_metrics(out) if "loss" in row]) == 1200
    page = (out / "report.html").read_text()
    assert page.count("<video") >= 6
    assert "wrong prompt" in page
    seconds = json.loads((out / "summary.json").read_text())["seconds"]
    assert set(seconds) == {"record", "train", "evaluate", "report"}


@pytest.mark.slow
def test_the_shrunk_demo_lifts_what_it_is_told_and_uses_word_and_image(out):
    summary = json.loads((out / "summary.json").read_text())
    assert summary["success"] >= 0.9
    assert summary["expert_success"] == 1.0
    assert summary["untrained_success"] <= 0.05
    assert summary["wrong_prompt_success"] <= 0.1
    assert summary["wrong_prompt_named_success"] >= 0.8
    assert summary["blank_image_success"] <= 0.1
    assert summary["fill"] >= 0.97


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(
        ValueError, match=r"not the folder of an earlier demo; choose another --out"
    ):
        demo.run(demo.DemoConfig(out=tmp_path), Console(quiet=True))
    assert (tmp_path / "thesis.tex").read_text() == "precious"
