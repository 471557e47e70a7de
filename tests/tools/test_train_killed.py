"""`tools.train` as a process that is killed at a moment of its life: what it leaves behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.parallel.toy import environment
from tests.helpers.tools.small_run import LONG, losses, write_dataset


def assert_end(processes: list[str]) -> None:
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    threads = Path(f"/proc/{killed.pid}/task").glob("*/children")
    workers = [pid for thread in threads for pid in thread.read_text().split()]
    assert workers
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert_end(workers)
    assert len(losses(tmp_path / "killed")) < LONG.trainer.train_steps
    assert start(tmp_path / "killed", "--resume").wait() == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
