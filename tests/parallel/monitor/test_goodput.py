import json
import signal
import subprocess
import sys
import time

import pytest

from parallel.monitor.goodput import FILE_NAME, Account, Ledger, read_account
from parallel.monitor.metrics import read_metrics
from tests.helpers.parallel.toy import environment

TOY = """
import os, signal, sys, time, jax
from pathlib import Path
from parallel.hooks import Hook
from parallel.mesh import make_mesh
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, position

def evaluate(step, state, stopping):
    if step == int(sys.argv[2]):
        while not (run.directory / "checkpoints" / "6").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return {}

run, config = Run(Path(sys.argv[1]), {}, {}), TrainerConfig(train_steps=16, save_every=6)
resume = run.directory.exists()
mesh = make_mesh(devices=jax.devices()[:1])
train(Denoiser(), RULES, batches, position, run, config, OPTIMIZER, mesh=mesh, resume=resume,
      hooks=[Hook(4, evaluate)])
"""


def start(directory, killed_at):
    """A run that kills itself in the evaluation after so many steps (0: never), with its output."""
    return subprocess.run(
        [sys.executable, "-c", TOY, str(directory), str(killed_at)],
        env=environment(1),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )


@pytest.mark.slow
def test_the_time_of_a_killed_and_resumed_run_is_accounted_for_without_rest(tmp_path):
    directory = tmp_path / "run"
    assert start(directory, 8).returncode == -signal.SIGKILL  # saved at 6: two steps are lost
    killed = read_account(directory)
    assert (killed.steps, killed.lost_steps, killed.starts) == (8, 0, 1)
    ended = json.loads((directory / FILE_NAME).read_text().splitlines()[-1])["time"]
    again = start(directory, 0)
    assert again.returncode == 0, again.stdout
    lines = [json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()]
    account = read_account(directory)
    assert (account.steps, account.lost_steps, account.starts) == (16, 2, 2)
    passed = lines[-1]["time"] - lines[0]["time"]
    assert sum(account.seconds.values()) == pytest.approx(passed, abs=1e-6)
    assert account.seconds["stopped"] == 0
    assert all(seconds >= 0 for seconds in account.seconds.values())
    for cause in ("step", "data", "evaluation", "checkpoint", "compile", "start", "wasted"):
        assert account.seconds[cause] > 0, cause
    first = next(line for line in lines if line["time"] > ended and "step" in line["seconds"])
    compiling = account.seconds["compile"] - killed.seconds["compile"]
    gap = first["time"] - ended - compiling - first["seconds"]["step"]
    assert account.seconds["restart"] == pytest.approx(gap, abs=1e-6)
    assert "16 steps in 2 starts, 2 lost and repeated" in again.stdout
    *_, last = (line for line in read_metrics(directory) if "loss" in line)
    assert 0 < last["goodput"] < 1


def test_steps_that_a_rollback_or_a_kill_lost_are_wasted_and_their_time_too():
    account, clock = Account(), iter(range(100))

    def line(event, at, start=0, **seconds):
        time = next(clock)
        account.add({"event": event, "step": at, "time": time, "seconds": seconds, "start": start})

    line("begin", 0, start=1)
    for made in (1, 2, 3, 4, 5):
        line("made", made, step=0.75, data=0.25)
    line("begin", 3)  # a rollback; the line comes a second later
    line("made", 4, step=1.0)
    line("begin", 3, start=1)  # killed
    line("made", 4, step=1.0)
    line("end", 4)
    line("begin", 4, start=1)
    assert (account.steps, account.lost_steps, account.starts) == (4, 3, 3)
    assert account.seconds["wasted"] == 2 * 0.75 + 1.0
    assert account.seconds["step"] == 3 * 0.75 + 1.0
    assert account.seconds["data"] == 5 * 0.25
    assert account.seconds["restart"] == 2
    assert account.seconds["stopped"] == 1


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.begin(0)
        ledger.spend("step")
        ledger.made(1)
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text() + '{"event": "ma')
    with Ledger(tmp_path) as ledger:
        ledger.begin(1)
        ledger.end(1)
    assert read_account(tmp_path).starts == 2
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "begin",
        "made",
        "begin",
        "end",
    ]


def test_time_before_the_first_step_is_starting_but_for_compiling(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.begin(0)
        time.sleep(0.01)
        ledger.spend("data")
        ledger.spend("compile")
        ledger.spend("step")
        ledger.spend("data")
        ledger.made(1)
        ledger.begin(0)
        ledger.spend("data")
        assert ledger.account.seconds["start"] > 0.01
        assert ledger.account.lost_steps == 1
    lines = [line.split("%  ")[-1] for line in ledger.account.report().splitlines()]
    assert "starting, up to the first step" in lines


def test_time_between_the_last_step_and_a_rollback_counts_once(tmp_path, monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("time.time", lambda: next(now))
    with Ledger(tmp_path) as ledger:
        ledger.begin(0)
        ledger.spend("step")
        ledger.made(1)
        ledger.spend("data")
        ledger.begin(0)
        ledger.spend("start")
        ledger.spend("step")
        ledger.made(1)
    account = read_account(tmp_path)
    assert sum(account.seconds.values()) == 10
    assert account.seconds["data"] == 2
    assert account.seconds["restart"] == 3
