"""Evaluations of a run by one metric, the lower the better: which checkpoint is the best, and
whether the run has stopped getting better.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel.hosts.agreement import agree
from parallel.monitor.metrics import read_metrics

HELD_OUT_LOSS = "val_loss"
LATE = "evaluated_late"
"""Name logged with the metrics of an evaluation that a stop put off until the run resumed."""


class Evaluations:
    """Values of `metric` by the number of steps made. A value that is not finite is left out of
    `finite` but counts as an evaluation without improvement. `patience` such evaluations in a row
    end the run (0: never)."""

    def __init__(self, metric: str, patience: int = 0) -> None:
        self.metric, self._patience = metric, patience
        self._values: dict[int, float] = {}
        self.finite: dict[int, float] = {}

    def add(self, step: int, found: Mapping[str, float]) -> None:
        """Takes the metrics of the evaluations after `step` steps.

        Raises:
          ValueError: the metric is not among them.
        """
        check_metric(self.metric, sorted(found))
        self._put(step, found[self.metric])

    def restore(self, directory: Path, done: int) -> None:
        """Takes the values that the run in `directory` logged in its first `done` steps; all hosts
        get them."""

        def read(_: list[str]) -> str:
            rows = read_metrics(directory)
            return json.dumps([row for row in rows if self.metric in row and row["step"] < done])

        self.finite.clear()
        self._values.clear()
        self.take(json.loads(agree("evaluations", "", read)))

    def take(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Takes the values in lines of metrics.jsonl."""
        for row in rows:
            if self.metric in row:
                self._put(int(row["step"]) + 1, row[self.metric])

    @property
    def verdict(self) -> str:
        """Reason to end the run; "" as long as the metric improves."""
        steps = sorted(self._values)
        best = min(self.finite, key=lambda step: (self.finite[step], step), default=None)
        since = steps if best is None else steps[steps.index(best) + 1 :]
        if not self._patience or len(since) < self._patience:
            return ""
        if best is None:
            return f"{self.metric} was not finite in any of {len(since)} evaluations"
        return (
            f"{self.metric} was lowest after step {best} ({self.finite[best]:.4g}), and not lower "
            f"in the {len(since)} evaluation{'s' * (len(since) > 1)} since"
        )

    def _put(self, step: int, value: float) -> None:
        self._values[step] = value
        if math.isfinite(value):
            self.finite[step] = value


def made_late(directory: Path, done: int) -> bool:
    """True, on all hosts alike, if the evaluation after `done` steps was put off and made since."""

    def read(_: list[str]) -> str:
        made = (LATE in row and row["step"] == done - 1 for row in read_metrics(directory))
        return "made" if any(made) else ""

    return bool(agree("made late", "", read))


def check_judged(
    keep_best: str, patience: int, eval_every: int, save_every: int, prefix: str = "trainer."
) -> None:
    """Refuses settings under which few or none of a run's checkpoints could be judged.

    Args:
      prefix: prefix of the settings' names.

    Raises:
      ValueError: the settings are of this kind.
    """
    if not (keep_best or patience):
        return
    name, value = ("keep_best", keep_best) if keep_best else ("patience", patience)
    if eval_every < 1:
        raise ValueError(
            f"{prefix}{name} is {value}, but {prefix}eval_every is 0, so nothing is evaluated; set "
            f"it above 0."
        )
    often, seldom = sorted((eval_every, save_every))
    if often and seldom % often:
        raise ValueError(
            f"{prefix}{name} is {value}, but checkpoints are saved every {save_every} steps "
            f"({prefix}save_every) and evaluations made every {eval_every} ({prefix}eval_every), "
            "so few or no checkpoints are evaluated; make one a multiple of the other."
        )


def check_metric(metric: str, names: Sequence[str]) -> None:
    """Raises ValueError if evaluations do not give the metric that a run is to be judged by."""
    if metric not in names:
        raise ValueError(
            f"The run is judged by '{metric}' (trainer.keep_best, trainer.patience), but its "
            f"evaluations give {', '.join(names) or 'nothing, as no episode is held out'}."
        )
