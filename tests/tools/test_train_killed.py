"""`tools.train` as a process that is killed at a moment of its life."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.parallel.toy import environment
from tests.helpers.tools.small_run import LONG, losses, write_dataset


@pytest.mark.slow
def test_a_run_killed_while_it_trains_resumes_with_the_same_losses(tmp_path):
    dataset, preset = write_dataset(tmp_path / "set"), tmp_path / "mine.py"
    preset.write_text("from tests.helpers.tools.small_run import LONG as MINE\n")

    def start(out: Path, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tools.train", f"--preset={preset}:MINE"]
        command += ["--data", str(dataset), "--out", str(out), "--data.workers", "1", *more]
        return subprocess.Popen(command, env=environment(1), stdout=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    killed = start(tmp_path / "killed")
    while not (tmp_path / "killed" / "checkpoints" / "4").exists():
        assert killed.poll() is None
        time.sleep(0.002)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert len(losses(tmp_path / "killed")) < LONG.trainer.steps
    assert start(tmp_path / "killed", "--resume").wait() == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
