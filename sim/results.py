"""Results of an evaluation: episodes, and their summary for one policy under one condition.

Everything except timings and pictures derives from the episodes alone, in the order of their
starts. The same starts therefore give the same result, whatever ran beside them and whether or not
the evaluation was resumed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from models.files import html
from models.files.terminal import counted
from sim.clips import Clip
from sim.protocol import Start
from sim.statistics import Paired, Rate


@dataclass(frozen=True)
class Episode:
    """Result of one start."""

    task: str
    seed: int
    goal: str
    """Goal of the episode, to which `success` refers."""
    named_goal: str
    """Goal that the prompt names: `goal`, unless the control is another prompt."""
    prompt: str
    success: bool
    named_achieved: bool | None
    """True if the goal that the prompt names was reached; None if it is not the episode's own goal
    and the simulator judges only that one."""
    length: int
    """Steps until the end, including the last."""
    reward: float
    """Sum of rewards until the end: the return."""
    roughness: float
    """Mean |second difference| of the executed actions over steps and dimensions, in the robot's
    units per step²; smooth motion has a low value. 0 in an episode of fewer than three steps."""
    actions: Float[np.ndarray, "t a"] = field(compare=False, repr=False)
    """Executed actions."""
    reruns: int = field(default=0, compare=False)
    """Restarts of the episode after its simulator failed."""

    @property
    def start(self) -> Start:
        """Start of the episode, which identifies it."""
        return Start(self.task, self.seed)

    @property
    def obeyed(self) -> bool | None:
        """True if the goal that the prompt names was reached; None if that is not measured."""
        return self.success if self.named_goal == self.goal else self.named_achieved

    def to_json(self) -> dict[str, Any]:
        """All fields except the actions, as plain data."""
        return {k: v for k, v in vars(self).items() if k != "actions"}


@dataclass(frozen=True)
class Failure:
    """A start whose simulator failed repeatedly, so that it does not count."""

    task: str
    seed: int
    error: str
    reruns: int = field(compare=False)


@dataclass(frozen=True)
class CallLatency:
    """Seconds of one policy call, for all episodes that waited for it. The percentiles omit `first`
    (which compiles) unless it is the only call."""

    first: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "CallLatency":
        return cls(seconds[0], *map(float, np.percentile(seconds[1:] or seconds, (50, 90, 99))))


@dataclass(frozen=True)
class Evaluation:
    """The episodes of one policy under one condition. Equal for equal starts: comparison ignores
    timings, pictures and the number of simulator restarts."""

    suite: str
    tasks: tuple[str, ...]
    goals: tuple[str, ...]
    episodes: tuple[Episode, ...]
    fps: int
    failures: tuple[Failure, ...] = ()
    seconds: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Seconds of each policy call, in order; none for an expert."""
    clips: tuple[Clip, ...] = field(default=(), compare=False, repr=False)
    unrepeatable: int = field(default=0, compare=False)
    """Number of episodes that had another result when their actions were repeated for a clip, which
    was then omitted: the simulator's episodes do not follow from their seeds alone."""

    def __repr__(self) -> str:
        told = f"{counted(len(self.episodes), 'episode')}, {counted(len(self.failures), 'failure')}"
        return f"Evaluation({self.suite!r}, {told})"

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {"episodes": len(self.episodes)}
        if self.episodes:
            steps = f"{self.mean_length:.1f} on average, {self.fps} per second"
            facts |= {"success": self.success, "steps": steps}
        if self.failures:
            facts["simulator failed"] = f"{len(self.failures)} starts, which are not counted"
        pieces = []
        for what, rates in (
            ("task", {task: part.success for task, part in self.by_task.items()}),
            ("goal", self.by_goal),
        ):
            if len(rates) > 1:
                pieces.append(html.table((what, "success"), list(rates.items())))
        return html.card(f"Evaluation in {self.suite}", facts, *pieces)

    @property
    def success(self) -> Rate:
        """Rate of reaching the episode's own goal."""
        return Rate.of(e.success for e in self.episodes)

    @property
    def named(self) -> Rate | None:
        """Rate of reaching the goal that the prompt named; None if that is not measured."""
        reached = [e.named_achieved for e in self.episodes]
        return None if None in reached else Rate.of(map(bool, reached))

    @property
    def mean_return(self) -> float:
        """Mean sum of rewards per episode."""
        return float(np.mean([e.reward for e in self.episodes]))

    @property
    def mean_length(self) -> float:
        """Mean number of steps per episode."""
        return float(np.mean([e.length for e in self.episodes]))

    @property
    def roughness(self) -> float:
        """Mean over all steps of all episodes, see `Episode.roughness`."""
        bends = [max(0, e.length - 2) for e in self.episodes]
        total = sum(e.roughness * n for e, n in zip(self.episodes, bends, strict=True))
        return total / max(1, sum(bends))

    @property
    def reruns(self) -> int:
        """Number of restarts of episodes after a simulator failed."""
        return sum(e.reruns for e in self.episodes) + sum(f.reruns for f in self.failures)

    @property
    def latency(self) -> CallLatency | None:
        """Latency of the policy's calls; None if there were no calls."""
        return CallLatency.of(self.seconds) if self.seconds else None

    @property
    def by_task(self) -> dict[str, "Evaluation"]:
        """Each task's episodes alone; tasks without any are left out."""
        groups: dict[str, list[Episode]] = {task: [] for task in self.tasks}
        for e in self.episodes:
            groups[e.task].append(e)
        return {
            task: replace(self, tasks=(task,), episodes=tuple(group), failures=(), clips=())
            for task, group in groups.items()
            if group
        }

    @property
    def by_goal(self) -> dict[str, Rate]:
        """Success by the episode's own goal, in the suite's order; absent goals are left out."""
        own = {goal: [e.success for e in self.episodes if e.goal == goal] for goal in self.goals}
        return {goal: Rate.of(outcomes) for goal, outcomes in own.items() if outcomes}

    @property
    def by_prompt(self) -> dict[str, Rate]:
        """Success by the wording that was used, sorted by the goal it names."""
        groups: dict[str, list[bool]] = {}
        for e in sorted(self.episodes, key=lambda e: (self.goals.index(e.named_goal), e.prompt)):
            groups.setdefault(e.prompt, []).append(e.success)
        return {prompt: Rate.of(outcomes) for prompt, outcomes in groups.items()}

    def to_json(self) -> dict[str, Any]:
        """Everything except pictures and actions, as plain data."""
        return {
            "suite": self.suite,
            **self._means(),
            "named": self.named.to_json() if self.named else None,
            "reruns": self.reruns,
            "failures": [asdict(failure) for failure in self.failures],
            "unrepeatable": self.unrepeatable,
            "by_task": {task: part._means() for task, part in self.by_task.items()},
            "by_goal": {goal: rate.to_json() for goal, rate in self.by_goal.items()},
            "by_prompt": {prompt: rate.to_json() for prompt, rate in self.by_prompt.items()},
            "latency": asdict(self.latency) if self.latency else None,
            "episodes": [episode.to_json() for episode in self.episodes],
        }

    def _means(self) -> dict[str, Any]:
        return {
            "success": self.success.to_json(),
            "mean_return": self.mean_return,
            "mean_length": self.mean_length,
            "roughness": self.roughness,
        }


