"""Metrics of a run: one JSON object per line in metrics.jsonl, and the same for TensorBoard.

Each line has `step`, counted from 0: the metrics of the update that step made. A resumed run drops
what was written past its checkpoint, so the file always holds one sequence.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from parallel.log_failure import naming

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends metrics of `start_step` and later; use as a context manager. Every line is handed to
    the operating system at once, so it survives this process, and what cannot be written is raised
    here: TensorBoard's own writer would stop in a thread and block for good.

    Raises:
      OSError: a file cannot be written; names it.
    """

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        self._path = Path(directory) / FILE_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, start_step)
        self._file: IO[str] = self._path.open("a")
        self._board_path = Path(directory) / "tensorboard"
        self._board_path.mkdir(exist_ok=True)
        self._failed = False
        with naming(self._board_path):
            self._board = EventsWriter(str(self._board_path / "events"))
            for what in (
                {"file_version": "brain.Event:2"},
                {"session_log": SessionLog(status=SessionLog.START)},  # hides later steps before it
            ):
                self._board.write_event(Event(step=start_step, **what))
            self._board.flush()

    def write(self, step: int, metrics: dict[str, float], board: bool = True) -> None:
        """Writes one line; `board` also sends it to TensorBoard."""
        self._failed = True
        with naming(self._path):
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        if board:
            with naming(self._board_path):
                for name, value in metrics.items():
                    event = Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                    self._board.write_event(event)
                self._board.flush()
        self._failed = False

    def flush(self) -> None:
        """Hands all lines to the operating system: they survive this process."""
        with naming(self._path):
            self._file.flush()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError) if self._failed else naming(self._path):
            self._file.close()
        with suppress(OSError) if self._failed else naming(self._board_path):
            self._board.close()


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """All lines of a run's metrics.jsonl that were written whole, in order."""
    path = Path(directory) / FILE_NAME
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _truncate(path: Path, start_step: int) -> None:
    """Drops lines of `start_step` and later; the file is replaced as a whole or not at all."""
    kept = [line for line in read_metrics(path.parent) if line["step"] < start_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(temporary, path)
