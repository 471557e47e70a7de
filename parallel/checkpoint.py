"""Checkpoints: one directory per step with the whole state and what is needed to rebuild it.

`checkpoints/<step>/` holds the arrays (orbax) and JSON files for data position, config and assets.
A directory gets its name only once it is complete, so what a killed run left half-written is never
taken for a checkpoint. `models.checkpoints.own` reads them for acting.
"""

import shutil
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from models.checkpoints.own import check_same, context, find, metadata, steps
from parallel.distributed import host_index
from parallel.step import TrainState

Json = Any

_DELETED = ".deleted"
_UNFINISHED = (".orbax-checkpoint-tmp", _DELETED)


class CheckpointWriter:
    """Saves into `directory`, in the background, and keeps the last `keep` checkpoints.

    Remains of a killed writer are removed first, so one directory has one writer at a time. Use as
    a context manager: leaving it waits for the save under way.
    """

    def __init__(self, directory: Path, config: Json, assets: Json, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, but at least one checkpoint must be kept.")
        self._directory, self._keep = Path(directory).absolute(), keep
        self._constant = {"config": config, "assets": assets}
        self._pending: Any = None
        if host_index() == 0 and self._directory.is_dir():
            for mark in _UNFINISHED:
                for remains in self._directory.glob(f"*{mark}*"):
                    shutil.rmtree(remains)

    def save(self, step: int, state: TrainState | dict[str, Any], position: Json) -> None:
        """Copies the state (or {"ema": parameters}, enough to act) to the host and returns; writing
        goes on in the background.

        Waits for the save before it and raises what went wrong there.
        """
        self.wait()
        with context():
            self._pending = ocp.save_checkpointables_async(
                self._directory / str(step),
                {"state": state, "position": position, **self._constant},
            )

    def wait(self) -> None:
        """Returns when what was saved is on disk; then drops checkpoints beyond the last `keep`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        if host_index() == 0:
            for step in steps(self._directory)[: -self._keep]:
                doomed = self._directory / f"{step}{_DELETED}"
                (self._directory / str(step)).rename(doomed)
                shutil.rmtree(doomed)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait()


def latest(directory: Path) -> int | None:
    """The last step with a complete checkpoint in `directory`, None if there is none."""
    return max(steps(directory), default=None)


def restore(path: Path, abstract: TrainState) -> TrainState:
    """Loads the state of the checkpoint that `find(path)` names, straight into the shardings of
    `abstract` (from `abstract_state`): no host or device holds more than its share.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: it is of another model.
    """
    path = find(path)
    check_same(path, metadata(path), abstract)
    with context():
        return ocp.load_checkpointables(path, {"state": abstract})["state"]
