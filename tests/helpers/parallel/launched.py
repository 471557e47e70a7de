"""A toy run under `tools.launch`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.parallel.toy import environment


def launch(folder: Path, *options: str, launcher: tuple[str, ...] = (), code: int = 0) -> str:
    """Runs the toy as two processes until it ends with `code`; returns what was printed."""
    command = [sys.executable, "-m", "tools.launch", "-n", "2", *launcher, "--"]
    command += ["python", "-m", "tests.helpers.parallel.train_hosts", str(folder), *options]
    return ended(command, devices=1, code=code)


def ended(command: Sequence[str], devices: int, code: int = 0) -> str:
    """Output of a command whose processes have so many devices each and end with `code`."""
    done = subprocess.run(
        command,
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout
    return done.stdout
