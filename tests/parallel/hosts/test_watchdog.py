"""The watchdog's blame when nothing goes on, and the report of a process that stands still."""

import json
import subprocess
import sys

import pytest

from parallel.hosts import exits
from parallel.hosts.watchdog import Beat, suspects
from tests.helpers.parallel.toy import environment


def beats(*steps: int) -> dict[int, Beat]:
    return {rank: Beat("training", step, 9.0, 5.0, 3) for rank, step in enumerate(steps)}


def test_those_behind_the_others_are_suspect():
    assert suspects(beats(52, 50, 52), set()) == [1]
    assert suspects(beats(52, 50, 50), set()) == [1, 2]


def test_those_whose_watchdogs_fell_silent_are_suspect_before_those_behind():
    assert suspects(beats(52, 50, 52), {2}) == [2]


def test_nobody_is_suspect_where_all_are_at_the_same_step():
    assert suspects(beats(50, 50), set()) == []
    assert suspects(beats(50), set()) == []


def run(body: str, tmp_path, patience: float = 1.0) -> "subprocess.CompletedProcess[str]":
    program = f"""
import sys, time
from pathlib import Path
from parallel.hosts.watchdog import Watchdog, note
with Watchdog(Path(sys.argv[1]), {patience}):
    {body}
"""
    return subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment(CHILIAD_REPORT=str(tmp_path / "report.json")),
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_step_that_never_ends_ends_the_process_with_its_stacks(tmp_path):
    done = run("note('training', 7); time.sleep(1000)", tmp_path)
    assert done.returncode == exits.STALLED, done.stderr
    assert "no single suspect (rank 0 training at step 7" in done.stderr
    assert "time.sleep(1000)" in done.stderr or "<string>" in done.stderr
    assert "Thread" in (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["rank"] == 0


@pytest.mark.slow
def test_a_stall_ends_the_process_where_its_stacks_cannot_be_written(tmp_path):
    folder = tmp_path / "a file"
    folder.touch()
    done = run("note('training', 7); time.sleep(1000)", folder)
    assert done.returncode == exits.STALLED, done.stderr


@pytest.mark.slow
def test_a_long_phase_that_is_not_a_step_is_waited_for(tmp_path):
    assert run("note('compiling'); time.sleep(3)", tmp_path).returncode == 0


ERRORS = [
    ("raise ValueError('no such field')", exits.REFUSED, "error: no such field"),
    ("note('training', 1); raise ValueError('full')", exits.FAILED, "error: full"),
    ("raise RuntimeError('broken')", exits.FAILED, "RuntimeError: broken"),
    ("sys.exit(5)", 5, ""),
    ("raise KeyboardInterrupt", exits.INTERRUPTED, "Interrupted while preparing"),
    ("note('training', 1); raise KeyboardInterrupt", exits.INTERRUPTED, "while training; --r"),
    ("raise OSError(30, 'x', 'runs')", exits.FAILED, "error: runs: Read-only file system"),
]
FORKS = """
import os, sys
from pathlib import Path
from parallel.hosts.watchdog import Watchdog, note
folder, *bodies = sys.argv[1:]
for i, body in enumerate(bodies):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    else:
        os.dup2(os.open(f"{folder}/{i}.txt", os.O_CREAT | os.O_WRONLY), 2)
        with Watchdog(Path(folder) / str(i), 300.0):
            exec(body)
"""
"""Each body in a process of its own, all of which one process forks that has done the imports."""


def test_an_error_is_said_and_gives_the_exit_code(tmp_path):
    bodies = [body for body, _, _ in ERRORS]
    done = subprocess.run(
        [sys.executable, "-u", "-c", FORKS, str(tmp_path), *bodies],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.split() == [str(code) for _, code, _ in ERRORS], done.stderr
    for i, (body, _, says) in enumerate(ERRORS):
        told = (tmp_path / f"{i}.txt").read_text()
        assert says in told, told
        assert ("Traceback" in told) == ("RuntimeError" in body), told
