"""Training steps of one job in a process for each GPU, compared with one process that has them all:
what the collectives between processes cost, and a check that the losses are the same.

Each job is started as users start one, the first by itself, the second by `tools.launch`; this file
is also what its processes run. Without a GPU two processes share the CPU's cores.
"""

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

import jax

from models.files.terminal import Console, guard_tracebacks
from parallel.hosts import job
from parallel.hosts.distributed import host_count, put_batch, row_share
from parallel.hosts.supervisor import accelerators
from parallel.mesh import MeshConfig, make_mesh
from parallel.planning.random_batch import random_batch
from tools.bench.attempt import tell
from tools.bench.models.step import benched, with_depth
from tools.bench.models.stepper import stepper
from tools.bench.process import ending
from tools.bench.timing import timed

_ROWS, _SAMPLES, _STEPS, _LAYERS = 4, 2, 8, 0.25
_FORCED = "--xla_force_host_platform_device_count"


def run(console: Console, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds of a step; `ratio` is one process over several.

    Raises:
      ValueError: a job failed.
    """
    count, environment = accelerators(), dict(os.environ)
    if not count or os.environ.get("JAX_PLATFORMS") == "cpu":
        count = 2
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FORCED}={count}"
        environment["NPROC"] = "32"
    worker = ["-m", "tools.bench.parallel.processes", *["--tiny"] * tiny]
    launch = ["-m", "tools.launch", "-n", str(count), "--", sys.executable, *worker]
    rows: list[dict[str, Any]] = []
    for name, command in (("alone", worker), ("launched", launch)):
        console.print(f"{name}: {' '.join(command)}")
        rows.append({"name": name, **_asked(command, environment)})
        tell(console, {"unit": "ms", "rows": rows})
    alone, launched = rows
    return {
        "ratio": alone["ms"] / launched["ms"],
        "ours": f"{launched['ms']:.1f} ms a step in {launched['processes']} processes",
        "other": f"{alone['ms']:.1f} in one with {alone['devices']} devices",
        "unit": "ms",
        "rows": rows,
    }


def work(tiny: bool) -> dict[str, Any]:
    """Work of one process: steps over all devices of its job."""
    job.start()
    preset = benched("tiny" if tiny else "pi05")
    config = with_depth(preset.model, _LAYERS).computing(dtype="bfloat16")
    devices = jax.device_count()
    mesh, rows = make_mesh(MeshConfig(data=1, fsdp=-1)), _ROWS * devices
    whole = jax.device_get(random_batch(config, rows, _SAMPLES))
    index, count = row_share(mesh)
    share = slice(index * rows // count, (index + 1) * rows // count)
    batch = put_batch(jax.tree.map(lambda x: x[share], whole), mesh)
    call, _ = stepper(config.build(), preset.optimizer, batch, mesh)
    seconds, losses = [], []
    for _ in range(2 if tiny else _STEPS):
        with timed() as took:
            losses.append(float(call()["loss"]))
        seconds.append(took.wall)
    return {
        "ms": 1000 * median(seconds[1:]),
        "processes": host_count(),
        "devices": devices,
        "rows": rows,
        "losses": losses,
    }


def _asked(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    whole = [sys.executable, *command]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.endswith("}")]
    if done.returncode or not answers:
        said = (done.stderr or done.stdout).strip()[-600:]
        raise ValueError(f"{' '.join(command)} {ending(done.returncode)}: {said}")
    return json.loads(answers[0].removeprefix("[0] "))


if __name__ == "__main__":
    guard_tracebacks()
    found = work("--tiny" in sys.argv)
    if jax.process_index() == 0:
        print(json.dumps(found))
