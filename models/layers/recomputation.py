"""A switch for layers that recompute, for backward, what they did not keep. It is off where a
model's own FLOPs are counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
