"""MLflow tracker: a run's metrics, and its config as parameters, in an experiment of a tracking
server.

Environment variables choose the server (MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, …). MLflow
cannot take a value back, and keeps the first value of a parameter.
"""

import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from parallel.trackers.tracker import PROJECT, Outcome, TrackedRun

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_AT_ONCE, _LONGEST, _LONGEST_NAME = 100, 6000, 250
"""MLflow's limits: parameters in a request, characters in a parameter and in a name."""
_REFUSED = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not accept in a name."""


class Mlflow:
    """A `Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the default 7 take minutes
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        if run.id is None:
            name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            there = self._client.get_experiment_by_name(name)
            at = there.experiment_id if there else self._client.create_experiment(name)
            self.id = self._client.create_run(at, run_name=run.name).info.run_id
            found = {_named(key): str(value)[:_LONGEST] for key, value in _flat(run.config) if key}
            params = [Param(key, value) for key, value in found.items()]
            for start in range(0, len(params), _AT_ONCE):
                self._client.log_batch(self.id, params=params[start : start + _AT_ONCE])
        else:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
        self.place = f"{self._client.tracking_uri}, run {self.id}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of a step."""
        now = int(time.time() * 1000)
        made = [
            self._metric(_named(name), float(value), now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self.id, metrics=made)

    def finish(self, outcome: Outcome) -> None:
        """Ends the run; `stopped` is MLflow's KILLED."""
        self._client.set_terminated(self.id, _STATUS[outcome])


def _named(name: str) -> str:
    """A name that MLflow accepts, since datasets and robots may have any name."""
    return posixpath.normpath(_REFUSED.sub("_", name)).lstrip("./")[:_LONGEST_NAME] or "_"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _flat(part, f"{path}.{name}" if path else str(name))
    else:
        yield path, value
