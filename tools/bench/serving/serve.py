"""Requests per second of one server that batches over 8 clients, compared with the same server
answering one at a time; and the seconds of its start (`start`, see `serving.start`). With `--width
real`, only the start is measured, of π0.5 as released.

Both serve the same policy over websockets in this process; rounds alternate, and the clients, which
send the next request as soon as they are answered, are a process of their own.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from models import PiConfig, Policy
from models.config import to_json
from models.families.pi.released import CAMERAS
from models.files.terminal import Console
from models.layers.layers import Compute
from models.layers.stack import apart
from tools.bench.models.pi05 import Width
from tools.bench.models.random_policy import random_policy
from tools.bench.process import ending
from tools.bench.serving.start import starts
from tools.convert_checkpoint import convert
from tools.recipes.presets import TINY
from tools.serving.engine import Engine
from tools.serving.limits import Limits
from tools.serving.metrics import Metrics
from tools.serving.server import PolicyServer

_TINY: Any = TINY.model
_STACK = replace(_TINY.language, width=512, hidden=2048, depth=6, heads=4, head_dim=64)
_MODEL = replace(
    _TINY,
    vision=replace(_TINY.vision, patch=16),
    language=_STACK,
    expert=_STACK,
    chunks=1,
)
"""53 million parameters: large compared with a core's cache, as π0.5 is with a GPU's, so a step
costs mostly the reading of weights, and little more for eight chunks than for one."""
_DEADLINE = 0.02
_LIMITS = Limits(rate=1e6)
_PROMPT = "lift the red block"
_STATE, _ACTIONS = 8, 7


@dataclass(frozen=True)
class ClientLoad:
    """Number of clients, of rounds, and of each client's requests in a round."""

    clients: int = 8
    rounds: int = 5
    requests: int = 5


def run(console: Console, load: ClientLoad | None = None, width: Width = "small") -> dict[str, Any]:
    """Requests per second; `ratio` is that of batches over one at a time. With real widths, it is
    the seconds to the first answer of a first start over those of a later one."""
    if width == "real":
        return _real_start(console)
    policy = make_policy()
    start = starts(partial(save, policy), console)
    served = replace(policy, params=apart(policy.params, policy.model.stacked))
    found = asyncio.run(_measure(served, load or ClientLoad(), console))
    return {**found, "start": start}


def make_policy() -> Policy:
    """A policy of random weights with one camera; an answer costs what a trained one's would."""
    return random_policy(_MODEL, _PROMPT.split(), state=_STATE, actions=_ACTIONS)


def save(policy: Policy, run: Path) -> None:
    """Writes a policy as a checkpoint of ours."""
    convert(policy, run, "chiliad")


def _real_start(console: Console) -> dict[str, Any]:
    dtype, save_real = _in_a_child(_fastest_dtype), partial(_in_a_child, _save_real)
    found = starts(save_real, console, ("nothing kept", "programs kept"), ("--dtype", dtype))
    kept, nothing = (found[kind]["answer"] for kind in ("programs kept", "nothing kept"))
    return {
        "ratio": nothing / kept,
        "ours": f"{kept:.1f} s to the first answer, programs kept",
        "other": f"{nothing:.1f} s, nothing kept",
        "unit": "s",
        "dtype": dtype,
        "start": found,
    }


def _in_a_child(function: Callable[..., Any], *given: Any) -> Any:
    """`function(*given)` in a process of its own, whose end returns all its memory to servers."""
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        return child.submit(function, *given).result()


def _fastest_dtype() -> str:
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def _save_real(run: Path) -> None:
    config = PiConfig(compute=Compute("bfloat16"))
    policy = random_policy(config, _PROMPT.split(), CAMERAS, config.state_dim, config.action_dim)
    save(policy, run)


async def _measure(policy: Policy, load: ClientLoad, console: Console) -> dict[str, Any]:
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= load.clients)
    served = {
        "batched": _Served(replace(policy, sizes=sizes), load),
        "one at a time": _Served(replace(policy, sizes=(1,)), load),
    }
    for name, server in served.items():
        console.print(f"Compiling: {name}")
        await server.start()
    console.print(f"{load.clients} clients ask {load.rounds} times {load.requests} times")
    for _ in range(load.rounds):
        for server in served.values():
            await server.ask()
    table = {name: await server.stop() for name, server in served.items()}
    ours, other = table.values()
    gains = [a / b for a, b in zip(ours["rates"], other["rates"], strict=True)]
    return {
        "ratio": median(gains),
        "ours": _said(ours),
        "other": _said(other),
        "unit": "requests/s",
        "clients": load.clients,
        "rounds": gains,
        "parameters": sum(x.size for x in jax.tree.leaves(policy.params)),
        "model": to_json(policy.model.config),
        "table": table,
    }


class _Served:
    """A server in this process and what its clients measured."""

    def __init__(self, policy: Policy, load: ClientLoad) -> None:
        self._policy, self._load = policy, load
        self._engine = Engine(policy, Metrics(), deadline=_DEADLINE, capacity=load.clients)
        self._rates: list[float] = []
        self._took: list[float] = []
        self._cpu = 0.0

    async def start(self) -> None:
        await asyncio.to_thread(self._engine.warm)
        self._stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
        server = PolicyServer(self._engine, _LIMITS, metrics=self._engine.metrics)
        run = server.run("127.0.0.1", 0, self._stop, listening=port.set_result)
        self._task = asyncio.create_task(run)
        self._url = f"ws://127.0.0.1:{await port}"

    async def ask(self) -> None:
        """One round of all clients."""
        load, size = self._load, self._policy.model.config.image_size
        command = ["-m", "tools.serving.robots", self._url, "--robots", load.clients]
        command += ["--requests", load.requests, "--size", size, "--prompt", _PROMPT]
        began = time.process_time()
        process = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise ValueError(f"The process of the clients {ending(process.returncode)}.")
        told = json.loads(said)
        self._rates.append(len(told["took"]) / told["seconds"])
        self._took += told["took"]
        self._cpu += time.process_time() - began

    async def stop(self) -> dict[str, Any]:
        """Figures of all rounds: rates, latency percentiles (ms), what a request costs this process
        (ms of a core), and the batches' mean size."""
        self._stop.set()
        await self._task
        self._engine.close()
        batches = self._engine.statistics.batches
        p50, p90, p99 = np.percentile(self._took, (50, 90, 99)) * 1000
        return {
            "rates": self._rates,
            "requests/s": median(self._rates),
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "cpu_ms a request": self._cpu / len(self._took) * 1000,
            "rows a batch": sum(n * count for n, count in batches.items()) / sum(batches.values()),
        }


def _said(row: dict[str, Any]) -> str:
    return (
        f"{row['requests/s']:.1f} requests/s, p50 {row['p50_ms']:.0f} ms, "
        f"p99 {row['p99_ms']:.0f} ms, {row['rows a batch']:.1f} rows a batch"
    )
