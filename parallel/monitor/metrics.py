"""Metrics of a run: one JSON object per line in metrics.jsonl, and the same for TensorBoard and
other trackers.

Each line has a `step`, counted from 0, and the metrics of its update. A resumed run drops the lines
past its checkpoint once it has made a step, so the file always holds one sequence.
"""

import json
import os
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from parallel.runs.atomic import replace_text
from parallel.runs.json_lines import read_lines
from parallel.runs.log_failure import naming
from parallel.trackers.trackers import Trackers

FILE_NAME = "metrics.jsonl"


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends metrics of `start_step` and later steps. Writing the first line drops existing lines
    of these steps. Use as a context manager. Every line is handed to the operating system at once,
    so it survives this process, and write errors are raised here: TensorBoard's own writer would
    stop in a thread and block for good. `trackers` get the same metrics as TensorBoard.
    """

    def __init__(
        self, directory: Path, start_step: int = 0, trackers: Trackers | None = None
    ) -> None:
        self._path, self._start = Path(directory) / FILE_NAME, start_step
        self._trackers = trackers
        self._board_path = Path(directory) / "tensorboard"
        self._opened: tuple[IO[str], EventsWriter] | None = None
        self._failed = False

    def write(self, step: int, metrics: dict[str, float], board: bool = True) -> None:
        """Writes one line; `board` also sends it to TensorBoard and trackers.

        Raises:
          OSError: a file cannot be written; names it.
        """
        self._failed = True
        if self._opened is None:
            self._opened = self._open()
        file, events = self._opened
        with naming(self._path):
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
        if board:
            with naming(self._board_path):
                for name, value in metrics.items():
                    events.write_event(
                        Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                    )
                events.flush()
            if self._trackers is not None:
                self._trackers.log(step, metrics)
        self._failed = False

    def sync(self) -> None:
        """Returns when all lines are on disk, where they survive a crash of the machine.

        Raises:
          OSError: the file cannot be written; names it.
        """
        if self._opened is not None:
            with naming(self._path):
                os.fsync(self._opened[0].fileno())

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            for opened, path in zip(self._opened, (self._path, self._board_path), strict=True):
                with suppress(OSError) if self._failed else naming(path):
                    opened.close()

    def _open(self) -> tuple[IO[str], EventsWriter]:
        with naming(self._path):
            _truncate(self._path, self._start)
            file = self._path.open("a")
        with naming(self._board_path):
            self._board_path.mkdir(exist_ok=True)
            events = EventsWriter(str(self._board_path / "events"))
            for what in (
                {"file_version": "brain.Event:2"},
                {"session_log": SessionLog(status=SessionLog.START)},  # hides later steps before it
            ):
                events.write_event(Event(step=self._start, **what))
            events.flush()
        if self._trackers is not None:
            self._trackers.begin()
        return file, events


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """All complete lines of a run's metrics.jsonl, in order.

    Raises:
      ValueError: a line is damaged.
    """
    return read_lines(Path(directory) / FILE_NAME, is_line)


def is_line(line: dict[str, Any]) -> bool:
    """True for a line of metrics.jsonl."""
    return type(line["step"]) is int


def _truncate(path: Path, start_step: int) -> None:
    """Drops lines of `start_step` and later; the file is replaced as a whole or not at all."""
    kept = [line for line in read_metrics(path.parent) if line["step"] < start_step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