@dataclass(frozen=True)
class Perturbed:
    """A policy's evaluation under a change, which `about` describes in words, and the difference
    from its success without the change, paired by task and seed."""

    about: str
    evaluation: Evaluation
    difference: Paired

    def to_json(self) -> dict[str, Any]:
        """Everything except the evaluation's episodes, as plain data."""
        return {
            "about": self.about,
            "suite": self.evaluation.suite,
            "success": self.evaluation.success.to_json(),
            "difference": self.difference.to_json(),
        }


def joined(parts: Sequence[Evaluation], suite: str) -> Evaluation:
    """One evaluation of a suite whose tasks were evaluated separately."""
    clips, before = [], 0
    for part in parts:
        clips += [replace(clip, episode=before + clip.episode) for clip in part.clips]
        before += len(part.episodes)
    return Evaluation(
        suite=suite,
        tasks=_once(part.tasks for part in parts),
        goals=_once(part.goals for part in parts),
        episodes=tuple(e for part in parts for e in part.episodes),
        fps=parts[0].fps,
        failures=tuple(f for part in parts for f in part.failures),
        seconds=tuple(s for part in parts for s in part.seconds),
        clips=tuple(clips),
        unrepeatable=sum(part.unrepeatable for part in parts),
    )


def compared(first: Evaluation, second: Evaluation) -> Paired:
    """Success of two policies on the starts that both finished.

    Raises:
      ValueError: there is no such start.
    """
    other = {e.start: e.success for e in second.episodes}
    pairs = [(e.success, other[e.start]) for e in first.episodes if e.start in other]
    return Paired.of(pairs)


def _once(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
