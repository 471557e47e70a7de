"""Demonstrations over any `Slots`: an expert or a policy acts step by step, and the observations
and intended actions of every successful episode are kept.

An expert's action is executed with noise and recorded without, or the expert takes over from a
policy in the state that the policy has reached, in the manner of DAgger (Ross et al., arXiv
1011.0686). The episodes kept and their order depend only on seeds.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from sim.acting import EpisodeRun, Policy, act, plan
from sim.protocol import Slots, Spec, Start

TRIES = 20
"""Starts per requested demonstration after which a task is given up."""


class Demonstration(NamedTuple):
    """T steps; row t of the columns holds the observation at t and the action then intended."""

    columns: dict[str, np.ndarray]
    """"observation.state" and "action" f32 [T, …]."""
    frames: dict[str, UInt8[np.ndarray, "t h w 3"]]
    """Frames of each camera."""
    task: str
    """One wording of the goal, chosen by the episode's seed."""
    subtasks: tuple[str, ...] = ()
    """For each row, the step of the task that the expert was at, if it is reported."""
    note: Mapping[str, Any] = {}
    """Its task's name and seed, and the numbers of episodes tried and failed so far, for
    `kept_before`."""


@dataclass
class Demonstrations:
    """An iterable over `episodes` successful episodes of every task of the slots. `tried`, `kept`
    and `failed` (by their simulator) count episodes meanwhile.

    Args:
      slots: where to act; see `sim.suites` for how to open some.
      tasks: tasks, out of those of the slots.
      episodes: number to keep of each task.
      first_seed: an episode's seed is this one or a later one.
      noise: standard deviation of the noise added to the expert's action, as a fraction of its
        range.
      policy: acts instead of the slots' expert; it replans after `replan_steps` steps.
      takeover: largest number of steps after which the expert takes over from the policy; the seed
        decides when. Only the steps after that are kept, and no episode that has ended before it.
        None: the policy acts to the end.
      phases: (task, goal, actions) -> the step of the task that the expert was at, for each action.
      kept_before: notes of the first demonstrations, which are already made and not made again.

    Raises:
      ValueError: there is neither expert nor policy, or a task succeeds so rarely that 20 episodes
        per requested demonstration do not suffice.
    """

    slots: Slots
    tasks: tuple[str, ...]
    episodes: int
    first_seed: int = 0
    noise: float = 0.0
    policy: Policy | None = None
    replan_steps: int = 4
    takeover: int | None = None
    phases: Callable[[str, str, Float[np.ndarray, "t a"]], tuple[str, ...]] | None = None
    kept_before: Sequence[Mapping[str, Any]] = ()
    tried: int = 0
    kept: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if (self.policy is None or self.takeover is not None) and not self.slots.spec.expert:
            raise ValueError(
                f"'{self.slots.spec.name}' has no scripted expert; record a policy alone, with "
                "--checkpoint and without --takeover."
            )

    def __iter__(self) -> Iterator[Demonstration]:
        last = self.kept_before[-1] if self.kept_before else {"tried": 0, "failed": 0}
        self.tried, self.failed = last["tried"], last["failed"]
        self.kept = len(self.kept_before)
        quotas = deque(filter(lambda quota: quota.missing, map(self._quota, self.tasks)))

        def following() -> EpisodeRun | None:
            return next((run for quota in quotas for run in quota.starts()), None)

        for ended in act(self.slots, following, self._tell):
            ended.success &= ended.length > self._kept_from(ended)
            while quotas and (run := quotas[0].settled()) is not None:
                self.tried += 1
                self.failed += run.error is not None
                quota = quotas[0]
                if run.success:
                    self.kept += 1
                    yield self._demonstration(run, quota.tried)
                if quota.missing == 0:
                    quotas.popleft()
                elif quota.tried >= TRIES * self.episodes:
                    raise ValueError(
                        f"{self.episodes - quota.missing} of {quota.tried} episodes of "
                        f"'{quota.task}' succeeded, but {self.episodes} were asked for; lower the "
                        "noise, use another policy, or ask for fewer."
                    )

    def _quota(self, task: str) -> "_Quota":
        """The episodes of a task that are still to be made."""
        own = [note for note in self.kept_before if note["task"] == task]
        if not own:
            return _Quota(task, self.episodes, self.first_seed)
        seed, tried = own[-1]["seed"] + 1, own[-1]["tried_of_task"]
        return _Quota(task, self.episodes - len(own), seed, tried=tried)

    def _demonstration(self, run: EpisodeRun, tried: int) -> Demonstration:
        spec = self.slots.spec
        made = _demonstration(run, spec, self._kept_from(run))
        told_of = {"task": run.start.task, "seed": run.start.seed, "tried_of_task": tried}
        made = made._replace(note=told_of | {"tried": self.tried, "failed": self.failed})
        if self.phases is None:
            return made
        told = self.phases(run.start.task, spec.goals[run.goal], made.columns["action"])
        return made._replace(subtasks=told)

    def _led_until(self, run: EpisodeRun) -> int:
        """Step at which the expert takes over: one at which the policy would replan."""
        if self.policy is None:
            return 0
        if self.takeover is None:
            return self.slots.spec.max_steps
        looks = self.takeover // self.replan_steps
        return self.replan_steps * int(np.random.default_rng(run.start.key(0)).integers(looks + 1))

    def _kept_from(self, run: EpisodeRun) -> int:
        return 0 if self.takeover is None else self._led_until(run)

    def _tell(self, waiting: dict[int, EpisodeRun]) -> None:
        led = {}
        for slot, run in waiting.items():
            if run.length >= self._kept_from(run):
                assert run.observation is not None
                run.seen.append(run.observation)
            if run.length >= self._led_until(run):
                self.slots.demonstrate(slot, 1, self.noise)
            else:
                led[slot] = run
        planless = [run for run in led.values() if run.length % self.replan_steps == 0]
        if self.policy is not None and planless:
            plan(self.policy, self.slots.spec, planless, self.replan_steps)
        for slot, run in led.items():
            step, chunk = run.length % self.replan_steps, run.actions[-1]
            self.slots.send(slot, chunk[step][None] if self.takeover is None else chunk)


@dataclass
class _Quota:
    """Episodes of one task. They begin and are settled in the order of their seeds; there are never
    more in progress than may still be kept."""

    task: str
    missing: int
    seed: int
    runs: deque[EpisodeRun] = field(default_factory=deque)
    tried: int = 0

    def settled(self) -> EpisodeRun | None:
        """The next episode in order, once it has ended."""
        if not self.runs or not self.runs[0].ended:
            return None
        run = self.runs.popleft()
        self.tried += 1
        self.missing -= run.success
        return run

    def starts(self) -> Iterator[EpisodeRun]:
        """Yields the runs that may be started now."""
        while len(self.runs) < self.missing:
            self.runs.append(EpisodeRun(Start(self.task, self.seed)))
            self.seed += 1
            yield self.runs[-1]


def _demonstration(run: EpisodeRun, spec: Spec, first: int) -> Demonstration:
    images: UInt8[np.ndarray, "t c h w 3"] = np.stack([each.images for each in run.seen])
    state = np.stack([each.state for each in run.seen]).astype(np.float32)
    wanted = np.concatenate(run.actions)[first : run.length].astype(np.float32)
    return Demonstration(
        {"observation.state": state, "action": wanted},
        {camera: images[:, i] for i, camera in enumerate(spec.cameras)},
        run.prompt,
    )
