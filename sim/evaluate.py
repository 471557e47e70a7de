"""Closed-loop evaluation over `Slots`: a policy answers whatever slots wait for it, and the next
start goes to the slot that is free.

Two controls show what a policy uses: a prompt that names another goal than the episode's own, and
images of zeros. Everything random derives from an episode's start, so an episode has the same goal,
scene, wording and noise in whatever slot it runs and whatever runs beside it. An episode whose
simulator failed is begun again. Clips are made afterwards, by repeating the executed actions of the
episodes that are worth showing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from jaxtyping import Array, Float, UInt8, UInt32

from sim.clips import Clip, choose
from sim.protocol import Observation, Outcome, Slots, Spec, Start
from sim.results import Episode, Evaluation, Failure

Policy = Callable[
    [Observation, list[str], UInt32[np.ndarray, "n 2"]], Float[Array | np.ndarray, "n h a"]
]
"""(observation, prompts, keys) -> action chunks in the robot's units. A row's key tells its episode
and step; its chunk depends on nothing but its own observation, prompt and key."""
Control = Literal["own", "other prompt", "blank"]
"""What a policy is told and shown: the truth, another goal's prompt, or images of zeros."""
Progress = Callable[[int, int], None]
"""Called with (starts done, starts) whenever one is."""

RERUNS = 3
"""How often an episode is begun again whose simulator failed."""
_FILMED_STEPS = 4


