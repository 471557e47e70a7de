"""A run read back from its folder: its config and the policy it trained, from the checkpoint
alone."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax

from models import Pi, Policy, Processor
from models.config import from_json
from tools.presets import RunConfig

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "mujoco-mjx", "numpy")


def load_config(path: Path) -> RunConfig:
    """The config that a run, or one of its checkpoints, was trained with."""
    return from_json(RunConfig, own.read_json(path, "config"))


def load_policy(path: Path, steps: int = 10) -> Policy:
    """The policy of a run's latest checkpoint, or of the checkpoint given (averaged parameters).

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: it was written by another version, or its arrays are not its config's.
    """
    model = Pi(load_config(path).model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = own.restore_params(path, "ema", like=shapes)
    processor = from_json(Processor, own.read_json(path, "assets")["processor"])
    return Policy(model, params, processor, steps)


def versions() -> dict[str, str]:
    """Libraries and hardware, for reports and benchmarks."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "hardware": f"{len(devices)} × {devices[0].device_kind}; {_processor()}, "
        f"{os.cpu_count()} cores",
    }


def _processor() -> str:
    """The processor's name where the system tells it (Linux), its architecture elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
