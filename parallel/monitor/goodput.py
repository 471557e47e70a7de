"""Goodput: the share of a run's time, over all its starts, that was spent on steps that count.

goodput.jsonl in the run's folder is append-only: a line per step with the seconds since the last
line, by cause, so a killed run loses the account of at most one step. Causes describe the main
thread of the first host, one at a time, so their seconds sum to the elapsed time.
"""

import json
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

from parallel.runs.json_lines import read_lines
from parallel.runs.log_failure import naming

FILE_NAME = "goodput.jsonl"

Cause = Literal[
    "step",
    "data",
    "evaluation",
    "checkpoint",
    "profile",
    "compile",
    "start",
    "restart",
    "stopped",
    "wasted",
]
_MEANING = {
    "step": "steps that count",
    "data": "waiting for data",
    "evaluation": "evaluating",
    "checkpoint": "saving (while steps wait)",
    "profile": "writing a trace (--trainer.profile)",
    "compile": "compiling",
    "start": "starting, up to the first step",
    "restart": "from an interruption to the next step",
    "stopped": "stopped, until resumed",
    "wasted": "steps that were lost and repeated",
}


@dataclass
class Account:
    """Sums over the lines of a goodput.jsonl: seconds by cause, number of steps that count, of
    steps that were lost, and of starts."""

    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(get_args(Cause), 0.0))
    steps: int = 0
    lost_steps: int = 0
    starts: int = 0
    _last: dict[str, Any] | None = None
    _made: list[tuple[int, float]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Adds the next line."""
        for cause, seconds in line["seconds"].items():
            self.seconds[cause] += seconds
        if line["event"] == "begin":
            if self._last is not None:
                gap: Cause = "stopped" if self._last["event"] == "end" else "restart"
                self.seconds[gap] += line["time"] - self._last["time"]
            self.lost_steps += max(self.steps - line["step"], 0)
            while self._made and self._made[-1][0] > line["step"]:
                seconds = self._made.pop()[1]
                self.seconds["step"] -= seconds
                self.seconds["wasted"] += seconds
            self.starts += line["start"]
        elif "step" in line["seconds"]:
            self._made.append((line["step"], line["seconds"]["step"]))
        self.steps, self._last = line["step"], line

    @property
    def running(self) -> float:
        """Seconds in which the run was not stopped."""
        return sum(self.seconds.values()) - self.seconds["stopped"]

    @property
    def goodput(self) -> float:
        """The share of steps that count in the time in which the run was not stopped."""
        return self.seconds["step"] / self.running if self.running > 0 else 0.0

    def report(self) -> str:
        """A headline and a line per cause, for the end of a run. Shares are of the time in which
        the run was not stopped; "stopped" itself has no share."""
        starts = f"{self.starts} start" + "s" * (self.starts != 1)
        lost = f", {self.lost_steps} lost and repeated" if self.lost_steps else ""
        lines = [f"Goodput {self.goodput:.1%}: {self.steps} steps in {starts}{lost}"]
        for cause, seconds in self.seconds.items():
            if seconds > 0:
                share = "" if cause == "stopped" else f"{seconds / self.running:.1%}"
                lines.append(f"{seconds:12.1f} s {share:>6}  {_MEANING[cause]}")
        return "\n".join(lines)


def read_account(directory: Path) -> Account:
    """The account of the run in `directory`, from the lines that are complete.

    Raises:
      ValueError: a line is damaged.
    """
    account = Account()
    for line in read_lines(Path(directory) / FILE_NAME, is_line):
        account.add(line)
    return account


def total(accounts: Iterable[Account]) -> Account:
    """The account of runs that took turns, without the time in which each was stopped."""
    whole = Account()
    for account in accounts:
        whole.steps += account.steps
        whole.lost_steps += account.lost_steps
        whole.starts += account.starts
        for cause, seconds in account.seconds.items():
            whole.seconds[cause] += seconds if cause != "stopped" else 0.0
    return whole


def is_line(line: dict[str, Any]) -> bool:
    """True for a line of goodput.jsonl."""
    known = line["event"] != "begin" or type(line["start"]) is int
    numbers = (line["time"], *line["seconds"].values())
    return (
        known
        and type(line["step"]) is int
        and set(line["seconds"]) <= set(get_args(Cause))
        and all(type(number) in (int, float) for number in numbers)
    )


class Ledger(AbstractContextManager["Ledger"]):
    """Keeps the account of a run while it runs; use as a context manager, in the main thread.

    Nothing is written before the first `begin`, or if `directory` is None (on all hosts but the
    first).
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file: IO[str] | None = None
        self.account = Account() if directory is None else read_account(directory)
        self._until = time.time()
        self._seconds: dict[str, float] = {}
        self._starting: Cause | None = "restart" if self.account.starts else "start"

    def begin(self, step: int) -> None:
        """Steps continue from `step`; steps made past it are lost. Called first at a start, then
        after every return to a checkpoint."""
        first = self._file is None
        if first and self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / FILE_NAME
            _cut(path)
            self._file = path.open("a")
        if not first:
            self._starting = "restart"
        self._write("begin", step, start=int(first))

    def spend(self, cause: Cause) -> None:
        """Counts the time since the last call under `cause`. Up to the first step of a start, all
        time but compiling counts as starting."""
        now = max(time.time(), self._until)
        if self._starting is not None and cause != "compile":
            if cause == "step":
                self._starting = None
            else:
                cause = self._starting
        self._seconds[cause] = self._seconds.get(cause, 0.0) + now - self._until
        self._until = now

    def made(self, step: int) -> None:
        """Writes the seconds since the last line, once `step` steps are made."""
        self._write("made", step)

    def end(self, step: int) -> None:
        """Marks an orderly end: the time until the next start does not count as the run's."""
        self._write("end", step)

    def sync(self) -> None:
        """Returns when all lines are on disk, where they survive a crash of the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # `_write` has raised it; its line is still in the buffer
                self._file.close()

    def _write(self, event: str, step: int, **more: int) -> None:
        spent, at = self._seconds, self._until
        if event == "begin":  # the time since the last line belongs to the next line
            spent, at = {}, at - sum(spent.values())
        else:
            self._seconds = {}
        line = {"event": event, "step": step, "time": at, "seconds": spent, **more}
        self.account.add(line)
        if self._file is not None:
            with naming(Path(self._file.name)):
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()


def _cut(path: Path) -> None:
    """Drops a last line that a kill left incomplete."""
    if path.exists():
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
