"""Fault injection, each fault at one rank and step: `kill@rank1:step50`.

A process does to itself what a machine may do to it, at the same moment every time (as in torchft's
tests), and once in a run's life: a marker in the run's folder outlives a restart.
"""

import os
import re
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KINDS = {
    "kill": "the process dies at once (SIGKILL)",
    "stop": "the process is stopped (SIGSTOP)",
    "stuck": "Python waits for ever",
    "hang": "a collective is entered that the other processes never enter",
    "term": "the process is told to stop (SIGTERM)",
    "exception": "an error is raised",
    "full": "no file takes another byte, as on a full disk",
    "nan": "the actions of a batch are not numbers (the caller makes them so)",
}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, injected just before it begins a step (counted from 0)."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}@rank{self.rank}:step{self.step}"


_armed: list[Fault] = []
_folder: Path | None = None


def parse(text: str) -> list[Fault]:
    """Faults of a list such as `kill@rank1:step50,nan@rank0:step60`.

    Raises:
      ValueError: a part of the list is not a fault; names it.
    """
    faults = []
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)@rank(\d+):step(\d+)", part.strip())
        if found is None or found[1] not in KINDS:
            raise ValueError(
                f"--inject: {part!r} is not a fault; expected KIND@rankR:stepS, such as "
                f"kill@rank1:step50, where KIND is one of {', '.join(KINDS)}."
            )
        faults.append(Fault(found[1], int(found[2]), int(found[3])))
    return faults


def arm(text: str, folder: Path) -> None:
    """Arms for `at` the faults that have not yet happened in the run of `folder`; "" disarms all.

    Raises:
      ValueError: as `parse`.
    """
    global _folder
    _armed[:] = parse(text) if text else []
    _folder = folder


def at(step: int) -> str | None:
    """Called before each step; carries out the faults that are armed for it. Returns the kind of a
    fault that the caller must carry out ("nan")."""
    caller = None
    for fault in _armed:
        if (fault.rank, fault.step) == (jax.process_index(), step) and _first_time(fault):
            print(f"inject: {fault} at {time.time():.3f}", file=sys.stderr, flush=True)
            _happen(fault)
            caller = fault.kind if fault.kind == "nan" else caller
    return caller


def spoilt(x: jax.Array) -> jax.Array:
    """`x` with NaN in every part that this process holds, for a fault of kind "nan"."""
    parts = [shard.data * jnp.nan for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def _first_time(fault: Fault) -> bool:
    assert _folder is not None
    marker = _folder / "injected" / str(fault)
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _happen(fault: Fault) -> None:
    match fault.kind:
        case "kill" | "stop" | "term":
            os.kill(os.getpid(), signal.Signals[f"SIG{fault.kind.upper()}"])
        case "stuck":
            while True:
                time.sleep(1)
        case "hang":
            while True:
                _enter_alone()
        case "exception":
            raise RuntimeError(f"{fault} was asked for with --inject.")
        case "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _enter_alone() -> None:
    """A sum over all devices, in an order that no mesh of a run has, so that its messages are never
    taken for those of the collectives that the other processes are in."""
    mesh = Mesh(np.array(jax.devices()[::-1]), ("all",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("all",), ()))
    ones = jax.make_array_from_callback((mesh.size,), split, lambda _: np.ones(1, np.float32))
    try:
        jax.block_until_ready(jax.jit(jnp.sum, out_shardings=whole)(ones))
    except jax.errors.JaxRuntimeError:  # gloo gives up after 30 seconds; NCCL never does
        return
