"""A benchmark suite: its tasks, and how to open slots in which to act them.

A user's own suite is one of these in a file of theirs; `sim.suites` finds it by name.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from sim.protocol import EVAL_SEEDS, Environment, Slots


@dataclass(frozen=True)
class Suite:
    """`open(tasks, count, size)` makes so many slots for some of its tasks, whose observed pictures
    have `size` pixels an edge. Tasks that cannot share slots (`together` is false) are opened one
    at a time."""

    name: str
    tasks: tuple[str, ...]
    episodes: int
    """Starts a task, as the suite's authors count them: seeds `first_seed` and on."""
    open: Callable[[tuple[str, ...], int, int], Slots]
    first_seed: int = EVAL_SEEDS.start
    """First seed of the starts that policies are judged by."""
    recorded_from: int = 0
    """First seed of recordings, none of which may reach a start that policies are judged by."""
    fixed: int | None = None
    """Number of starts a task below `recorded_from`, where they are fixed: seeds 0 … fixed - 1.
    None where every seed is a start."""
    noise: float = 0.015
    """Noise that recordings add to the expert's actions as they are executed, unless told
    otherwise: standard deviations in parts of each action's range."""
    together: bool = True
    slots: int | None = None
    """Suitable number at a time; one for each core if None."""
    environment: Callable[[str, int], Environment] | None = None
    """(task, size) -> what `open` makes slots of, where that is an environment on a device."""
    drawn: int | None = None
    """Edge of the pictures that its datasets have, pixels: policies resize them, in training and
    here. None where pictures are drawn as the policy sees them."""
    phases: Callable[[str, str, Float[np.ndarray, "t a"]], tuple[str, ...]] | None = None
    """(task, goal, actions) -> what the task's scripted expert was about in each step, in words;
    None if it does not tell."""
    action_range: tuple[tuple[float, float], ...] = ()
    """Lowest and highest value of each action; without it, none can be disturbed by a part of it
    (`tools.evaluate --perturb noise`)."""
    variants: Mapping[str, "Suite | str"] = field(default_factory=dict)
    """Suites in which one thing is changed, or their names for `load_suite`, by what that is. They
    have tasks and first seed of this one (`tools.evaluate --perturb`)."""
    about: str = ""
    """Words for what a variant changes."""
    cheaper: "Callable[[int, bool], Suite] | None" = None
    """The suite that draws a picture only every so many steps of an episode, and shows it again in
    between, and with smooth edges or without: for recordings where drawing is what costs."""
    source: str = ""
    """Origin of a suite that is not ours: SHA-256 of its file, or name and version of its package;
    `load_suite` fills it in."""

    def groups(self, tasks: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """Groups of these tasks (all, if none are named) that share slots.

        Raises:
          ValueError: there is no such task, or one is named twice.
        """
        if repeated := [task for task, times in Counter(tasks).items() if times > 1]:
            raise ValueError(
                f"Task {repeated} of suite '{self.name}' is named more than once, which would "
                "count its episodes as often; name it once."
            )
        if unknown := [task for task in tasks if task not in self.tasks]:
            raise ValueError(f"Suite '{self.name}' has no task {unknown}, only {list(self.tasks)}.")
        tasks = tasks or self.tasks
        return [tasks] if self.together else [(task,) for task in tasks]

    def judged(self, episodes: int) -> range:
        """Seeds of so many starts a task that policies are judged by.

        Raises:
          ValueError: there are not so many, or recordings begin among them.
        """
        seeds = range(self.first_seed, self.first_seed + episodes)
        early = seeds.start < self.recorded_from
        if self.fixed is not None and early and seeds.stop > self.fixed:
            raise ValueError(
                f"episodes is {episodes}, but suite '{self.name}' has {self.fixed} fixed starts a "
                f"task, seeds 0 … {self.fixed - 1}, and is judged from seed {seeds.start}; ask for "
                f"{max(0, self.fixed - seeds.start)} at most."
            )
        if self.recorded_from in seeds:
            raise ValueError(
                f"{episodes} episodes of suite '{self.name}' are judged by seeds {seeds.start} … "
                f"{seeds.stop - 1}, and recordings begin with seed {self.recorded_from} "
                "(recorded_from), so policies would be judged by what they may have learnt; ask "
                f"for fewer, or leave the suite's first_seed out, which is {EVAL_SEEDS.start} then."
            )
        return seeds

    def edge(self, seen: int) -> int:
        """Edge at which to draw pictures for a policy that sees `seen` pixels."""
        return self.drawn or seen

    def count(self, asked: int | None, episodes: int) -> int:
        """Slots to open for so many episodes, if the user asked for so many or for none."""
        return min(asked or self.slots or os.cpu_count() or 1, episodes)
