"""Detection of harmful steps: a loss that is not finite, or a gradient norm far above the usual.

The step itself omits such an update (`parallel.hosts.facts.settle`); this module computes the limit
and decides what follows. All hosts agree across interruptions, as the limit uses no step that may
still be under way, and checkpoints carry the rest.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from parallel.hosts import exits
from parallel.runs.position import LARGEST, count, entry, shown

Policy = Literal["stop", "skip", "rollback"]
IN_FLIGHT = 2
"""Steps by which the device may lag behind the host; a step's limit is computed from the steps that
were read by then."""

_WINDOW = 100
_LEAST = 20  # good steps before there is a usual gradient norm
_SKIPS_IN_A_ROW = 10


class BadStep(ValueError):
    """A step that ends the run or sends it back to a checkpoint; its update was not made."""

    exit_code = exits.NON_FINITE

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


def check_record(found: Any) -> None:
    """Raises ValueError, with the field, unless `Spikes.record` made `found`."""
    norms = entry(found, "norms")
    if not isinstance(norms, list) or len(norms) > _WINDOW + IN_FLIGHT:
        raise ValueError(f"bad_steps.norms is {shown(norms)}, expected a list of recent norms")
    for norm in norms:
        pair = isinstance(norm, list) and [type(part) for part in norm] in (
            [int, int],
            [int, float],
        )
        if not pair or not 0 <= norm[0] <= LARGEST or not 0 <= norm[1] < math.inf:
            raise ValueError(f"bad_steps.norms has {shown(norm)}, expected a step and its norm")
    count(found, "in_a_row", count(found, "skipped"))


class Spikes:
    """Judges the steps of a run in order, by `policy`: `stop` and `rollback` raise at a bad step,
    `skip` counts it, and raises at the tenth in a row.

    A finite step is bad if its gradient norm is above `factor` times the median of the last 100
    good steps' norms (0: never, and not before 20 good steps). `record` is what `record()` of an
    earlier `Spikes` returned at the step to continue from.
    """

    def __init__(self, policy: Policy, factor: float, record: Mapping[str, Any] | None) -> None:
        self.policy, self._factor = policy, factor
        record = record or {"norms": [], "in_a_row": 0, "skipped": 0}
        self._norms: deque[tuple[int, float]] = deque(
            (tuple(pair) for pair in record["norms"]), maxlen=_WINDOW + IN_FLIGHT
        )
        self._in_a_row, self.skipped = record["in_a_row"], record["skipped"]

    def limit(self, step: int) -> float:
        """The gradient norm above which the update of `step` is not made; inf if there is none."""
        known = [norm for at, norm in self._norms if at < step - IN_FLIGHT][-_WINDOW:]
        if not self._factor or len(known) < _LEAST:
            return math.inf
        return self._factor * float(np.median(known))

    def after(self, step: int, good: bool, metrics: Mapping[str, float], limit: float) -> None:
        """Records the outcome of a step.

        Raises:
          BadStep: the step was bad and is not skipped, or too many in a row were bad.
        """
        if good:
            self._in_a_row = 0
            if self._factor:
                self._norms.append((step, metrics["grad_norm"]))
            return
        if self.policy != "stop":
            self._in_a_row, self.skipped = self._in_a_row + 1, self.skipped + 1
        if self.policy == "skip" and self._in_a_row < _SKIPS_IN_A_ROW:
            return
        found = (
            f"Step {step} has loss {metrics['loss']} and gradient norm {metrics['grad_norm']} "
            f"over {metrics['count']:g} action entries, which must be finite"
        )
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            found = (
                f"Step {step} has gradient norm {metrics['grad_norm']:g}, above "
                f"{self._factor:g} times the usual ({limit / self._factor:g})"
            )
        many = f"; {self._in_a_row} steps in a row were skipped" if self._in_a_row > 1 else ""
        remedy = (
            "resume with --trainer.on_bad_step skip to leave it out; the steps before it are saved"
            if self.policy == "stop"
            else "begin a new run with a lower learning rate"
        )
        raise BadStep(
            step,
            f"{found}{many}; its update was not made: look for NaN or outliers in its batch. Then "
            f"{remedy}.",
        )

    def record(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values."""
        return {"norms": list(self._norms), "in_a_row": self._in_a_row, "skipped": self.skipped}
