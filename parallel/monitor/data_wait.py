"""Warning that steps wait for their data, in one line with a remedy.

The remedy depends on where the loader's time goes, so it is chosen from the loader's own figures.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

_STEPS = 50
_SHARE = 0.2
_SILENT_SECONDS = 600.0  # between two such lines


class _Step(NamedTuple):
    seconds: float
    waited: float
    cpu: float
    decoding: float
    reading: float


class DataWait:
    """Watches the last 50 steps of a run."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._spoken = -_SILENT_SECONDS

    def after(self, seconds: float, facts: Mapping[str, float]) -> str | None:
        """Records a step that took `seconds`; returns a line, at most every ten minutes, if more
        than a fifth of the last 50 steps' time was spent waiting for data.

        Args:
          facts: `data_wait` of the step and, as far as the loader knows them, `load_cpu_seconds` of
            its batch, the part of them spent decoding (`load_decode_seconds`), and
            `load_wait_seconds`.
        """
        names = ("data_wait", "load_cpu_seconds", "load_decode_seconds", "load_wait_seconds")
        self._steps.append(_Step(seconds, *(facts.get(name, 0.0) for name in names)))
        total = _Step(*map(sum, zip(*self._steps, strict=True)))
        now = time.perf_counter()
        if (
            len(self._steps) < _STEPS
            or total.waited < _SHARE * total.seconds
            or now - self._spoken < _SILENT_SECONDS
        ):
            return None
        self._spoken = now
        return (
            f"Data is the bottleneck: the last {_STEPS} steps waited {total.waited:.1f} of "
            f"{total.seconds:.1f} s for it. {_remedy(total)}"
        )


def _remedy(total: _Step) -> str:
    if total.reading > total.cpu > 0:
        return (
            "The loader mostly waits for storage or for a free core: keep the frame store on a "
            "local disk, and raise --data.workers if cores are idle."
        )
    if total.decoding > total.cpu / 2:
        return (
            f"{total.decoding / total.cpu:.0%} of the loader's CPU time goes into decoding images: "
            "raise --data.workers, or train from a frame store made with `python -m tools.data "
            "convert` (if this is one already: from a raw one, or one with smaller images)."
        )
    return "Raise --data.workers."
