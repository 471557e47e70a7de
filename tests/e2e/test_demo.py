"""The whole road, shrunk: what `make demo` leaves behind, and that it cannot eat somebody's
files."""

import json
from functools import partial

import pytest
from rich.console import Console

from data import open_dataset
from models import load_policy
from parallel.metrics import read_metrics
from sim.tabletop import Tabletop
from tools import demo


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.tabletop.Tabletop", partial(Tabletop, lanes=16))
        config = demo.DemoConfig(task="reach", out=out, episodes=20, steps=110, evaluations=6)
        summary = demo.run(config, Console(quiet=True))
    return out, summary


def test_the_demo_leaves_a_dataset_a_policy_a_summary_and_a_report(done):
    out, summary = done
    assert open_dataset(out / "dataset").num_episodes == 20
    assert load_policy(out).processor.embodiments[0].cameras == ("observation.images.front",)
    assert len([row for row in read_metrics(out) if "loss" in row]) == 110
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(summary))
    page = (out / "report.html").read_text()
    assert page.count("<video") >= 6
    assert "wrong prompt" in page


def test_the_summary_has_the_promised_keys_and_measured_values(done):
    _, summary = done
    promised = {
        "task", "episodes", "success", "untrained_success", "expert_success",
        "wrong_prompt_success", "blank_image_success", "fill", "seconds",
    }  # fmt: skip
    assert promised <= set(summary)
    assert summary["expert_success"] == 1.0
    assert summary["untrained_success"] < 0.5
    assert 0.9 < summary["fill"] <= 1
    assert set(summary["seconds"]) == {"record", "train", "evaluate", "report"}


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"no earlier demo; choose another --out"):
        demo.run(demo.DemoConfig(out=tmp_path), Console(quiet=True))
    assert (tmp_path / "thesis.tex").read_text() == "precious"
