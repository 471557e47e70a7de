"""The loop around `Slots` that evaluation, films and demonstrations share: the actor commands all
slots that wait, and the next episode goes to the slot that is free.

If an episode's simulator fails, the episode is started again in its slot, a few times.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Array, Float, UInt8, UInt32

from sim.protocol import Observation, Outcome, Slots, Spec, Start

Policy = Callable[
    [Observation, list[str], UInt32[np.ndarray, "n 2"]], Float[Array | np.ndarray, "n h a"]
]
"""(observation, prompts, keys) -> action chunks in the robot's units. A row's key identifies its
episode and step; its chunk depends only on its own observation, prompt and key."""
Control = Literal["own", "other prompt", "blank"]
"""Condition of a policy: with the true prompt, with another goal's prompt, or with images of
zeros."""

RERUNS = 3
"""Restarts of an episode whose simulator failed."""


class NotFinite(ValueError):
    """A policy's actions are not finite."""


@dataclass(eq=False)
class EpisodeRun:
    """An episode in progress and, at its end, its result."""

    start: Start
    control: Control = "own"
    reruns: int = 0
    ended: bool = False
    error: str | None = None
    """The simulator's message, if it failed again and again."""
    observation: Observation | None = None
    """The latest observation."""
    goal: int = 0
    named: int = 0
    """The goal that the prompt names."""
    prompt: str = ""
    success: bool = False
    achieved: set[int] | None = None
    """Goals that were achieved; None if the slots judge only the episode's own goal."""
    rewards: list[Float[np.ndarray, " t"]] = field(default_factory=list)
    actions: list[Float[np.ndarray, "t a"]] = field(default_factory=list)
    """Requested actions, concatenated; a policy's may extend beyond the executed ones."""
    seen: list[Observation] = field(default_factory=list)
    """Earlier observations, for callers that keep them."""
    film: list[UInt8[np.ndarray, "t h w 3"]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of executed steps."""
        return sum(map(len, self.rewards))

    def add(self, outcome: Outcome, spec: Spec) -> None:
        """Records the next outcome.

        Raises:
          ValueError: the episode continues beyond `max_steps`.
        """
        if self.observation is None:
            self._instruct(outcome.goal, spec)
        self.observation, self.ended = outcome.observation, outcome.ended
        self.success |= outcome.success
        self.rewards.append(outcome.reward)
        if outcome.achieved is not None:
            found = set(np.flatnonzero(outcome.achieved).tolist())
            self.achieved = found | (self.achieved or set())
        if outcome.actions is not None:
            self.actions.append(outcome.actions)
        if outcome.film is not None:
            self.film.append(outcome.film)
        if not outcome.ended and self.length >= spec.max_steps:
            raise ValueError(
                f"'{spec.name}' did not end the episode of seed {self.start.seed} of task "
                f"'{self.start.task}' within its max_steps = {spec.max_steps}."
            )

    def begin_again(self) -> None:
        """Resets the run, except for the count of its restarts."""
        self.reruns += 1
        self.observation, self.success, self.achieved = None, False, None
        for told in (self.rewards, self.actions, self.seen, self.film):
            told.clear()

    def _instruct(self, goal: int, spec: Spec) -> None:
        """Draws the goal that the prompt names, and a wording of it, from the seed."""
        _, shift = np.random.default_rng(self.start.seed).random(2)
        others = len(spec.goals) - 1
        away = 1 + int(shift * others) if self.control == "other prompt" else 0
        self.goal, self.named = goal, (goal + away) % len(spec.goals)
        self.prompt = spec.wording(self.named, self.start.seed)


def act(
    slots: Slots,
    following: Callable[[], EpisodeRun | None],
    tell: Callable[[dict[int, EpisodeRun]], None],
) -> Iterator[EpisodeRun]:
    """Yields every run when it ends.

    Args:
      following: returns the next run to begin, None while there is none; called whenever a slot is
        free.
      tell: commands the waiting slots, which are given with the runs in them.
    """
    free = deque(range(slots.count))
    acting: dict[int, EpisodeRun] = {}
    while True:
        while free and (run := following()) is not None:
            slot = free.popleft()
            acting[slot] = run
            slots.begin(slot, run.start)
        if not acting:
            return
        waiting = {}
        for outcome in slots.poll():
            slot, run = outcome.slot, acting[outcome.slot]
            if outcome.error is None:
                run.add(outcome, slots.spec)
            elif run.reruns < RERUNS:
                run.begin_again()
                slots.begin(slot, run.start)
                continue
            else:
                run.ended, run.success, run.error = True, False, outcome.error
            if run.ended:
                del acting[slot]
                free.append(slot)
                yield run
            else:
                waiting[slot] = run
        if waiting:
            tell(waiting)


def plan(policy: Policy, spec: Spec, runs: Sequence[EpisodeRun], replan_steps: int) -> None:
    """Asks a policy for the next actions of each run, and adds `replan_steps` steps to its
    `actions`.

    Raises:
      ValueError: the actions have a wrong shape.
      NotFinite: the actions are not finite.
    """
    images, states = zip(*(run.observation for run in runs), strict=True)
    shown = np.stack([x * (run.control != "blank") for x, run in zip(images, runs, strict=True)])
    keys = np.array([run.start.key(run.length) for run in runs], np.uint32)
    answer = policy(Observation(shown, np.stack(states)), [run.prompt for run in runs], keys)
    actions = np.asarray(answer, np.float32)
    _check_actions(spec, actions, runs, replan_steps)
    for run, chunk in zip(runs, actions, strict=True):
        run.actions.append(chunk[:replan_steps])


def _check_actions(
    spec: Spec, actions: Float[np.ndarray, "n h a"], runs: Sequence[EpisodeRun], replan_steps: int
) -> None:
    n, a, shape = len(runs), len(spec.action_names), actions.shape
    if actions.ndim != 3 or shape[0] != n or shape[1] < replan_steps or shape[2] != a:
        names = ", ".join(spec.action_names)
        raise ValueError(
            f"The policy returned actions of shape {shape}, expected [{n} episodes, at least "
            f"{replan_steps} steps, {a} actions ({names})]."
        )
    finite = np.isfinite(actions[:, :replan_steps]).all((1, 2))
    if not finite.all():
        run = runs[finite.argmin()]
        raise NotFinite(
            f"The policy returned an action that is not finite at step {run.length} of the episode "
            f"of seed {run.start.seed} of task '{run.start.task}'."
        )
