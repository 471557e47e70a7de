"""Demonstrations over any `Slots`: an expert or a policy acts step by step, and of every episode
that succeeds what was seen and what was wanted is kept.

An expert's action is executed with noise and kept without, so that a policy also learns the way
back. Which episodes are kept, and their order, depend on seeds alone: of each task, one after
another, the first that succeed.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from sim.evaluate import RERUNS, Policy
from sim.protocol import Observation, Outcome, Slots, Spec, Start

_TRIES = 20
"""Starts of a task without any success, after which it is given up."""


class Demonstration(NamedTuple):
    """T steps; row t of the columns is what was seen at t and what was then wanted."""

    columns: dict[str, np.ndarray]
    """"observation.state" and "action" f32 [T, …]."""
    frames: dict[str, UInt8[np.ndarray, "t h w 3"]]
    """By camera."""
    task: str
    """One wording of the goal, chosen by the episode's seed."""


@dataclass
class Demonstrations:
    """Iterate it for `episodes` successful episodes of every task of the slots; meanwhile `tried`,
    `kept` and `failed` (by their simulator) count.

    Args:
      slots: where to act; see `sim.suites` for how to open some.
      tasks: of the slots'.
      episodes: how many to keep of each task.
      first_seed: an episode's seed is this one or a later one.
      noise: standard deviation of what is added to the expert's action, in parts of its range.
      policy: acts instead of the slots' expert; it looks again after `execute` steps.

    Raises:
      ValueError: there is nobody to act, or a task succeeds so rarely that 20 episodes for each
        that was asked for do not suffice.
    """

    slots: Slots
    tasks: tuple[str, ...]
    episodes: int
    first_seed: int = 0
    noise: float = 0.0
    policy: Policy | None = None
    execute: int = 4
    tried: int = 0
    kept: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if self.policy is None and not self.slots.spec.expert:
            raise ValueError(
                f"'{self.slots.spec.name}' has no scripted expert; let a policy act, by "
                "--checkpoint."
            )

    def __iter__(self) -> Iterator[Demonstration]:
        self.tried = self.kept = self.failed = 0
        quotas = deque(_Quota(task, self.episodes, self.first_seed) for task in self.tasks)
        acting: dict[int, _Run] = {}
        free = deque(range(self.slots.count))
        while quotas:
            for settled in quotas[0].settled():
                self.tried += 1
                self.failed += settled.error is not None
                if settled.success:
                    self.kept += 1
                    yield settled.episode(self.slots.spec)
            if quotas[0].missing == 0:
                quotas.popleft()
                continue
            if quotas[0].tried >= _TRIES * self.episodes:
                raise ValueError(
                    f"{quotas[0].kept} of {quotas[0].tried} episodes of '{quotas[0].task}' "
                    f"succeeded, {self.episodes} were asked for; lower the noise, take another "
                    "policy or ask for fewer."
                )
            wanting = (run for quota in quotas for run in quota.starts())
            while free and (run := next(wanting, None)):
                self._begin(free.popleft(), run, acting)
            self._go_on(acting, free)

    def _begin(self, slot: int, run: "_Run", acting: dict[int, "_Run"]) -> None:
        acting[slot] = run
        self.slots.begin(slot, run.start)

    def _go_on(self, acting: dict[int, "_Run"], free: deque[int]) -> None:
        waiting: dict[int, _Run] = {}
        for outcome in self.slots.poll():
            slot, run = outcome.slot, acting[outcome.slot]
            if outcome.error is not None and run.reruns < RERUNS:
                run.again()
                self._begin(slot, run, acting)
                continue
            run.add(outcome)
            if run.ended:
                del acting[slot]
                free.append(slot)
            else:
                waiting[slot] = run
        if self.policy is None:
            for slot in waiting:
                self.slots.demonstrate(slot, 1, self.noise)
            return
        lacking = [run for run in waiting.values() if not run.plan]
        if lacking:
            self._plan(lacking, self.policy)
        for slot, run in waiting.items():
            run.wanted = run.plan.popleft()
            self.slots.send(slot, run.wanted[None])

    def _plan(self, runs: list["_Run"], policy: Policy) -> None:
        images, states = zip(*(run.observation for run in runs), strict=True)
        prompts = [run.prompt(self.slots.spec) for run in runs]
        keys = np.array([run.start.key(len(run.rows)) for run in runs], np.uint32)
        chunks = policy(Observation(np.stack(images), np.stack(states)), prompts, keys)
        for run, chunk in zip(runs, np.asarray(chunks, np.float32), strict=True):
            run.plan.extend(chunk[: self.execute])


@dataclass
class _Quota:
    """Episodes of one task: begun in the order of their seeds, and settled in it, never more at
    work than may still be kept."""

    task: str
    missing: int
    seed: int
    runs: deque["_Run"] = field(default_factory=deque)
    tried: int = 0
    kept: int = 0

    def settled(self) -> Iterator["_Run"]:
        while self.runs and self.runs[0].ended:
            run = self.runs.popleft()
            self.tried += 1
            self.kept += run.success
            self.missing -= run.success
            yield run

    def starts(self) -> Iterator["_Run"]:
        while len(self.runs) < self.missing:
            self.runs.append(_Run(Start(self.task, self.seed)))
            self.seed += 1
            yield self.runs[-1]


@dataclass
class _Run:
    """An episode under way: a row for every step, seen before it."""

    start: Start
    observation: Observation | None = None
    goal: int = 0
    wanted: Float[np.ndarray, "a"] | None = None
    plan: deque[Float[np.ndarray, "a"]] = field(default_factory=deque)
    rows: list[tuple[Observation, Float[np.ndarray, "a"]]] = field(default_factory=list)
    success: bool = False
    ended: bool = False
    error: str | None = None
    reruns: int = 0

    def add(self, outcome: Outcome) -> None:
        """Takes note of a step, or of the first look."""
        wanted = self.wanted if outcome.actions is None else outcome.actions[0]
        if len(outcome.reward):
            assert self.observation is not None
            assert wanted is not None
            self.rows.append((self.observation, wanted))
        self.observation, self.goal = outcome.observation, outcome.goal
        self.success |= outcome.success
        self.ended, self.error = outcome.ended, outcome.error

    def again(self) -> None:
        """Forgets an episode whose simulator failed."""
        self.observation, self.success = None, False
        self.rows.clear()
        self.plan.clear()
        self.reruns += 1

    def prompt(self, spec: Spec) -> str:
        return spec.wording(self.goal, self.start.seed)

    def episode(self, spec: Spec) -> Demonstration:
        seen, wanted = zip(*self.rows, strict=True)
        images: UInt8[np.ndarray, "t c h w 3"] = np.stack([each.images for each in seen])
        state = np.stack([each.state for each in seen]).astype(np.float32)
        return Demonstration(
            {"observation.state": state, "action": np.stack(wanted).astype(np.float32)},
            {camera: images[:, i] for i, camera in enumerate(spec.cameras)},
            self.prompt(spec),
        )
