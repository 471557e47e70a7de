"""`python -m tests.helpers.parallel.checkpoint_host save|restore|overrun DIR INDEX COUNT PORT
AXIS=SIZE…` is one of several processes that save or restore arrays of every kind, and train
nothing."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from models.checkpoints import own
from parallel import checkpoint
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.parallel.toy import environment, free_port

P = PartitionSpec
ARRAYS: dict[str, tuple[tuple[int, ...], Any, PartitionSpec]] = {
    "step": ((), np.int32, P()),
    "kernel": ((32, 16), np.float32, P("fsdp", "tensor")),
    "stacked": ((4, 16, 8), ml_dtypes.bfloat16, P("stage", ("data", "fsdp"), "tensor")),
    "moments": ((64, 8), ml_dtypes.float8_e4m3fn, P(("data", "fsdp"))),
    "codes": ((16, 24), np.uint8, P("tensor", "fsdp")),
    "odd": ((7, 5), np.float32, P()),
    "row": ((8,), np.float32, P(("data", "fsdp", "context"))),
}


def values(step: int) -> dict[str, np.ndarray]:
    """Random bytes of each array's kind: NaN and negative zero count too."""
    found = {}
    for number, (name, (shape, dtype, _)) in enumerate(ARRAYS.items()):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.random.default_rng([step, number]).bytes(count)
        found[name] = np.frombuffer(raw, dtype).reshape(shape)
    return found


def abstract(mesh: Mesh) -> Any:
    return {
        "ema": {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
            for name, (shape, dtype, spec) in ARRAYS.items()
        }
    }


def state(mesh: Mesh, step: int) -> Any:
    whole, like = values(step), abstract(mesh)["ema"]
    return {
        "ema": {
            name: jax.make_array_from_callback(x.shape, like[name].sharding, x.__getitem__)
            for name, x in whole.items()
        }
    }


def differing(restored: Any, mesh: Mesh, step: int) -> list[str]:
    """Arrays of which a shard on this host's devices has other bytes, or another sharding."""
    whole, like = values(step), abstract(mesh)["ema"]
    return [
        name
        for name, x in restored["ema"].items()
        if x.sharding != like[name].sharding
        or x.dtype != like[name].dtype
        or any(
            np.asarray(s.data).tobytes() != whole[name][s.index].tobytes()
            for s in x.addressable_shards
        )
    ]


def start(
    action: str, directory: Path, processes: int, devices: int, *axes: str
) -> list[subprocess.Popen[str]]:
    """Several such processes, of that many devices each."""
    port = free_port()
    module = [
        sys.executable,
        "-m",
        "tests.helpers.parallel.checkpoint_host",
        action,
        str(directory),
    ]
    return [
        subprocess.Popen(
            [*module, str(index), str(processes), str(port), *axes],
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]


def save(directory: Path, mesh: Mesh, steps: tuple[int, ...] = (1, 2)) -> None:
    with checkpoint.CheckpointWriter(directory, {"model": "arrays"}, {}) as writer:
        for step in steps:
            print("blocked", writer.save(step, state(mesh, step), {"next": 10 * step}), flush=True)


def restore(directory: Path, mesh: Mesh) -> None:
    console = Console(file=sys.stdout, soft_wrap=True)
    step = checkpoint.newest_good(directory, console)
    assert step is not None
    path = directory / str(step)
    restored: Any = checkpoint.restore(path, abstract(mesh))
    print("restored", step, own.read_json(path, "position"), differing(restored, mesh, step))
    acting = {"ema": own.restore_params(path, like=abstract(mesh)["ema"])}
    print("to act", differing(acting, mesh, step))


def overrun(directory: Path, mesh: Mesh) -> None:
    """The last host may write no more after the first save, as if its disk were full."""
    with checkpoint.CheckpointWriter(directory, {}, {}) as writer:
        writer.save(1, state(mesh, 1), {})
        writer.wait()
        if jax.process_index() == jax.process_count() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        begin = time.monotonic()
        try:
            writer.save(2, state(mesh, 2), {})
            while True:
                writer.check()
                time.sleep(0.05)
        except OSError as error:
            print(f"after {time.monotonic() - begin:.1f} s: {error}", flush=True)
            os._exit(3)


def main(action: str, directory: str, index: str, count: str, port: str, *axes: str) -> None:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, int(count), int(index), coordinator_bind_address=address)
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in axes)}
    {"save": save, "restore": restore, "overrun": overrun}[action](
        Path(directory), make_mesh(MeshConfig(**sizes))
    )
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
