"""Trackers: services that also receive a run's metrics, in addition to metrics.jsonl and
TensorBoard.

A tracker has `log` and `finish`, and is opened with the id by which the service knows the run, so
that a resumed run continues in place. All else is in the service's own environment variables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from models.files.own_file import named_in_file

Json = Any
Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """A run as described to its tracker: `id` is the `Tracker.id` that it had before, None for a
    new run; `project` is "" if the user named none."""

    folder: Path
    project: str
    id: str | None
    config: Json

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.absolute().name


class Tracker(Protocol):
    """An open run in a service. Both methods are called from one thread, which is not the one that
    runs the steps."""

    @property
    def id(self) -> str:
        """Identity of the run in the service."""

    @property
    def place(self) -> str:
        """Place where people find the run, such as a URL; may be empty."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of a step; steps never go back, but one step may be logged several times."""

    def finish(self, outcome: Outcome) -> None:
        """Ends the run, which may be resumed later; returns when everything is sent."""


Opener = Callable[[TrackedRun], Tracker]

PROJECT = "chiliad"
"""Project in a service if the user names none."""

_SHIPPED = {
    "wandb": ("wandb", "parallel.trackers.wandb:Wandb"),
    "mlflow": ("mlflow", "parallel.trackers.mlflow:Mlflow"),
    "trackio": ("trackio", "parallel.trackers.trackio:Trackio"),
}
"""The library that each name needs, and the tracker's class."""


def find_tracker(named: str) -> tuple[Opener, str]:
    """Opener of a tracker, and its project. `named` is wandb, mlflow or trackio, alone or as
    SERVICE:PROJECT, or path/to/file.py:NAME, whose file is run.

    Raises:
      ValueError: there is no such tracker, or its library is not installed.
      FileNotFoundError: there is no such file.
    """
    service, _, project = named.partition(":")
    if service not in _SHIPPED:
        if ".py:" in named:
            return named_in_file(named), ""
        raise ValueError(
            f"--track '{named}' is not a tracker; give {', '.join(_SHIPPED)}, optionally followed "
            f"by :PROJECT, or path/to/file.py:NAME for one of your own."
        )
    library, where = _SHIPPED[service]
    if find_spec(library) is None:
        raise ValueError(
            f"--track {named} needs {library}, which is not installed: run "
            f"`pip install -e '.[{service}]'` in Chiliad's repository."
        )
    module, _, name = where.partition(":")
    return getattr(import_module(module), name), project
