"""All trackers of a run: opened together on the first host and sent metrics in the background, no
step twice.

`trackers.json` in the run's folder holds each tracker's id, the last step that was sent to it and
the names of that step's metrics. Services cannot take back what they received, so a step made again
after a resume or a rollback is sent only what it still lacks; metrics.jsonl has what counts.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from models.files.terminal import Console
from parallel.hosts.agreement import agree
from parallel.runs.atomic import replace_text
from parallel.trackers.tracker import Outcome, TrackedRun, Tracker, find_tracker

FILE_NAME = "trackers.json"

Json = Any


class _Told(NamedTuple):
    """The last step that was sent to a tracker, and the names of its metrics that were sent; None
    means all."""

    step: int = -1
    names: tuple[str, ...] | None = ()

    def lacks(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics of a step that are yet to be sent."""
        if step != self.step:
            return metrics if step > self.step else {}
        told = metrics if self.names is None else self.names
        return {name: value for name, value in metrics.items() if name not in told}

    def after(self, step: int, metrics: Mapping[str, float]) -> "_Told":
        """The record once these metrics are sent too."""
        before = (self.names or ()) if step == self.step else ()
        return self if step < self.step else _Told(step, (*dict.fromkeys((*before, *metrics)),))


_LAST_SECONDS = 30.0
"""Seconds that trackers have at a run's end to send what they still hold."""


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers of a run. Use as a context manager; `outcome` says how the run ended, by default
    that it failed.

    All hosts create one in the same way; only the first host sends anything.

    Args:
      named: values of `--track`, see `find_tracker`.
      resume: continues the runs that trackers.json names, if any.

    Raises:
      ValueError, FileNotFoundError: a tracker cannot be opened.
    """

    outcome: Outcome = "failed"

    def __init__(
        self, named: Sequence[str], folder: Path, config: Json, resume: bool, console: Console
    ) -> None:
        check_trackers(named)
        self._senders: list[_Sender] = []
        book = _Book(folder / FILE_NAME, resume, console)

        def begin(_: list[str]) -> str:
            for name in named:
                try:
                    self._senders.append(_Sender(name, folder, config, book, console))
                except Exception as error:  # any error that a service's library raises
                    return f"--track {name} could not be opened: {_reason(error)}."
            return ""

        if named and (failure := agree("trackers", "", begin)):
            self.close()
            raise ValueError(failure)

    def begin(self) -> None:
        """Steps continue from some checkpoint; those already sent are not sent again."""
        for sender in self._senders:
            sender.before = sender.sent

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics of a step to all trackers, in the background; failures are reported on the
        console."""
        for sender in self._senders:
            sender.put(step, metrics)

    def close(self) -> None:
        """Ends the run in all trackers, and waits a limited time for that."""
        for sender in self._senders:
            sender.end(self.outcome)
        for sender in self._senders:
            sender.join()

    def __exit__(self, *_: object) -> None:
        self.close()


def check_trackers(named: Sequence[str]) -> None:
    """Makes all checks that are possible before anything is opened.

    Raises:
      ValueError, FileNotFoundError: a tracker is unknown, is not installed, or is given twice.
    """
    services = [name if ".py:" in name else name.partition(":")[0] for name in named]
    for name, service in zip(named, services, strict=True):
        find_tracker(name)
        if services.count(service) > 1:
            raise ValueError(f"--track names {service} twice; a run has one place in each service.")


class _Book:
    """trackers.json, shared by the threads of its trackers."""

    def __init__(self, path: Path, resume: bool, console: Console) -> None:
        self._path, self._lock, self._lines = path, threading.Lock(), dict[str, Json]()
        if not (resume and path.exists()):
            return
        try:
            self._lines = {
                name: {"id": str(line["id"]), "step": int(line["step"]), "names": _names(line)}
                for name, line in json.loads(path.read_bytes()).items()
            }
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            console.print(f"{path} is damaged; trackers begin new runs.", soft_wrap=True)

    def of(self, name: str) -> tuple[str | None, _Told]:
        """The id of a tracker's run, None for a new run, and the record of what was sent."""
        if (line := self._lines.get(name)) is None:
            return None, _Told()
        return line["id"], _Told(line["step"], line["names"])

    def note(self, name: str, identity: str, told: _Told) -> None:
        """Writes the id and the record, for this process or the next."""
        with self._lock:
            self._lines[name] = {"id": identity, **told._asdict()}
            replace_text(self._path, json.dumps(self._lines) + "\n")


class _Sender:
    """One tracker and the thread that sends to it."""

    def __init__(
        self, name: str, folder: Path, config: Json, book: _Book, console: Console
    ) -> None:
        self._name, self._book, self._console = name, book, console
        opener, project = find_tracker(name)
        known, self.sent = book.of(name)
        self.before, self._lost = self.sent, 0
        self._tracker: Tracker = opener(TrackedRun(folder, project, known, config))
        book.note(name, self._tracker.id, self.sent)
        again = "continues" if known else "starts"
        console.print(f"--track {name} {again}: {self._tracker.place}", soft_wrap=True)
        self._queue: SimpleQueue[tuple[int, Mapping[str, float], _Told] | Outcome] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        if fresh := self.before.lacks(step, metrics):
            self.sent = self.sent.after(step, fresh)
            self._queue.put((step, fresh, self.sent))

    def end(self, outcome: Outcome) -> None:
        self._queue.put(outcome)

    def join(self) -> None:
        self._thread.join(_LAST_SECONDS)
        alive = self._thread.is_alive()
        if lost := self._lost + (self._queue.qsize() if alive else 0):
            self._say(f"{lost} lines did not arrive; metrics.jsonl has them all.")
        elif alive:
            self._say("all lines were sent, but it has not finished, so the last may be lost.")

    def _work(self) -> None:
        while isinstance(item := self._queue.get(), tuple):
            step, metrics, told = item
            try:
                self._book.note(self._name, self._tracker.id, told)  # first: none is sent twice
                self._tracker.log(step, metrics)
            except Exception as error:  # the run goes on, the service may come back
                self._lost += 1
                if self._lost == 1:
                    self._say(f"step {step} did not arrive ({_reason(error)}); the run continues.")
        try:
            self._tracker.finish(item)
        except Exception as error:
            self._say(f"could not be closed ({_reason(error)}).")

    def _say(self, what: str) -> None:
        self._console.print(f"warning: --track {self._name}: {what}", soft_wrap=True)


def _names(line: Json) -> tuple[str, ...] | None:
    """Names in a line of trackers.json; older runs had none."""
    return None if (names := line.get("names")) is None else tuple(map(str, names))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
