"""A small real model and endless batches for it: a denoising MLP on packed states and actions."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.inputs.packed_batch import Layout, PackedBatch, Sample, pack
from parallel.monitor.metrics import read_metrics
from parallel.optimizer import OptimizerConfig

LAYOUT = Layout(
    prefix=8,
    images=1,
    samples=2,
    text=4,
    image_size=4,
    tokens_per_image=1,
    state_tokens=1,
    state_dim=6,
    horizon=3,
    action_dim=4,
)
RULES = (
    (r"^(up|down)/kernel$", PartitionSpec(None, "fsdp")),
    (r"/bias$", PartitionSpec()),
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=40)
_held: list[socket.socket] = []


@dataclass(frozen=True)
class Denoiser:
    """Predicts the noise added to an action chunk from the state and the noised chunk."""

    hidden: int = 32

    def init(self, key: jax.Array) -> Any:
        actions = LAYOUT.horizon * LAYOUT.action_dim
        up, down = jax.random.split(key)
        return {
            "up": _linear(up, LAYOUT.state_dim + actions, self.hidden),
            "down": _linear(down, self.hidden, actions),
        }

    def loss(self, params: Any, batch: PackedBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = batch.actions.shape[2:]
        keys = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(batch.sample_id)
        noise = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, shape)))(keys)
        noised = (batch.actions + noise).reshape(*batch.actions.shape[:2], -1)
        x = jnp.concatenate([batch.state, noised], -1)
        x = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
        x = x @ params["down"]["kernel"] + params["down"]["bias"]
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum((x.reshape(noise.shape) - noise) ** 2 * weight), jnp.sum(weight)


def batch(step: int, rows: int = 16) -> PackedBatch:
    """Rows of one or two samples with chunks of different length: a pure function of the step."""
    rng = np.random.default_rng([7, step])
    packed = []
    for row in range(rows):
        samples = []
        for slot in range(1 + row % 2):
            mask = np.zeros((LAYOUT.horizon, LAYOUT.action_dim), bool)
            mask[: rng.integers(1, LAYOUT.horizon + 1)] = True
            state = rng.normal(size=LAYOUT.state_dim).astype(np.float32)
            actions = np.outer(np.ones(LAYOUT.horizon), state[: LAYOUT.action_dim])
            samples.append(
                Sample(
                    images=(),
                    text=np.ones(2, np.int32),
                    state=state,
                    actions=actions.astype(np.float32),
                    action_mask=mask,
                    id=step * 2 * rows + 2 * row + slot,
                )
            )
        packed.append(samples)
    return pack(packed, LAYOUT)


Fed = tuple[PackedBatch, dict[str, float]]


def fed(step: int) -> Fed:
    """A batch with what is to be logged of it."""
    made = batch(step)
    segment = np.asarray(made.prefix_segment)
    return made, {"samples": int(segment.max(axis=1).sum()), "fill": float((segment > 0).mean())}


def batches(start: int, position: Any) -> Iterator[Fed]:
    """Endless batches from `start`, which the position must agree with."""
    if position is not None and position != {"next": start}:
        raise ValueError(f"Position {position} is not that of step {start}.")
    while True:
        yield fed(start)
        start += 1


def position(step: int) -> Any:
    return {"next": step}


def losses(directory: Path) -> list[tuple[float, float]]:
    """Step and loss of every step that a run logged."""
    return [(line["step"], line["loss"]) for line in read_metrics(directory) if "loss" in line]


def free_port() -> int:
    """A port of the loopback for a gRPC server. It stays bound until this process ends, so that
    nobody takes it while the server's process starts; gRPC shares it (SO_REUSEPORT)."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]


def environment(devices: int = 8, **changes: str) -> dict[str, str]:
    """Environment of this process, for a child of so many devices: it shares the compilation cache,
    and its compiler rounds alike."""
    forced = "--xla_force_host_platform_device_count"
    flags = [f for f in os.environ["XLA_FLAGS"].split() if forced not in f]
    shared = {
        "XLA_FLAGS": " ".join([*flags, f"{forced}={devices}"]),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    }
    return {**os.environ, **shared, **changes}


def together(module: str, count: int, devices: int) -> list[str]:
    """Output of `python -m module INDEX COUNT PORT` in each of `count` processes that find each
    other at the port, all of which must end well."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(index), str(count), str(port)],
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    return outputs


def _linear(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    kernel = jax.random.normal(key, (inputs, outputs)) / np.sqrt(inputs)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}
