"""Runs as found in their folders: in progress, ended, interrupted or damaged.

Nothing is changed, and everything that can still be read is read: damaged lines are left out and
reported, and what a run does not record is None.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from data.files import cached
from models.files.whole_text import read_whole
from parallel.evaluations import HELD_OUT_LOSS, Evaluations
from parallel.hooks import due
from parallel.monitor import goodput, metrics
from parallel.runs.json_lines import sound_lines
from parallel.runs.run_folder import CONFIG_NAME, ORIGIN_NAME, SAVED_NAME
from parallel.runs.run_lock import LOCK_NAME, at_work
from tools.recipes import closed_loop
from tools.runs.judged import evaluations_in, read_rates

Json = Any
Points = list[tuple[int, float]]

_MARKS = (metrics.FILE_NAME, goodput.FILE_NAME, SAVED_NAME, "checkpoints", LOCK_NAME)
"""Names, at least one of which a run's folder holds besides its config."""
_EARLIER = {
    "trainer.steps": "trainer.train_steps",
    "model.steps": "model.euler_steps",
    "rl.steps": "rl.learner_steps",
    "rl.flow.steps": "rl.flow.euler_steps",
}
"""Fields of configs by the names that earlier runs gave them, with today's."""


@dataclass(frozen=True)
class RunRecord:
    """A run as read from its folder. `rows`, `evaluations` and `account` are the undamaged lines of
    metrics.jsonl, closed_loop.jsonl and goodput.jsonl. `saved` is the number of steps of its last
    checkpoint, 0 if unknown. `judged` are the success rates that tools.evaluate left in the run's
    folders, by folder. `left` is true if a process that is gone left its lock. `damage` are
    sentences on everything else, `warnings` those about the run's data."""

    folder: Path
    name: str
    config: Mapping[str, Json]
    origin: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    account: Sequence[Mapping[str, Any]]
    saved: int
    judged: Mapping[str, Mapping[str, float]]
    at_work: str
    left: bool
    damage: Sequence[str]
    warnings: Sequence[str] = ()

    @property
    def done(self) -> int:
        """Steps done."""
        return max((row["step"] + 1 for row in self.rows if "loss" in row), default=self.saved)

    @property
    def steps(self) -> int | None:
        """Steps that the run is to make."""
        part = self.config.get("rl", self.config.get("trainer"))
        names = ("learner_steps", "train_steps", "steps")  # the last, of earlier runs
        found = [part[name] for name in names if name in part] if isinstance(part, dict) else []
        return found[0] if found and type(found[0]) is int else None

    @property
    def seconds(self) -> float:
        """Time that the run took, without the time in which it was stopped."""
        if not self.account:
            return sum(value for _, value in self.points("step_seconds"))
        account = goodput.Account()
        for line in self.account:
            account.add(dict(line))
        return account.running

    @property
    def status(self) -> str:
        """Status such as "running" or "finished"; "interrupted" if the run did not end in an
        orderly way."""
        if self.at_work:
            return "running" if self.at_work == "here" else f"running on {self.at_work}"
        kept = self.saved >= self.done
        if self.account:
            orderly = self.account[-1]["event"] == "end"
        else:
            orderly = not self.left and (kept or not self.saved)
        if self.steps is not None and self.done >= self.steps and (orderly or kept):
            return "stopped" if self._owes_evaluation else "finished"
        if self._stopped_early:
            return "stopped early"
        return "stopped" if orderly else "interrupted"

    def points(self, name: str) -> Points:
        """Steps done, and the value of a metric after them."""
        values = [(row["step"] + 1, row[name]) for row in self.rows if name in row]
        return [(step, float(value)) for step, value in values if type(value) in (int, float)]

    @cached_property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    @property
    def _owes_evaluation(self) -> bool:
        """True if a stop put off the evaluation after the last step, which `--resume` makes."""
        trainer = self.config.get("trainer")
        every = trainer.get("eval_every") if isinstance(trainer, dict) else None
        last = max((step for step, _ in self.points(HELD_OUT_LOSS)), default=self.done)
        return type(every) is int and due(self.done, every) and last < self.done

    @property
    def _stopped_early(self) -> bool:
        trainer = self.config.get("trainer")
        if not isinstance(trainer, dict) or type(trainer.get("patience")) is not int:
            return False
        judge = Evaluations(trainer.get("keep_best") or HELD_OUT_LOSS, trainer["patience"])
        judge.take([row for row in self.rows if type(row.get(judge.metric)) in (int, float)])
        return bool(judge.verdict)


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Folders of all runs at the paths or in them, each once.

    Raises:
      FileNotFoundError: a path does not exist, or there is no run.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such folder; give the folder of a run, or one that contains runs."
            )
        inside = list(_runs_in(path))
        if not inside:
            raise FileNotFoundError(
                f"{path} holds no run: there is no {CONFIG_NAME} beside a {metrics.FILE_NAME} "
                "or checkpoints; give a folder that tools.train or tools.rl wrote (its --out), "
                "or one that contains such folders."
            )
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Reads the folders; each run gets a unique name."""
    parts = [Path(os.path.abspath(folder)).parts[1:] for folder in folders]
    longest = max(map(len, parts), default=1)
    unlike = (n for n in range(1, longest) if len({p[-n:] for p in parts}) == len(parts))
    length = next(unlike, longest)
    return [_read(folder, "/".join(p[-length:])) for folder, p in zip(folders, parts, strict=True)]


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Json]]:
    """Fields of the configs that differ, with the value in each run; None where it has none."""
    flat = []
    for run in runs:
        of = flatten_dict(dict(run.config), sep=".", is_leaf=lambda path, part: path and not part)
        flat.append({_EARLIER.get(name, name): value for name, value in of.items()})
    names = dict.fromkeys(name for one in flat for name in one)
    table = {name: [one.get(name) for one in flat] for name in names}
    return {
        name: values
        for name, values in table.items()
        if any(json.dumps(value) != json.dumps(values[0]) for value in values)
    }


def _runs_in(path: Path) -> Iterator[Path]:
    """Runs at the path or below, also behind links; a folder before links to it."""
    passed: set[str] = set()
    for at, folders, files in os.walk(path, followlinks=True):
        there, real = {*folders, *files}, os.path.realpath(at)
        if real in passed:
            folders.clear()
            continue
        passed.add(real)
        if CONFIG_NAME in files and there & set(_MARKS):
            yield Path(at)
            folders[:] = {"members"} & there
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        folders.sort(key=lambda folder: (os.path.islink(os.path.join(at, folder)), folder))


def _read(folder: Path, name: str) -> RunRecord:
    damage: list[str] = []

    def log(file: str, fits: Any) -> list[dict[str, Any]]:
        path = folder / file
        try:
            lines, damaged = sound_lines(path, fits)
        except OSError as error:
            damage.append(f"{path} cannot be read ({error.strerror}).")
            return []
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            damage.append(
                f"{path}, line {damaged[0]}{more}: not a line of this log and was left out."
            )
        return lines

    def values(file: str | Path) -> dict[str, Any]:
        path = folder / file
        try:
            if isinstance(found := json.loads(read_whole(path)), dict):
                return found
            raise ValueError
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError):
            damage.append(f"{path} is damaged and was left out.")
        return {}

    def told(path: Path) -> list[str]:
        try:
            return [str(line) for line in cached.read_json(path)]
        except (OSError, ValueError, TypeError):
            damage.append(f"{path} is damaged and was left out.")
        return []

    origin = {k: v for k, v in values(ORIGIN_NAME).items() if isinstance(v, str)}
    saved, judged = values(SAVED_NAME).get("step"), {}
    for path in evaluations_in(folder):
        try:
            judged[path.parent.name] = next(iter(read_rates(path)[1].values())).to_json()
        except (ValueError, OSError) as error:
            damage.append(str(error))
    evaluations = {one["step"]: one for one in log(closed_loop.FILE_NAME, closed_loop.is_line)}
    return RunRecord(
        folder,
        name,
        values(CONFIG_NAME),
        origin,
        log(metrics.FILE_NAME, metrics.is_line),
        [evaluations[step] for step in sorted(evaluations)],
        log(goodput.FILE_NAME, goodput.is_line),
        saved if type(saved) is int else 0,
        judged,
        (busy := at_work(folder)),
        not busy and (folder / LOCK_NAME).exists(),
        damage,
        [line for path in sorted(folder.glob("store/warnings-*.json")) for line in told(path)],
    )


def finite(points: Points) -> Points:
    """Points whose value is a number."""
    return [(step, value) for step, value in points if isfinite(value)]
