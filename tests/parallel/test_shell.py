"""Supervised training, RL and populations have one shell: none opens a folder, locks it, notes
signals, saves, tracks or accounts by itself."""

import ast
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from rich.console import Console

import parallel.shell
from models.checkpoints import own
from parallel.mesh import make_mesh
from parallel.monitor.goodput import read_account
from parallel.trainer import TrainerConfig
from rl.population.population import PopulationConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, position
from tests.helpers.rl.counted import CONFIG, Counting
from tests.helpers.rl.opened import evolve, improve

QUIET = Console(quiet=True)
ROOT = Path(__file__).parents[2]
PARTS = {"CheckpointWriter", "Ledger", "StopSignals", "Trackers", "check_folder", "locked"}


def trained(out, **options):
    mesh, config = make_mesh(devices=jax.devices()[:1]), TrainerConfig(train_steps=4, save_every=2)
    at = Run(out, {"model": "toy"}, {})
    train(Denoiser(), RULES, batches, position, at, config, OPTIMIZER, mesh=mesh, **options)


def improved(out, **options):
    config = replace(CONFIG, learner_steps=4)
    improve(lambda: nullcontext(Counting()), Run(out, {}, {}), config, QUIET, **options)


def evolved(out, **options):
    evolve(
        lambda config, directory: nullcontext(Counting()),
        {"w": 1.0},
        Run(out, {}, {}),
        replace(CONFIG, learner_steps=4, eval_every=2),
        PopulationConfig(2),
        QUIET,
        evaluate=lambda step, params, directories, told: 0.5,
        **options,
    )


def called(path):
    nodes = [node.func for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Call]
    return {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}


def test_only_the_shell_opens_locks_signals_saves_tracks_and_accounts():
    files = [path for folder in ("parallel", "rl") for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "tools/recipes" / f"{name}.py" for name in ("training", "rl", "rl_population")]
    users = {path.relative_to(ROOT).as_posix() for path in files if called(path) & PARTS}
    assert users == {"parallel/shell.py"}
    assert called(ROOT / "parallel/shell.py") >= PARTS


@pytest.mark.parametrize("begin", [trained, improved, evolved])
def test_whatever_a_run_learns_by_its_folder_is_mirrored_and_accounted_for(begin, tmp_path):
    out, mirror = tmp_path / "run", tmp_path / "mirror"
    begin(out, mirror=str(mirror))
    runs = ["members/0", "members/1"] if begin is evolved else [""]
    for run in runs:
        assert own.steps(mirror / run / "checkpoints")[-1] == 4
        assert read_account(mirror / run).steps == read_account(out / run).steps == 4
        assert read_account(out / run).seconds["step"] > 0
    assert own.find(mirror).name == own.find(out).name == "4"


@pytest.mark.parametrize("begin", [trained, improved, evolved])
def test_auto_begins_a_run_and_then_continues_it(begin, tmp_path):
    for _ in range(2):
        begin(tmp_path, resume="auto")
        assert own.steps(tmp_path / "checkpoints")[-1] == 4
    (tmp_path / "config.json").unlink()
    for _ in range(2):
        with pytest.raises(
            FileNotFoundError, match="holds no run to resume: it has no config"
        ) as e:
            begin(tmp_path, resume="auto")
        copy = tmp_path / "checkpoints" / "4" / "config" / "data.json"
        assert f"config.json; put it back ({copy} is a copy)" in str(e.value)
        (tmp_path / "saved.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"another directory\. Put its config\.json back"):
        begin(tmp_path, resume=False)
    (tmp_path / "config.json").write_bytes(copy.read_bytes())
    begin(tmp_path, resume="auto")


@pytest.mark.parametrize("begin", [trained, improved, evolved])
def test_every_folder_is_locked_once_and_checked_once(begin, tmp_path, monkeypatch):
    locked, checked = [], []
    lock, check = parallel.shell.locked, parallel.shell.check_folder

    def locking(folder, console):
        locked.append(folder)
        return lock(folder, console)

    def checking(folder, resume):
        checked.append(folder)
        check(folder, resume)

    monkeypatch.setattr(parallel.shell, "locked", locking)
    monkeypatch.setattr(parallel.shell, "check_folder", checking)
    begin(tmp_path)
    members = [tmp_path / "members" / k for k in "01"] if begin is evolved else []
    assert locked == checked == [tmp_path, *members]
