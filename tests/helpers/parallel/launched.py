"""A toy run under `tools.launch`."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.parallel.toy import environment


def launch(folder: Path, *options: str, launcher: tuple[str, ...] = (), code: int = 0) -> str:
    """Runs the toy as two processes until it ends with `code`; returns what was printed."""
    command = [sys.executable, "-m", "tools.launch", "-n", "2", *launcher, "--"]
    command += ["python", "-m", "tests.helpers.parallel.train_hosts", str(folder), *options]
    done = subprocess.run(
        command,
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout
    return done.stdout
