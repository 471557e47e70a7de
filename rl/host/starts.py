"""Starts of training episodes: tasks that follow what the learner can still learn from, and seeds
from which no policy is ever judged. Training on the states that a benchmark evaluates is a known
leak of RL for VLAs (SimpleVLA-RL's issue 34); here the two are disjoint by construction, for the
run's own evaluations and for later ones.

DART (arXiv 2509.23866) also gives more rollouts to tasks that sometimes succeed; it does so from
whatever has been counted by then. Here a ticket's task depends only on the seed and on steps that
all hosts have ended long before, so it is the same for any number of hosts and after a resume.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from parallel.runs.position import entry, shown
from rl.records import TaskOutcome
from sim.protocol import EVAL_SEEDS, Start
from sim.suite import Suite

_KEPT = 0.9
"""Decay of the counts of groups, from step to step."""


def training_seeds(suite: Suite) -> range:
    """Seeds to learn from: those of recordings, up to the next that policies are judged by.

    Raises:
      ValueError: there are none.
    """
    judged = suite.first_seed if suite.first_seed > suite.recorded_from else EVAL_SEEDS.start
    seeds = range(suite.recorded_from, min(judged, EVAL_SEEDS.start))
    if not seeds:
        raise ValueError(
            f"Suite '{suite.name}' has no starts to learn from: recordings begin with seed "
            f"{suite.recorded_from} (recorded_from), and policies are judged from seed {judged} "
            f"on; choose a recorded_from below {EVAL_SEEDS.start}."
        )
    return seeds


def draw_start(seed: int, ticket: int, task: str, seeds: range, attempt: int = 0) -> Start:
    """Draws a start of this task for a ticket: one of `seeds`, which must not be those of
    evaluation; another one for each attempt."""
    rng = np.random.default_rng((seed, ticket, attempt) if attempt else (seed, ticket))
    return Start(task, seeds[rng.integers(len(seeds))])


def share_out(
    seed: int, step: int, tickets: int, weights: Float[np.ndarray, " k"]
) -> Int[np.ndarray, " tickets"]:
    """Indices of the tasks of a step's tickets, in random order. Each task gets its share of them,
    rounded up or down at random so that the mean is exact (systematic sampling)."""
    rng = np.random.default_rng((seed, step, 0, 0))
    at = (np.arange(tickets) + rng.random()) / tickets
    found = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], at, side="right")
    return rng.permutation(found)


class Curriculum:
    """Starts of all tickets of a run.

    By default, tasks have equal shares of each step. If they follow the `signal`, a task's share is
    in proportion to (s + 1) / (n + 1), where n counts its groups, s those with signal, and both
    fade by a tenth with every step: a task that always or never succeeds is soon drawn rarely, but
    again as its counts fade. Step s counts the steps before s - staleness - 1, which have ended on
    all hosts when the first of its tickets may begin.

    Args:
      tasks: those to learn.
      seeds: those to learn from.
      tickets: number of tickets in a learner's step.
    """

    def __init__(
        self,
        seed: int,
        tasks: Sequence[str],
        seeds: range,
        *,
        tickets: int,
        staleness: int,
        signal: bool = False,
    ) -> None:
        self._seed, self._tasks, self._seeds = seed, tuple(tasks), seeds
        self._tickets, self._back, self._signal = tickets, staleness + 1, signal
        self._version = 0
        self._counts = {0: np.zeros((len(tasks), 2))}
        """After so many steps: groups of each task, and those with signal."""

    def start(self, ticket: int, attempt: int = 0) -> Start:
        """Start of a ticket's group, or of the group of its `attempt`-th other draw; callable from
        any thread."""
        step, place = divmod(ticket, self._tickets)
        weights = self._weights(step)
        task = self._tasks[share_out(self._seed, step, self._tickets, weights)[place]]
        return draw_start(self._seed, ticket, task, self._seeds, attempt)

    def note(self, outcomes: Mapping[str, TaskOutcome]) -> None:
        """Counts the next step, given its outcomes by task, of all hosts together."""
        found = [outcomes.get(task) for task in self._tasks]
        now = [(one.groups, one.signal) if one else (0, 0) for one in found]
        before, self._version = self._counts[self._version], self._version + 1
        self._counts[self._version] = _KEPT * before + np.asarray(now, float)
        self._counts.pop(self._version - self._back - 1, None)

    def state(self) -> Any:
        """Counts that `restore` needs, as JSON."""
        return {"tasks": list(self._tasks), "counts": [x.tolist() for x in self._counts.values()]}

    def restore(self, found: Any, version: int) -> None:
        """Continues after `version` steps; raises ValueError, with the field, unless `found` can be
        the `state` then."""
        tasks, counts = entry(found, "tasks"), entry(found, "counts")
        if tasks != list(self._tasks):
            raise ValueError(f"tasks is {shown(tasks)}, but the run's are {list(self._tasks)}")
        wanted = min(version, self._back) + 1
        try:
            read = np.asarray(counts, float)
        except (TypeError, ValueError):
            read = np.zeros(0)
        if read.shape != (wanted, len(tasks), 2) or not np.all((read >= 0) & (read < np.inf)):
            raise ValueError(
                f"counts is {shown(counts)}, expected two numbers of at least 0 for each of "
                f"{len(tasks)} tasks after each of {wanted} steps"
            )
        first = version + 1 - wanted
        self._version = version
        self._counts = {first + i: counted for i, counted in enumerate(read)}

    def _weights(self, step: int) -> Float[np.ndarray, " k"]:
        if not self._signal:
            return np.ones(len(self._tasks))
        groups, signal = self._counts[max(step - self._back, 0)].T
        return (signal + 1) / (groups + 1)
