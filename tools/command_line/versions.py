"""Versions of Chiliad and of what it runs on, for reports, cards and benchmarks."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "mujoco-mjx", "numpy")


def versions() -> dict[str, str]:
    """Libraries and hardware, for reports and benchmarks."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{package: _version(package, "not installed") for package in _PACKAGES},
        "hardware": f"{len(devices)} × {devices[0].device_kind}; {_processor()}, "
        f"{os.cpu_count()} cores",
    }


def own_version() -> str:
    """Version of Chiliad."""
    return _version("chiliad", "from a clone")


def commit() -> str | None:
    """The full hash of the commit that this code is of, with "+changes" if a tracked file differs
    from it; None outside of a clone."""
    if not (_ROOT / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", _ROOT, *words], check=True, capture_output=True, text=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return head + "+changes" * bool(changes)


def _version(package: str, absent: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return absent


def _processor() -> str:
    """The processor's name where the system reports it (Linux), its architecture elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
