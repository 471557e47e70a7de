"""The format of docs/own_dataset.md is trained on, checked, described, seen and converted."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.dataset import use_format
from data.store.store import open_store
from models import load_policy
from models.files.terminal import Console
from tests.helpers.data.npz_episodes import write_episodes
from tests.helpers.tools.small_run import SMALL, losses, one_device, write_dataset
from tools import train
from tools.data import app
from tools.recipes.prepare import prepare

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/own_dataset.md"
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """The table of formats, as it was afterwards."""
    monkeypatch.setattr("data.dataset._own", {})


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The guide's file, as an option names the format in it."""
    (code,) = re.findall(r"```python\n# own_dataset\.py\n(.*?)```", GUIDE.read_text(), re.S)
    file = tmp_path_factory.mktemp("own") / "own_dataset.py"
    file.write_text(code)
    return f"{file}:NPZ"


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    return write_episodes(tmp_path_factory.mktemp("data") / "episodes", 8)


def typed(*arguments):
    app.cli(args=[*map(str, arguments)])


def test_the_guide_shows_the_file_that_the_tests_have_and_it_is_short(own):
    code = Path(own.removesuffix(":NPZ")).read_text()
    assert code == (ROOT / "tests/own_dataset.py").read_text()
    assert len(code.splitlines()) <= 80


@pytest.mark.slow
def test_it_is_trained_on_and_the_policy_knows_its_robot(own, episodes, tmp_path, monkeypatch):
    preset = tmp_path / "small.py"
    preset.write_text("from tests.helpers.tools.small_run import SMALL\n")
    out = tmp_path / "run"
    options = {"--data": episodes, "--data-format": own, "--preset": f"{preset}:SMALL"}
    words = [str(word) for option in options.items() for word in option]
    monkeypatch.setattr(sys, "argv", ["train", *words, "--out", str(out)])
    with one_device():
        train.main()
    assert len(losses(out)) == SMALL.trainer.train_steps
    assert np.isfinite(losses(out)).all()
    (robot,) = load_policy(out).processor.embodiments
    assert (robot.name, robot.cameras) == ("episodes", ("observation.images.front",))
    assert len(robot.actions.offset) == 2


def test_a_mixture_has_datasets_of_several_formats(own, episodes, tmp_path):
    lerobot = write_dataset(tmp_path / "lerobot")
    mixture = tmp_path / "mixture.json"
    shared = {"embodiment": "arm", "cameras": {"front": "front"}}
    paths = [{"path": str(path), **shared} for path in (episodes, lerobot)]
    mixture.write_text(json.dumps({"datasets": paths}))
    arguments = ["--data", str(mixture), "--data-format", own, "--out", str(tmp_path / "run")]
    chosen, config, _ = train.parse(arguments)
    assert chosen.data_format == own
    use_format(chosen.data_format)
    config = replace(config, model=SMALL.model, data=SMALL.data)
    ready = prepare(chosen.data, chosen.folder, config, QUIET)
    assert ready.mixed.names == ("episodes", "lerobot")
    trained, held_out = ready.episodes
    assert trained + held_out == 8 + 12


def test_it_is_validated_and_damage_is_named(own, episodes, tmp_path):
    report = tmp_path / "found.json"
    with pytest.raises(SystemExit, match="0"):
        typed("validate", episodes, "--data-format", own, "--json", report)
    assert json.loads(report.read_text()) == []
    damaged = write_episodes(tmp_path / "damaged", 4)
    (damaged / "002.npz").write_bytes(b"PK")
    with pytest.raises(SystemExit, match="1"):
        typed("validate", damaged, "--data-format", own, "--json", report)
    (found,) = json.loads(report.read_text())
    assert found["file"] == str(damaged / "002.npz")
    assert "record this episode again" in found["message"]


def test_it_is_described_with_exact_statistics(own, episodes, tmp_path, capsys):
    typed("stats", episodes, "--data-format", own, "--json", tmp_path / "stats.json")
    shown = capsys.readouterr().out
    assert "pusher, 8 episodes, 68 frames at 10.0 fps" in shown
    assert re.search(r"4 +push", shown)
    values = np.concatenate([np.load(f)["action"] for f in sorted(episodes.glob("*.npz"))])
    found = json.loads((tmp_path / "stats.json").read_text())["action"]
    np.testing.assert_allclose(found["q99"], np.quantile(values, 0.99, axis=0))


def test_an_episode_of_it_is_seen_as_a_page(own, episodes, tmp_path):
    typed("view", episodes, 3, "--out", tmp_path / "page.html", "--data-format", own)
    page = (tmp_path / "page.html").read_text()
    assert '<h1 id="task">pull</h1>' in page
    assert "observation.images.front" in page
    assert "robot <b>pusher</b>" in page


@pytest.mark.parametrize("workers", [1, 2])
def test_it_is_converted_to_a_frame_store_of_the_same_bytes(own, episodes, tmp_path, workers):
    options = ("--image-size", 16, "--encoding", "raw", "--workers", workers)
    typed("convert", episodes, tmp_path / "store", *options, "--data-format", own)
    store = open_store(tmp_path / "store")
    assert store.lengths.tolist() == list(range(5, 13))
    assert store.prompts == (("pull",), ("push",))
    out = [np.zeros((16, 16, 3), np.uint8)]
    store.images(np.array([5 + 2]), "observation.images.front", out)
    second = np.load(episodes / "001.npz")
    assert np.array_equal(out[0], second["observation.images.front"][2])
    np.testing.assert_array_equal(store.column("action", np.array([7]))[0], second["action"][2])


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (("--to", "v3.0"), "make a frame store"),
        (("--ray",), "leave --ray and --ray-address out"),
        (("--ray-address", "auto"), "leave --ray and --ray-address out"),
    ],
)
def test_what_it_cannot_be_converted_by_is_said(own, episodes, tmp_path, option, remedy):
    with pytest.raises((ValueError, SystemExit), match=f"--data-format is .*{remedy}"):
        typed("convert", episodes, tmp_path / "out", "--data-format", own, *option)


def test_without_a_store_only_lerobot_is_read(own, episodes, tmp_path):
    use_format(own)
    config = replace(SMALL, data=replace(SMALL.data, encoding="direct"))
    with pytest.raises(ValueError, match="only LeRobot datasets can be read without a frame store"):
        prepare(episodes, tmp_path / "run", config, QUIET)
