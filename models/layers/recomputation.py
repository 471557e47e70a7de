"""A switch for layers that compute again for backward what they did not keep: off where a model's
own FLOPs are counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_recomputes: ContextVar[bool] = ContextVar("recomputes", default=True)


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Layers that are traced within keep all that backward needs, whatever their `remat`."""
    token = _recomputes.set(False)
    try:
        yield
    finally:
        _recomputes.reset(token)


def recomputes() -> bool:
    """True if layers may compute again, in what is traced here."""
    return _recomputes.get()
