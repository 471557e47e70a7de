"""Device for which a program is traced: that of this process, or one that is not present.

Kernels are chosen by it, so a program that is compiled for a GPU on a machine without one uses the
GPU's kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """Compilation target: JAX's platform, or "any" for a program that every platform must run,
    which then uses no platform's kernels; and CUDA's compute capability (0 elsewhere)."""

    platform: str
    capability: float = 0.0


def target() -> Target:
    """The device of `compiling_for`, or else the first device of this process."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    device = jax.devices()[0]
    on_cuda = device.platform == "gpu" and "NVIDIA" in device.device_kind
    capability = float(getattr(device, "compute_capability", 0)) if on_cuda else 0.0
    return Target(device.platform, capability)


@contextmanager
def compiling_for(platform: str, capability: float = 0.0) -> Iterator[None]:
    """Chooses kernels for this target instead of this process's devices, in programs that are
    traced within the context (such as programs compiled for a GPU that is not present)."""
    token = _chosen.set(Target(platform, capability))
    try:
        yield
    finally:
        _chosen.reset(token)


_chosen: ContextVar[Target | None] = ContextVar("target", default=None)
