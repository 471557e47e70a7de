"""A simulator in a separate process: reads requests from stdin, acts, and answers on stdout.

`sim.processes.processes` runs it as `python sim/processes/child.py SIMULATOR.py OPTIONS
[LIFELINE]`, often with another Python than ours, so it needs only the standard library (3.10) and
numpy. The simulator's output goes to stderr.
"""

import sys

if __name__ == "__main__":  # this folder's statistics.py is not the standard library's
    del sys.path[0]

import faulthandler
import fcntl
import importlib.util
import json
import os
import resource
import select
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FILM_SIZE = 160
"""Edge of pictures for people, pixels."""

_PREFIX = struct.Struct("<8sIQ")
_MAGIC = b"chiliad\n"
_LARGEST = 1 << 31
_KINDS = {np.dtype(kind).str for kind in ["?", "u1", "i4", "i8", "f4", "f8"]}


class Simulator(Protocol):
    """Interface of a simulator's class; `expert` and `limits` are needed only if it can
    demonstrate, `film` only if people should see something other than its first camera."""

    def spec(self) -> dict[str, Any]:
        """Fields of `sim.protocol.Spec` as JSON; include `expert` only if having the method is not
        enough to demonstrate."""

    def reset(self, task: str, seed: int) -> int:
        """Starts the episode that task and seed determine; returns the index of its goal."""

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 [c, h, w, 3] and state [s]; called once per chunk."""

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Executes one action [a]; returns reward, terminated, truncated, and whether the episode's
        own goal is reached. The child process counts `max_steps`."""

    def expert(self) -> np.ndarray:
        """The next action [a] of the task's expert."""

    @property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest actions [a], between which an expert with noise stays."""

    def film(self, size: int) -> np.ndarray:
        """A picture for people, uint8 [size, size, 3]."""


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes: its length, JSON, then the raw bytes of the arrays among its values."""
    arrays = {k: np.ascontiguousarray(v) for k, v in message.items() if isinstance(v, np.ndarray)}
    plain = {k: v for k, v in message.items() if k not in arrays}
    shapes = {k: (v.dtype.str, v.shape) for k, v in arrays.items()}
    header = json.dumps({"plain": plain, "arrays": shapes}).encode()
    size = sum(v.nbytes for v in arrays.values())
    return b"".join(
        (_PREFIX.pack(_MAGIC, len(header), size), header, *(v.tobytes() for v in arrays.values()))
    )


def missing(received: bytes | bytearray) -> int:
    """Minimum number of bytes that the message still lacks; 0 if it is complete.

    Raises:
      ValueError: no message begins with these bytes.
    """
    if received[: len(_MAGIC)] != _MAGIC[: len(received)]:
        raise ValueError(f"no message begins with {bytes(received[:32])!r}")
    if len(received) < _PREFIX.size:
        return _PREFIX.size - len(received)
    _, header, body = _PREFIX.unpack_from(received)
    if header + body > _LARGEST:
        raise ValueError(f"a message of {header + body} bytes, more than {_LARGEST}")
    return max(0, _PREFIX.size + header + body - len(received))


def unpack(received: bytes | bytearray) -> dict[str, Any]:
    """The complete message that `pack` has turned into these bytes.

    Raises:
      ValueError: the bytes are not such a message.
    """
    _, header, body = _PREFIX.unpack_from(received)
    at = _PREFIX.size + header
    if len(received) != at + body:
        raise ValueError(f"{len(received) - at} bytes of arrays, expected {body}")
    try:
        parts = json.loads(received[_PREFIX.size : at])
        message = dict(parts["plain"])
        for name, (kind, shape) in parts["arrays"].items():
            if kind not in _KINDS:
                raise ValueError(f"array '{name}' of dtype {kind}")
            dtype = np.dtype(kind)
            count = int(np.prod(shape, dtype=np.int64))
            message[name] = np.frombuffer(received, dtype, count, at).reshape(shape).copy()
            at += message[name].nbytes
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a message without {error}") from error
    if at != len(received):
        raise ValueError(f"{len(received) - at} bytes more than its arrays have")
    return message


