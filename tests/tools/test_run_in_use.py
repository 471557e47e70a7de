"""Commands in a folder where another process is at work: each is refused before it reads anything,
and leaves with code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.files.terminal import Console
from parallel.hosts import exits
from parallel.runs.run_lock import InUse
from rl.population.population import PopulationConfig
from tests.helpers.parallel.toy import environment
from tests.helpers.tools.small_run import HOSTS
from tools import demo, evaluate, rl, train
from tools.recipes.rl_presets import RL_PRESETS

QUIET = Console(quiet=True)
NOWHERE = Path("/nowhere/at/all")
PPO = RL_PRESETS["tabletop-ppo"]


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.parallel.lock_holder", str(folder)],
        env=environment(1),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline().startswith("held")
    yield folder
    process.stdin.close()
    process.wait(60)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "begin",
    [
        lambda out: train.run(train.Paths(str(NOWHERE), out), HOSTS, QUIET),
        lambda out: rl.run(rl.RlPaths(NOWHERE, out), PPO, QUIET),
        lambda out: rl.run(rl.RlPaths(NOWHERE, out), PPO, QUIET, PopulationConfig(2)),
        lambda out: evaluate.run(evaluate.EvaluateConfig(NOWHERE, out=out), QUIET),
        lambda out: demo.run(demo.DemoConfig(out=out), QUIET),
    ],
    ids=["train", "rl", "population", "evaluate", "demo"],
)
def test_a_folder_in_use_is_refused_and_stays_as_it_is(begin, held):
    before = content(held)
    with pytest.raises(InUse, match="is in use by process"):
        begin(held)
    assert content(held) == before


@pytest.mark.parametrize("command", [rl, evaluate])
def test_the_command_line_says_so_in_a_sentence_and_leaves_with_code_2(
    command, held, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["command", "--checkpoint", str(NOWHERE), "--out", str(held)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == exits.REFUSED
    said = capsys.readouterr().err
    assert said.startswith(f"error: {held} is in use by process ")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_demo_that_begins_again_keeps_its_lock(tmp_path, monkeypatch):
    (tmp_path / "demo.json").touch()
    (tmp_path / "dataset").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dataset")

    def recording(*_):
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == [".lock", "demo.json"]
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "record_dataset", recording)
    with pytest.raises(KeyboardInterrupt):
        demo.run(demo.DemoConfig(out=tmp_path), QUIET)
    assert os.listdir(tmp_path) == ["demo.json"]
