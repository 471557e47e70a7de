"""A trace of some steps by jax.profiler: what the devices and the host's threads did, operation by
operation, for TensorBoard's profile plugin, XProf or <https://ui.perfetto.dev>.

Every host writes its own trace, into RUN/profile/host-K, so that processes of one machine do not
overwrite each other's traces.
"""

import re
from pathlib import Path

import jax

from models.files.terminal import Console
from parallel.hosts.distributed import host_index
from parallel.hosts.watchdog import note
from parallel.runs.log_failure import LogFailure

FOLDER = "profile"


def traced_steps(profile: str, steps: int, field: str) -> range:
    """Steps A to B - 1 for "A:B", counted from 0 as in metrics.jsonl; none for "".

    Raises:
      ValueError: `profile` has another form, or is not within a run of `steps` steps; names the
        `field`.
    """
    if not profile:
        return range(0)
    bounds = re.fullmatch(r"(\d+):(\d+)", profile)
    if bounds is None:
        raise ValueError(
            f"{field} is {profile!r}; expected A:B, to trace steps A to B - 1, such as 20:23."
        )
    first, end = int(bounds[1]), int(bounds[2])
    if not first < end <= steps:
        raise ValueError(
            f"{field} is {profile!r}, but the run has {steps} steps; expected A < B <= {steps}, "
            f"to trace steps A to B - 1."
        )
    return range(first, end)


class StepTrace:
    """Traces the steps of `wanted` that a run in `directory` makes after its first `done`; `close`
    ends a trace under way. `failure` keeps the error of a failed write."""

    def __init__(
        self, wanted: range, directory: Path, done: int, console: Console, failure: LogFailure
    ) -> None:
        self._folder = directory / FOLDER / f"host-{host_index()}"
        if wanted and done >= wanted.stop and not self._folder.exists():
            console.print(
                f"Steps {wanted.start} to {wanted.stop - 1} were already made before this start, "
                f"so nothing is traced.",
                soft_wrap=True,
            )
        self._wanted, self._console, self._failure = wanted, console, failure
        self._running = False

    def turns(self, step: int) -> bool:
        """True if `turn` must be called before `step` is dispatched."""
        return self._running != (step in self._wanted)

    def turn(self) -> None:
        """Begins or ends the trace, which the watchdog knows as "profiling"; no step may be under
        way."""
        note("profiling")
        with self._failure.kept(self._folder):
            if self._running:
                self._running = False
                try:
                    jax.profiler.stop_trace()
                except jax.errors.JaxRuntimeError as error:
                    said = f"{self._folder}: the trace could not be written ({error})."
                    raise OSError(said) from error
                self._console.print(f"Trace: {self._folder} (docs/running.md)", soft_wrap=True)
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
                self._running = True

    def close(self) -> None:
        """Ends a trace under way."""
        if self._running:
            self.turn()
