"""Seconds of a server's start: until it answers, with nothing kept from before, with the programs
of an earlier start, and, as an alternative, with every batch compiled before the first answer.

Each start runs the command itself, in a process and with a cache of its own; a robot connects as
soon as it listens and sends one request.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from models.files.terminal import Console
from tools.bench.attempt import tell
from tools.serving.wire import pack, unpack

_KINDS = {
    "all batches first": ("whole", ["--whole-start"]),
    "nothing kept": ("kept", []),
    "programs kept": ("kept", []),
}
"""Each kind of start, with its cache and its options."""


def starts(
    save: Callable[[Path], None],
    console: Console,
    kinds: Sequence[str] = tuple(_KINDS),
    options: Sequence[str] = (),
) -> dict[str, dict[str, float]]:
    """Seconds from the command to "listening", to "ready" and to the first "answer", and the
    server's "cpu" seconds, for each kind of start of the policy that `save` writes to a folder,
    served with `options`."""
    with tempfile.TemporaryDirectory() as scratch:
        root, found = Path(scratch), {}
        save(root / "run")
        for name in kinds:
            cache, own = _KINDS[name]
            console.print(f"Starting: {name}")
            found[name] = _start(root / "run", root / cache, [*own, *options])
            tell(console, {"unit": "s", "start": found})
        return found


def _start(run: Path, cache: Path, options: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.serve", "--checkpoint", str(run), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    before, began = _cpu(), time.monotonic()
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        address = re.search(r"ws://\S+:\d+", process.stdout.readline())
        if address is None:
            raise ValueError("The server did not start; its output says why.")
        found = {"listening": time.monotonic() - began}
        with connect(address[0], compression=None, max_size=None, open_timeout=600) as robot:
            told: Any = unpack(robot.recv(timeout=3600, decode=False))
            found["ready"] = time.monotonic() - began
            robot.send(pack(_observation(told["inputs"])))
            if isinstance(answer := robot.recv(timeout=3600), str):
                raise ValueError(f"The server refused to answer: {answer}")
            unpack(answer)
            found["answer"] = time.monotonic() - began
    except ConnectionClosed as error:
        raise ValueError(
            "The server ended before it answered; its output says why, or it ran out of memory "
            "and was killed."
        ) from error
    finally:
        process.terminate()
        process.communicate()
    return {**found, "cpu": _cpu() - before}


def _observation(inputs: dict[str, Any]) -> dict[str, Any]:
    """A blank observation of the keys that a server expects."""
    found: dict[str, Any] = {"prompt": "lift the red block"}
    for key, spec in inputs.items():
        if isinstance(spec, dict) and "shape" in spec:
            shape = [48 if n is None or isinstance(n, str) else n for n in spec["shape"]]
            found[key] = np.zeros(shape, spec["dtype"])
    return found


def _cpu() -> float:
    """CPU-seconds that ended child processes took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
