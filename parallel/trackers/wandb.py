"""Weights & Biases tracker: metrics and config of a run in a project, online or in the run's own
folder.

wandb sends from its own process, which retries as long as needed. Server and account come from its
environment: `wandb login` or WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL, WANDB_MODE.
"""

import os
from collections.abc import Mapping

from parallel.trackers.tracker import PROJECT, Outcome, TrackedRun


class Wandb:
    """A `Tracker`. With WANDB_MODE=offline it leaves files in RUN/wandb for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = self._run.id
        self.place = str(run.folder / "wandb") if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self, outcome: Outcome) -> None:
        """Ends the run; wandb shows `failed` as crashed or failed."""
        self._run.finish(exit_code=int(outcome == "failed"))
