"""trackio tracker: a run's metrics in a database on this machine, or in a Hugging Face Space.

trackio sends from its own thread. Environment variables choose the place: TRACKIO_DIR,
TRACKIO_SPACE_ID, TRACKIO_SERVER_URL. trackio identifies a run only by its name, so names end with a
random part.
"""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from contextvars import copy_context
from functools import partial
from secrets import token_hex

from parallel.trackers.tracker import PROJECT, Outcome, TrackedRun


class Trackio:
    """A `Tracker`; `trackio show --project PROJECT` opens its board."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.id = run.id or f"{run.name}-{token_hex(3)}"
        project = run.project or PROJECT
        begin = partial(trackio.init, config=run.config, resume="allow", embed=False)
        with redirect_stdout(io.StringIO()):  # and no global run, which its exit would end again
            self._run = copy_context().run(begin, project, name=self.id)
        self.place = f"trackio show --project {project}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self, outcome: Outcome) -> None:
        """Ends the run; trackio keeps no outcome."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()
