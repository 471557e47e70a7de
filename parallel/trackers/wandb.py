"""Weights & Biases: metrics and config of a run in a project, online or in the run's own folder.

wandb sends in a process of its own, which tries again as long as it takes. Where and as whom is its
environment's matter: `wandb login` or WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL, WANDB_MODE.
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
        """Takes what is known of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self, outcome: Outcome) -> None:
        """Ends the run; `failed` is wandb's crashed or failed."""
        self._run.finish(exit_code=int(outcome == "failed"))
