"""Shipped commands in a process of their own, with a user's settings and not the tests'."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> None:
    """`python -m ARGUMENTS`, which must succeed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