def main(script: str, options: str, lifeline: str | None = None) -> None:
    """Serves requests until stdin ends."""
    if lifeline is not None:
        _die_with_parent(int(lifeline))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    getattr(sys.stdout, "reconfigure", lambda **_: None)(line_buffering=True)

    episode = _Episode(_load(Path(script))(**json.loads(options)))
    _write(replies, pack({"spec": episode.spec}))
    while (request := _read(requests)) is not None:
        _write(replies, pack(episode.answer(request)))
    os._exit(0)  # without the drivers' exit handlers, which may hang


class _Episode:
    """The running episode of a simulator, and its handling of requests."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.spec = {"expert": hasattr(simulator, "expert")} | simulator.spec()
        self.goal = 0
        self.steps = 0
        self.noise = np.random.default_rng(0)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "begin":
            self.goal = int(self.simulator.reset(request["task"], request["seed"]))
            self.steps = 0
            self.noise = np.random.default_rng((request["seed"], 1))
            return self._outcome([], False, False, False)
        if request["do"] == "send":
            actions = request["actions"]
            return self._act(len(actions), actions.__getitem__, request["film"])
        wanted: list[np.ndarray] = []
        low, high = self.simulator.limits

        def disturbed(_: int) -> np.ndarray:
            wanted.append(np.asarray(self.simulator.expert(), np.float32))
            if not request["noise"]:
                return wanted[-1]
            spread = request["noise"] * (high - low)
            noisy = wanted[-1] + spread * self.noise.normal(size=low.shape)
            return np.clip(noisy, low, high).astype(np.float32)

        reply = self._act(request["steps"], disturbed, False)
        return reply | {"actions": np.stack(wanted)}

    def _act(self, steps: int, action: Callable[[int], np.ndarray], film: bool) -> dict[str, Any]:
        rewards, frames = [], []
        terminated = truncated = success = False
        for i in range(steps):
            reward, terminated, truncated, reached = self.simulator.step(action(i))
            self.steps += 1
            rewards.append(float(reward))
            success |= bool(reached)
            if film:
                frames.append(self._picture())
            if terminated or truncated or self.steps == self.spec["max_steps"]:
                truncated = not terminated
                break
        reply = self._outcome(rewards, terminated, truncated, success)
        return reply | {"film": np.stack(frames)} if film else reply

    def _outcome(
        self, rewards: list[float], terminated: bool, truncated: bool, success: bool
    ) -> dict[str, Any]:
        images, state = self.simulator.observe()
        cameras, (height, width) = self.spec["cameras"], self.spec["picture"]
        _check("images", images, (len(cameras), height, width, 3), np.uint8)
        _check("state", state, (len(self.spec["state_names"]),))
        return {
            "goal": self.goal,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "success": success,
            "images": images,
            "state": np.asarray(state, np.float32),
            "reward": np.asarray(rewards, np.float32),
        }

    def _picture(self) -> np.ndarray:
        if not hasattr(self.simulator, "film"):
            return self.simulator.observe()[0][0]
        return self.simulator.film(FILM_SIZE)


def _check(what: str, array: np.ndarray, shape: tuple[int, ...], dtype: type | None = None) -> None:
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        kind = "" if dtype is None else f" {np.dtype(dtype)}"
        raise ValueError(
            f"The simulator returned {what} as {array.dtype} {list(array.shape)}, but its spec says"
            f"{kind} {list(shape)}."
        )


def _load(script: Path) -> Callable[..., Simulator]:
    """The class `Simulator` in a file; installed packages come before the files beside it."""
    sys.path.append(str(script.resolve().parent))
    found = importlib.util.spec_from_file_location("chiliad_simulator", script)
    if found is None or found.loader is None or not script.is_file():
        raise FileNotFoundError(f"{script} is not a Python file with a class Simulator.")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module.Simulator


def _die_with_parent(lifeline: int) -> None:
    """Asks the kernel for a signal when the other end of this pipe closes, which only the parent
    and its forks hold, so that even a simulator that hangs in C dies with them."""
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(0)


def _read(fd: int) -> dict[str, Any] | None:
    received = bytearray()
    while (needed := missing(received)) > 0:
        part = os.read(fd, needed)
        if not part:
            return None
        received += part
    return unpack(received)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main(*sys.argv[1:])
