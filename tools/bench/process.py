"""A benchmark in a process of its own, with a time limit. When it ends, everything that it started
is stopped, so that nothing holds a GPU's memory; it also ends when this process ends."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.hosts.parent import die_with_parent

TAIL = 1500
"""Characters of a failed process's last words that are kept."""
_ROOT = Path(__file__).resolve().parents[2]


def ended(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float,
    read: Callable[[str], dict[str, Any]],
) -> dict[str, Any]:
    """Runs a command to its end, or to the limit, and stops what it left running; returns its
    stdout as `read` parses it, with `error` if it failed or was stopped."""
    with (
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as wrong,
        subprocess.Popen(
            command, env=environment, cwd=_ROOT, stdout=said, stderr=wrong,
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent,
        ) as process,
    ):  # fmt: skip
        try:
            process.wait(limit)
            how = f"It {ending(process.returncode)}"
        except subprocess.TimeoutExpired:
            how = f"It was stopped after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for stream in (said, wrong):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    if process.returncode:
        last = texts[1].strip() or (texts[0].strip() if process.returncode > 0 else "")
        why = f"{how}: {last[-TAIL:]}" if last else f"{how}."
        return read(texts[0]) | {"error": why}
    return read(texts[0])


def ending(status: int) -> str:
    """The way a process ended, from its exit status, which is the negative number of a signal."""
    return f"ended with {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"


def last_json(said: str) -> dict[str, Any]:
    """The last JSON object that was said on a line of its own and whole, or an error."""
    for line in reversed(said.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {"error": f"It printed no result: {said[-TAIL:]}"}
