"""Trackers: services that are told a run's metrics too, beside metrics.jsonl and TensorBoard.

A tracker is one object with `log` and `finish`; whoever opens one gives it the id by which the
service knows the run, so that a resumed run goes on in the same place. Services differ in all else
(project, account, server), for which each has environment variables of its own.
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
    """A run as its tracker is told of it: `id` is the `Tracker.id` that it had before, None at its
    beginning; `project` is "" where the user named none."""

    folder: Path
    project: str
    id: str | None
    config: Json

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.absolute().name


class Tracker(Protocol):
    """An open run in a service. Both methods are called from one thread, not that of the steps."""

    @property
    def id(self) -> str:
        """Identity of the run in the service."""

    @property
    def place(self) -> str:
        """Place where a person finds the run, such as a URL; may be empty."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes what is known of a step; steps never go back, but may come several times."""

    def finish(self, outcome: Outcome) -> None:
        """Ends the run, which may be resumed later; returns when all was sent."""


Opener = Callable[[TrackedRun], Tracker]

PROJECT = "chiliad"
"""Project in a service where the user names none."""

_SHIPPED = {
    "wandb": ("wandb", "parallel.trackers.wandb:Wandb"),
    "mlflow": ("mlflow", "parallel.trackers.mlflow:Mlflow"),
    "trackio": ("trackio", "parallel.trackers.trackio:Trackio"),
}
"""The library that each name needs, and its class."""


def find_tracker(named: str) -> tuple[Opener, str]:
    """Opener of a tracker, and the project: of wandb, mlflow or trackio, each alone or as
    SERVICE:PROJECT, or of path/to/file.py:NAME, whose file runs.

    Raises:
      ValueError: there is no such tracker, or its library is not installed.
      FileNotFoundError: there is no such file.
    """
    service, _, project = named.partition(":")
    if service not in _SHIPPED:
        if ".py:" in named:
            return named_in_file(named), ""
        raise ValueError(
            f"--track '{named}' is no tracker; give {', '.join(_SHIPPED)}, each with :PROJECT if "
            f"you like, or path/to/file.py:NAME of your own."
        )
    library, where = _SHIPPED[service]
    if find_spec(library) is None:
        raise ValueError(
            f"--track {named} needs {library}, which is not installed: "
            f"`pip install -e '.[{service}]'` in Chiliad's repository."
        )
    module, _, name = where.partition(":")
    return getattr(import_module(module), name), project
