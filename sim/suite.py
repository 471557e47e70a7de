"""A benchmark suite: its tasks, and how to open slots in which to act on them.

A user's own suite is a `Suite` in their own file; `sim.suites` finds it by name.
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
    """The tasks of a benchmark. `open(tasks, count, size)` makes `count` slots for some of its
    tasks, with observed pictures of `size` pixels per edge. Tasks that cannot share slots
    (`together` is false) are opened one at a time."""

    name: str
    tasks: tuple[str, ...]
    episodes: int
    """Number of starts per task, as the suite's authors count them: seeds from `first_seed` on."""
    open: Callable[[tuple[str, ...], int, int], Slots]
    first_seed: int = EVAL_SEEDS.start
    """First seed of the starts for judging policies."""
    recorded_from: int = 0
    """First seed of recordings, none of which may reach a start for judging policies."""
    fixed: int | None = None
    """Number of starts per task below `recorded_from`, if they are fixed: seeds 0 … fixed - 1. None
    if every seed is a start."""
    noise: float = 0.015
    """Default noise that recordings add to the expert's actions when executing them: standard
    deviation as a fraction of each action's range."""
    together: bool = True
    slots: int | None = None
    """Suitable number of slots; one per core if None."""
    environment: Callable[[str, int], Environment] | None = None
    """(task, size) -> the environment that `open` makes slots of, if it is one on a device."""
    drawn: int | None = None
    """Edge of the pictures in its datasets, pixels; policies resize them, in training and here.
    None if pictures are drawn in the size that the policy sees."""
    phases: Callable[[str, str, Float[np.ndarray, "t a"]], tuple[str, ...]] | None = None
    """(task, goal, actions) -> the phase of the task that its scripted expert was in at each step,
    in words; None if it does not report phases."""
    action_range: tuple[tuple[float, float], ...] = ()
    """Lowest and highest value of each action; needed for noise as a fraction of the range
    (`tools.evaluate --perturb noise`)."""
    variants: Mapping[str, "Suite | str"] = field(default_factory=dict)
    """Suites in which one thing is changed, or their names for `load_suite`, by the name of the
    change. They have the tasks and first seed of this suite (`tools.evaluate --perturb`)."""
    about: str = ""
    """Words for what a variant changes."""
    cheaper: "Callable[[int, bool], Suite] | None" = None
    """(steps, smooth) -> the suite that draws a picture only every `steps` steps of an episode and
    repeats it in between, with smooth edges or without; for recordings in which drawing is the main
    cost."""
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
                f"Task {repeated} of suite '{self.name}' is named more than once, so its episodes "
                "would count more than once; name it once."
            )
        if unknown := [task for task in tasks if task not in self.tasks]:
            raise ValueError(f"Suite '{self.name}' has no task {unknown}, only {list(self.tasks)}.")
        tasks = tasks or self.tasks
        return [tasks] if self.together else [(task,) for task in tasks]

    def judged(self, episodes: int) -> range:
        """Seeds of `episodes` starts per task for judging policies.

        Raises:
          ValueError: there are not as many, or recordings begin among them.
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
                f"(recorded_from), so policies would be judged on starts they may have learnt "
                f"from; ask for fewer, or leave out the suite's first_seed, which is "
                f"{EVAL_SEEDS.start} then."
            )
        return seeds

    def edge(self, seen: int) -> int:
        """Edge at which to draw pictures for a policy that sees `seen` pixels."""
        return self.drawn or seen

    def count(self, asked: int | None, episodes: int) -> int:
        """Number of slots to open for `episodes` episodes, if the user asked for `asked` slots or
        none in particular."""
        return min(asked or self.slots or os.cpu_count() or 1, episodes)
