"""Metrics of a run: one JSON object per line in metrics.jsonl, and the same for TensorBoard.

Each line has `step`, counted from 0: the metrics of the update that step made. A resumed run drops
what was written past its checkpoint once it has made a step, so the file always holds one sequence
and loses nothing to a run that makes none.
"""

import json
import os
from pathlib import Path
from typing import IO, Any

from tensorboardX import SummaryWriter

from models.terminal import Console
from parallel.atomic import replace_text
from parallel.json_lines import read_lines, set_damage_aside

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends metrics of `start_step` and later, which drop what is there of these steps when the
    first is written; use as a context manager."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        self._directory, self._start = Path(directory), start_step
        self._opened: tuple[IO[str], SummaryWriter] | None = None

    def write(self, step: int, metrics: dict[str, float], board: bool = True) -> None:
        """Writes one line; `board` also sends it to TensorBoard."""
        if self._opened is None:
            self._opened = self._open()
        file, writer = self._opened
        file.write(json.dumps({"step": step, **metrics}) + "\n")
        if board:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Hands all lines to the operating system: they survive this process."""
        if self._opened is not None:
            self._opened[0].flush()

    def sync(self) -> None:
        """Returns when all lines are on disk: they survive the machine."""
        if self._opened is not None:
            self._opened[0].flush()
            os.fsync(self._opened[0].fileno())

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._opened is not None:
            for opened in self._opened:
                opened.close()

    def _open(self) -> tuple[IO[str], SummaryWriter]:
        path = self._directory / FILE_NAME
        _truncate(path, self._start)
        board = str(self._directory / "tensorboard")
        return path.open("a"), SummaryWriter(board, purge_step=self._start, write_to_disk=True)


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """All lines of a run's metrics.jsonl that were written whole, in order.

    Raises:
      ValueError: a line is damaged.
    """
    return read_lines(Path(directory) / FILE_NAME, _is_line)


def set_damaged_metrics_aside(directory: Path, console: Console) -> None:
    """Before a run goes on: keeps the good lines of a damaged metrics.jsonl."""
    set_damage_aside(Path(directory) / FILE_NAME, _is_line, console)


def _is_line(line: dict[str, Any]) -> bool:
    return type(line["step"]) is int


def _truncate(path: Path, start_step: int) -> None:
    """Drops lines of `start_step` and later; the file is replaced as a whole or not at all."""
    kept = [line for line in read_metrics(path.parent) if line["step"] < start_step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
