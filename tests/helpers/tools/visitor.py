"""openpi's own client, in an environment of its own."""

import json
import subprocess
from pathlib import Path

import pytest

from sim.processes.interpreters import interpreter

try:
    PYTHON = interpreter("client", "openpi_client", "make client")
except FileNotFoundError:
    PYTHON = None

NEEDS_CLIENT = pytest.mark.skipif(
    PYTHON is None, reason="needs openpi's client: make client, or set CHILIAD_CLIENT_PYTHON"
)


def visit(url, dims, key=""):
    """The server's answer to openpi's client."""
    script = Path(__file__).with_name("openpi_robot.py")
    command = [PYTHON, script, url, key, "front", "wrist", str(dims)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