def evaluate(
    slots: Slots,
    policy: Policy,
    starts: Sequence[Start],
    *,
    execute: int = _FILMED_STEPS,
    control: Control = "own",
    clips: int = 6,
    progress: Progress | None = None,
    done: Iterable[Episode] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """Lets a policy act from every start until its episode ends.

    Args:
      policy: `(observation, prompts, keys) -> actions [N, H, A]`, H >= execute.
      execute: steps acted of each chunk before the policy looks again.
      control: "other prompt" names a goal that is not the episode's, chosen by its seed; "blank"
        shows images of zeros.
      clips: how many episodes to show to people, failures among them if there are any.
      done: episodes of an evaluation that was interrupted; they are not acted again.
      on_episode: called with each episode as it ends.

    Raises:
      ValueError: bad starts, actions of a wrong shape or not finite, a single goal for "other
        prompt", an episode that does not end within `max_steps`, or no episode that a simulator
        did not fail in.
    """
    spec, seconds = slots.spec, []
    if execute < 1:
        raise ValueError(f"execute is {execute}, expected at least one step.")
    if control == "other prompt" and len(spec.goals) < 2:
        raise ValueError(
            f"The control 'other prompt' needs slots with two goals, '{spec.name}' has "
            f"{list(spec.goals)}."
        )

    def tell(ready: dict[int, _Run]) -> None:
        runs = list(ready.values())
        images, states = zip(*(run.observation for run in runs), strict=True)
        observation = Observation(np.stack(images), np.stack(states))
        if control == "blank":
            observation = observation._replace(images=observation.images * 0)
        keys = np.array([run.key for run in runs], np.uint32)
        begin = time.perf_counter()
        answer = policy(observation, [run.prompt for run in runs], keys)
        actions = np.asarray(answer, np.float32)
        seconds.append(time.perf_counter() - begin)
        _check_actions(spec, actions, runs, execute)
        for (slot, run), chunk in zip(ready.items(), actions, strict=True):
            run.actions.append(chunk[:execute])
            slots.send(slot, run.actions[-1])

    found = _acted(slots, starts, tell, control, progress, done, on_episode)
    return filmed(slots, [replace(found, seconds=tuple(seconds))], [clips], execute)[0]


def evaluate_expert(
    slots: Slots,
    starts: Sequence[Start],
    *,
    clips: int = 0,
    progress: Progress | None = None,
    done: Iterable[Episode] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """The same for the slots' scripted expert, which sees the physics and acts step by step.

    Raises:
      ValueError: as `evaluate`, or there is no expert.
    """
    if not slots.spec.expert:
        raise ValueError(f"'{slots.spec.name}' has no scripted expert to evaluate.")

    def tell(ready: dict[int, _Run]) -> None:
        for slot in ready:
            slots.demonstrate(slot, slots.spec.max_steps)

    found = _acted(slots, starts, tell, "own", progress, done, on_episode)
    return filmed(slots, [found], [clips])[0]


def filmed(
    slots: Slots, found: Sequence[Evaluation], clips: Sequence[int], steps: int = _FILMED_STEPS
) -> list[Evaluation]:
    """Evaluations with clips of so many of their episodes each, failures among them if there are
    any. Those of all are acted again together, `steps` at a time, by repeating their actions."""
    shown = []
    for evaluation, number in zip(found, clips, strict=True):
        obeyed = [episode.obeyed for episode in evaluation.episodes]
        named = [evaluation.goals.index(episode.named_goal) for episode in evaluation.episodes]
        shown.append(choose(obeyed, named, number))

    def tell(ready: dict[int, _Run]) -> None:
        for slot, run in ready.items():
            actions = found[run.place[0]].episodes[run.place[1]].actions
            at = np.minimum(run.length + np.arange(steps), len(actions) - 1)
            slots.send(slot, actions[at], film=True)

    places = [(k, i) for k, chosen in enumerate(shown) for i in chosen]
    runs = [_Run(found[k].episodes[i].start, place=(k, i)) for k, i in places]
    films: dict[tuple[int, int], Clip] = {}
    for run, error in _ended(slots, runs, tell):
        like = found[run.place[0]].episodes[run.place[1]]
        if error is None and (run.length, run.success) == (like.length, like.success):
            films[run.place] = Clip(run.place[1], np.concatenate(run.film))
    return [
        replace(
            evaluation,
            clips=tuple(films[k, i] for i in chosen if (k, i) in films),
            unrepeatable=sum((k, i) not in films for i in chosen),
        )
        for k, (evaluation, chosen) in enumerate(zip(found, shown, strict=True))
    ]


def _acted(
    slots: Slots,
    starts: Sequence[Start],
    tell: Callable[[dict[int, "_Run"]], None],
    control: Control,
    progress: Progress | None,
    done: Iterable[Episode],
    on_episode: Callable[[Episode], None] | None,
) -> Evaluation:
    spec, starts = slots.spec, _checked(starts, slots.spec)
    asked, failures = set(starts), []
    finished = {episode.start: episode for episode in done if episode.start in asked}
    missing = [_Run(start, control) for start in starts if start not in finished]
    for run, error in _ended(slots, missing, tell):
        if error is None:
            episode = finished[run.start] = run.episode(spec)
            if on_episode is not None:
                on_episode(episode)
        else:
            failures.append(Failure(*run.start, error, run.reruns))
        if progress is not None:
            progress(len(finished) + len(failures), len(starts))
    if not finished:
        raise ValueError(
            f"The simulator of '{spec.name}' failed in every episode, {RERUNS + 1} times each; at "
            f"first it said: {failures[0].error}"
        )
    return Evaluation(
        suite=spec.name,
        tasks=spec.tasks,
        goals=spec.goals,
        episodes=tuple(finished[start] for start in starts if start in finished),
        fps=spec.fps,
        failures=tuple(sorted(failures, key=lambda f: starts.index(Start(f.task, f.seed)))),
    )


@dataclass
class _Run:
    """An episode under way; `place` is that of the episode it repeats, by evaluation."""

    start: Start
    control: Control = "own"
    place: tuple[int, int] = (0, 0)
    reruns: int = 0
    observation: Observation | None = None
    goal: int = 0
    named: int = 0
    prompt: str = ""
    success: bool = False
    achieved: set[int] = field(default_factory=set)
    rewards: list[Float[np.ndarray, "t"]] = field(default_factory=list)
    actions: list[Float[np.ndarray, "t a"]] = field(default_factory=list)
    film: list[UInt8[np.ndarray, "t h w 3"]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Steps acted."""
        return sum(map(len, self.rewards))

    @property
    def key(self) -> tuple[int, int]:
        """Of the policy's next call."""
        return self.start.key(self.length)

    def add(self, outcome: Outcome, spec: Spec) -> None:
        """Takes note of the next outcome."""
        if self.observation is None:
            self._instruct(outcome.goal, spec)
        self.observation = outcome.observation
        self.success |= outcome.success
        self.rewards.append(outcome.reward)
        self.achieved |= set(np.flatnonzero(outcome.achieved).tolist())
        if outcome.actions is not None:
            self.actions.append(outcome.actions)
        if outcome.film is not None:
            self.film.append(outcome.film)
        if not outcome.ended and self.length >= spec.max_steps:
            raise ValueError(
                f"'{spec.name}' did not end the episode of seed {self.start.seed} of task "
                f"'{self.start.task}' within its max_steps = {spec.max_steps}."
            )

    def _instruct(self, goal: int, spec: Spec) -> None:
        """What the prompt names, and a wording of it, both drawn from the seed."""
        _, shift = np.random.default_rng(self.start.seed).random(2)
        others = len(spec.goals) - 1
        away = 1 + int(shift * others) if self.control == "other prompt" else 0
        self.goal, self.named = goal, (goal + away) % len(spec.goals)
        self.prompt = spec.wording(self.named, self.start.seed)

    def episode(self, spec: Spec) -> Episode:
        """What it came to."""
        actions = np.concatenate(self.actions)[: self.length]
        bends = np.abs(np.diff(actions.astype(np.float64), n=2, axis=0))
        reached = self.success if self.named == self.goal else self.named in self.achieved
        return Episode(
            task=self.start.task,
            seed=self.start.seed,
            goal=spec.goals[self.goal],
            named_goal=spec.goals[self.named],
            prompt=self.prompt,
            success=self.success,
            named_achieved=reached,
            length=self.length,
            reward=float(np.concatenate(self.rewards).sum(dtype=np.float64)),
            roughness=float(bends.mean()) if bends.size else 0.0,
            reruns=self.reruns,
            actions=actions,
        )


def _ended(
    slots: Slots, runs: Iterable[_Run], tell: Callable[[dict[int, _Run]], None]
) -> Iterator[tuple[_Run, str | None]]:
    """Every run as it ends, with what its simulator said if that failed again and again.

    `tell` tells the slots that wait what to do, by the runs in them.
    """
    waiting, free = deque(runs), deque(range(slots.count))
    acting: dict[int, _Run] = {}
    while waiting or acting:
        while waiting and free:
            slot = free.popleft()
            acting[slot] = waiting.popleft()
            slots.begin(slot, acting[slot].start)
        ready = {}
        for outcome in slots.poll():
            run = acting[outcome.slot]
            if outcome.error is None:
                run.add(outcome, slots.spec)
            if not outcome.ended:
                ready[outcome.slot] = run
                continue
            del acting[outcome.slot]
            free.append(outcome.slot)
            if outcome.error is not None and run.reruns < RERUNS:
                waiting.appendleft(_Run(run.start, run.control, run.place, run.reruns + 1))
            else:
                yield run, outcome.error
        if ready:
            tell(ready)


def _checked(starts: Sequence[Start], spec: Spec) -> list[Start]:
    starts = [Start(task, int(seed)) for task, seed in starts]
    seeds = [start.seed for start in starts]
    if not starts or min(seeds) < 0 or len(set(starts)) < len(starts):
        raise ValueError(
            f"Starts must be distinct, at least one, with non-negative seeds; got {len(starts)}, "
            f"{len(set(starts))} of them distinct, with seeds from {min(seeds, default=0)}."
        )
    if unknown := {start.task for start in starts} - set(spec.tasks):
        raise ValueError(f"'{spec.name}' has no task {sorted(unknown)}, only {list(spec.tasks)}.")
    return starts


def _check_actions(
    spec: Spec, actions: Float[np.ndarray, "n h a"], runs: Sequence[_Run], execute: int
) -> None:
    n, a, shape = len(runs), len(spec.action_names), actions.shape
    if actions.ndim != 3 or shape[0] != n or shape[1] < execute or shape[2] != a:
        names = ", ".join(spec.action_names)
        raise ValueError(
            f"The policy returned actions of shape {shape}, expected [{n} episodes, at least "
            f"{execute} steps, {a} actions ({names})]."
        )
    finite = np.isfinite(actions[:, :execute]).all((1, 2))
    if not finite.all():
        run = runs[finite.argmin()]
        raise ValueError(
            f"The policy returned an action that is not finite at step {run.length} of the episode "
            f"of seed {run.start.seed} of task '{run.start.task}'."
        )
