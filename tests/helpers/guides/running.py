"""A command of the guides in this process, with what it prints; a server is asked once and told to
stop."""

import contextlib
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import jax
import jaxtyping
import numpy as np
import pytest

from parallel.mesh import AXES, MeshConfig, make_mesh
from rl.device import placement as on_device
from rl.host import placement as on_host
from tests.helpers.tools.served import client, free_port, serving
from tools import serve
from tools.recipes import training
from tools.serving import startup
from tools.serving.metrics import Metrics
from tools.serving.robots import random_observation

_APART = ("tools.launch", "--coordinator")
"""Words of commands that join processes, and so run in ones of their own."""


_ONE = MeshConfig(data=1)


class Failed(Exception):
    """A command ended with an error; its message is what it printed."""


@contextlib.contextmanager
def little() -> Iterator[None]:
    """Meshes over as many devices as the command names, of the many that tests have; servers that
    compile no more than the first answer needs; and no shapes checked, which other tests do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        for module in (training, on_host, on_device):
            patch.setattr(module, "make_mesh", _mesh)
        patch.setattr(startup, "go_on", lambda warm: None)
        yield


def _mesh(
    config: MeshConfig = _ONE, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    number = abs(math.prod(getattr(config, axis) for axis in AXES))
    return make_mesh(config, (devices or jax.devices())[:number])


def run(command: str) -> None:
    """Runs it in the current folder; what --resume goes on with is begun before, and loses its last
    checkpoint or, where there is a mirror, its disk.

    Raises:
      Failed: it ended with an error.
    """
    if "--mirror" in command:
        _run_here(command)
        for folder in Path().glob("runs/*"):
            shutil.rmtree(folder)
    elif "--resume" in command:
        run(re.sub(" --resume( auto)?", "", command))
        for folder in Path().glob("runs/*"):
            shutil.rmtree(folder / "checkpoints" / "2")
    if any(word in command for word in _APART):
        _run_apart(command)
    elif found := re.search(r"ws://\S+:8000", command):
        config = serve.ServeConfig(Path("runs/lift"), sizes=(1,), euler_steps=1)
        with serve._engine(config, Metrics()) as engine, serving(engine) as running:
            _run_here(command.replace(found[0], running.url))
    else:
        _run_here(command)


def _run_here(command: str) -> None:
    serves = "tools.serve " in command
    port = free_port()
    words = shlex.split(command.replace("PORT", str(port)))
    before, module = sys.argv, words[2]
    sys.argv = [module, *words[3:]]
    with TemporaryFile("w+") as said:  # has a descriptor, which faulthandler asks for
        try:
            with (
                contextlib.redirect_stdout(said),
                contextlib.redirect_stderr(said),
                _asking(port, command) if serves else contextlib.nullcontext(),
            ):
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise Failed(f"{_text(said)}\nexit: {end.code}") from None
        except Exception as error:
            raise Failed(f"{_text(said)}\n{type(error).__name__}: {error}") from error
        finally:
            sys.argv = before


def _text(said: IO[str]) -> str:
    said.seek(0)
    return said.read()


def _run_apart(command: str) -> None:
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    settings = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    ended = subprocess.run(
        words, capture_output=True, text=True, check=False, env=settings, timeout=300
    )
    if ended.returncode:
        raise Failed(f"{ended.stdout}\n{ended.stderr}\nexit: {ended.returncode}")


@contextlib.contextmanager
def _asking(port: int, command: str) -> Iterator[None]:
    """A robot that asks the server of the block once, and then stops it as SIGTERM does."""
    ended, found = threading.Event(), []

    def ask() -> None:
        while not ended.wait(0.05):
            try:
                found.append(_answer(port, command))
            except (ConnectionRefusedError, TimeoutError):
                continue
            except Exception as error:
                found.append(error)
            os.kill(os.getpid(), signal.SIGTERM)
            return

    robot = threading.Thread(target=ask)
    robot.start()
    try:
        yield
    finally:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server has ended by itself
        ended.set()
        robot.join()
        signal.signal(signal.SIGTERM, before)
    if not found or isinstance(found[0], Exception):
        raise Failed(f"the robot got no answer: {found}")


def _answer(port: int, command: str) -> np.ndarray:
    options: dict[str, Any] = {}
    if "--token-file" in command:
        options["additional_headers"] = {"Authorization": "Bearer secret"}
    if "--certificate" in command:
        options["ssl"] = ssl.create_default_context(cafile="chain.pem")
    scheme = "wss" if "ssl" in options else "ws"
    with client(f"{scheme}://127.0.0.1:{port}", **options) as robot:
        parts = [x for x in robot.metadata["inputs"].values() if "n" in x.get("shape", [])]
        for part, dims in zip(parts, (2, 1), strict=False):  # of a state in two
            part["shape"] = [dims]
        seen = random_observation(robot.metadata, np.random.default_rng(0), 16, "push")
        chunk = robot.infer(seen)["actions"]
    assert np.isfinite(chunk).all()
    return chunk
