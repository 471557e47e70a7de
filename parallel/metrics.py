"""Metrics of a run: one JSON object per line in metrics.jsonl, and the same for TensorBoard.

Each line has `step`, counted from 0: the metrics of the update that step made. A resumed run drops
what was written past its checkpoint, so the file always holds one sequence.
"""

import json
import os
from pathlib import Path
from typing import IO

from tensorboardX import SummaryWriter

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends metrics of `start_step` and later; use as a context manager."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        self._path = Path(directory) / FILE_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, start_step)
        self._file: IO[str] = self._path.open("a")
        self._board = SummaryWriter(
            str(Path(directory) / "tensorboard"), purge_step=start_step, write_to_disk=True
        )

    def write(self, step: int, metrics: dict[str, float], board: bool = True) -> None:
        """Writes one line; `board` also sends it to TensorBoard."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        if board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Hands all lines to the operating system: they survive this process."""
        self._file.flush()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
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
