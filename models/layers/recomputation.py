"""A switch for layers that recompute, for backward, what they did not keep. It is off where a
model's own FLOPs are counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, TypeVar

Config = TypeVar("Config", bound=Any)

_recomputes: ContextVar[bool] = ContextVar("recomputes", default=True)


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Layers traced inside keep everything that backward needs, whatever their `remat`."""
    token = _recomputes.set(False)
    try:
        yield
    finally:
        _recomputes.reset(token)


def recomputes() -> bool:
    """True if layers traced here may recompute."""
    return _recomputes.get()


def with_remat(config: Config, remat: str) -> Config:
    """A model's config with this `remat` in each of its stacks that has one."""
    stacks = {f.name: getattr(config, f.name) for f in fields(config)}
    changed = {n: replace(x, remat=remat) for n, x in stacks.items() if hasattr(x, "remat")}
    return replace(config, **changed)
