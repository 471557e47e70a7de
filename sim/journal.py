"""Finished episodes on disk, one line of JSON each, from which an interrupted evaluation resumes.

Every condition (a policy, a control, the expert) begins with a line that says what is evaluated, so
its episodes never mix with those of anything else. The executed actions are also kept, as base64 of
little-endian float32 [steps, dims]; clips are made by repeating them.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.files.whole_text import read_whole
from sim.results import Episode


class Journal:
    """The file `path`, which is created when the first condition begins. A last line that a kill
    left incomplete is dropped.

    Raises:
      ValueError: a line is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._headers: dict[str, dict[str, Any]] = {}
        self._episodes: dict[str, list[Episode]] = {}
        if self._path.exists():
            self._read()

    def begin(self, condition: str, header: dict[str, Any]) -> list[Episode]:
        """Begins a condition, with a line that says what it evaluates; returns its finished
        episodes.

        Args:
          header: plain data that includes everything that determines the result of a start.

        Raises:
          ValueError: the file holds episodes of the condition under another header.
        """
        header = json.loads(json.dumps(header))
        known, done = self._headers.get(condition, {}), self._episodes.get(condition, [])
        if known != header and done:
            name = next(n for n in {**known, **header} if known.get(n) != header.get(n))
            raise ValueError(
                f"{self._path} holds episodes of '{condition}' whose {name} is "
                f"{json.dumps(known.get(name))}, but now it is {json.dumps(header.get(name))}; "
                "choose another --out, or remove the file to start over."
            )
        if condition not in self._headers or known != header:
            self._headers[condition] = header
            self._write({"condition": condition, "evaluates": header})
        return list(done)

    def add(self, condition: str, episode: Episode) -> None:
        """Writes an episode; it is in the file on return."""
        actions = base64.b64encode(episode.actions.astype("<f4").tobytes()).decode("ascii")
        row = {**episode.to_json(), "actions": actions}
        self._episodes.setdefault(condition, []).append(episode)
        self._write({"condition": condition, "episode": row})

    def _write(self, line: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _take(self, row: dict[str, Any]) -> None:
        if "evaluates" in row:
            self._headers[row["condition"]] = dict(row["evaluates"])
        else:
            self._episodes.setdefault(row["condition"], []).append(_episode(row["episode"]))

    def _read(self) -> None:
        data = read_whole(self._path)
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{self._path}, line {number}: not a line of an evaluation ({error}); remove "
                    "the line, and its episode will be run again."
                ) from error
        if whole < len(data):
            with self._path.open("r+b") as file:
                file.truncate(whole)


def in_order() -> Callable[[Any], bool]:
    """Check of a journal's lines, to be called on one after the other. For a bad line it returns
    False or raises KeyError, TypeError or ValueError. Episodes are bad without an earlier line that
    says what their condition evaluates."""
    begun = set()

    def fits(row: Any) -> bool:
        if "evaluates" in row:
            dict(row["evaluates"])
            begun.add(row["condition"])
        else:
            _episode(row["episode"])
        return row["condition"] in begun

    return fits


def _episode(row: dict[str, Any]) -> Episode:
    actions = np.frombuffer(base64.b64decode(row["actions"], validate=True), "<f4")
    return Episode(**{**row, "actions": actions.reshape(row["length"], -1)})
