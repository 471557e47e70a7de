"""Commands on datasets and runs whose texts and folders look like markup and hold sequences for the
terminal: nothing ends by it, and none of them arrives."""

import json
import shutil
import sys

import numpy as np
import pytest

from data.lerobot.writer import DatasetWriter
from models.files.terminal import harmless
from parallel import checkpoint
from parallel.monitor.metrics import MetricsWriter
from tools import checkpoint as checkpoint_command
from tools import data as data_command
from tools import plan as plan_command

FOREIGN = "lift[/red] \x1b]52;c;cm0=\x07\x1b[2J\x9b31m\u202egnp"
FOLDER = "a[/b]c"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / FOLDER
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x[/red]", FOREIGN]},
        "action": {"dtype": "float32", "shape": (1,), "names": None},
        "force[red]": {"dtype": "float32", "shape": (1,), "names": None},
        "front": {"dtype": "video", "shape": (32, 32, 3), "names": ["height", "width", "channels"]},
    }
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True)
    with DatasetWriter(path, fps=10, features=features, robot_type="arm[red]") as writer:
        for _ in range(2):
            state = rng.normal(size=(5, 2)).astype(np.float32)
            pictures = rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
            force = 0 * state[:, :1]
            columns = {"observation.state": state, "action": force, "force[red]": force}
            writer.add_episode(columns, {"front": pictures}, FOREIGN)
    return path


@pytest.fixture
def typed(monkeypatch, capsys):
    """Runs a command; returns its exit status (a text: what it ends with) and all that it wrote."""

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "300")
        try:
            main()
            status = 0
        except SystemExit as error:
            status = error.code
        said = "".join(capsys.readouterr())
        assert said == harmless(said)
        return status, said

    return run


def data():
    data_command.app.cli(prog="data")


def test_a_dataset_is_validated(dataset, typed):
    status, said = typed(data, "validate", dataset)
    assert status == 0
    assert f"0 errors, 1 warning in {dataset}." in said


def test_findings_name_what_they_found_as_it_is_written(dataset, tmp_path, typed):
    damaged = shutil.copytree(dataset, tmp_path / "x" / FOLDER)
    next(damaged.glob("videos/*/*/*.mp4")).unlink()
    status, said = typed(data, "validate", damaged)
    assert status == 1
    assert "a[/b]c" in said


def test_statistics_show_names_and_tasks_as_they_are_written(dataset, typed):
    status, said = typed(data, "stats", dataset, dataset)
    assert status == 0
    assert harmless(FOREIGN) in said
    assert "x[/red]" in said
    assert f"{dataset}: arm[red], 2 episodes" in said
    assert "warning force[red][0]: hardly changes" in said


def test_an_episode_is_viewed_and_a_dataset_converted(dataset, tmp_path, typed):
    page, store = tmp_path / FOLDER / "page.html", tmp_path / "to" / FOLDER
    page.parent.mkdir(parents=True)
    assert f"{page}: open it" in typed(data, "view", dataset, 0, "--out", page)[1]
    told = typed(data, "convert", dataset, store, "--image-size", 16, "--encoding", "raw")[1]
    assert f"{store}: 10 frames of 1 cameras." in told


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("robot", [["arm"], {"a": 1}, 7, True, deep(90)])
def test_a_robot_or_dimensions_whose_names_are_none_are_shown_as_unknown(
    robot, dataset, tmp_path, typed
):
    changed = tmp_path / "changed"
    shutil.copytree(dataset, changed)
    info = json.loads((changed / "meta/info.json").read_text())
    info |= {"robot_type": robot, "total_frames": robot}
    for feature, size in (("observation.state", 2), ("action", 1)):
        info["features"][feature]["names"] = [robot] * size
    (changed / "meta/info.json").write_text(json.dumps(info))
    status, said = typed(data, "stats", changed, changed)
    assert status == 0
    assert f"{changed}: {changed}, 2 episodes" in said
    status, shown = typed(data, "validate", changed)
    assert status == 1
    assert "robot_type: is " in shown
    page = tmp_path / "page.html"
    typed(data, "view", changed, 0, "--out", page)
    assert "robot <b>" not in page.read_text()
    assert max(len(said), len(shown), page.stat().st_size) < 100_000


@pytest.fixture
def run_folder(tmp_path):
    run = tmp_path / FOLDER
    assets = {"words": [FOREIGN]}
    for step, name in ((1, "plain"), (2, FOREIGN)):
        with checkpoint.CheckpointWriter(run / "checkpoints", {"name": name}, assets) as writer:
            writer.save(step, {"ema": {"up": np.ones((2, 3), np.float32) * step}}, {})
    with MetricsWriter(run) as writer:
        writer.write(0, {"loss": 0.5})
    return run


def test_checkpoints_are_listed_verified_compared_and_exported(run_folder, tmp_path, typed):
    main, folder = checkpoint_command.main, run_folder / "checkpoints"
    shutil.copytree(folder / "1", folder / f"7.damaged{FOREIGN.replace('/', '')}")
    status, said = typed(main, "ls", run_folder)
    assert status == 0
    assert harmless("7.damaged" + FOREIGN.replace("/", "")) in said
    status, said = typed(main, "verify", run_folder)
    assert status == 0
    assert f"{folder / '2'}: good (" in said
    (folder / "2" / FOREIGN.replace("/", "")).write_text("more")
    assert f"{folder / '2'}: " in typed(main, "verify", run_folder)[1]
    (folder / "2" / FOREIGN.replace("/", "")).unlink()
    status, said = typed(main, "diff", folder / "1", folder / "2")
    assert status == 1
    assert f"config name: plain → {harmless(FOREIGN)}" in said
    out = tmp_path / "out" / FOLDER
    assert f"{out}: ema of step 2 in 1 files." in typed(main, "export", run_folder, out)[1]


def test_a_command_ends_with_a_harmless_sentence(tmp_path, typed):
    status, _ = typed(checkpoint_command.main, "verify", tmp_path / FOREIGN)
    assert harmless(FOREIGN) in status
    assert status == harmless(status)


@pytest.mark.slow
def test_a_plan_is_titled_by_its_preset_as_it_is_written(tmp_path, typed):
    file = tmp_path / FOLDER / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text("from tools.recipes.presets import TINY as MINE\n")
    options = plan_command.PlannedRun(preset=f"{file}:MINE", rows=16), plan_command.Machines(gpus=1)
    status, said = typed(lambda: plan_command.main(*options, remats=("none",)))
    assert status == 0
    assert f"{file}:MINE" in "".join(line.strip() for line in said.splitlines())
