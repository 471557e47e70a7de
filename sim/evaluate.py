"""Closed-loop evaluation over `Slots`: a policy answers all slots that wait for it, and the next
start goes to the slot that is free.

All randomness derives from an episode's start, so an episode has the same goal, scene, wording and
noise in any slot and beside any other episodes. If an episode's simulator fails, the episode is
started again. Clips are made afterwards, by repeating executed actions.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from sim.acting import RERUNS, Control, EpisodeRun, Policy, act, plan
from sim.clips import Clip, choose
from sim.protocol import Slots, Spec, Start
from sim.results import Episode, Evaluation, Failure

Progress = Callable[[int, int], None]
"""Called with (starts done, starts) whenever a start is done."""

_FILMED_STEPS = 4


def evaluate(
    slots: Slots,
    policy: Policy,
    starts: Sequence[Start],
    *,
    replan_steps: int = _FILMED_STEPS,
    control: Control = "own",
    clips: int = 6,
    progress: Progress | None = None,
    done: Iterable[Episode] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """Runs a policy from every start until its episode ends.

    Args:
      policy: `(observation, prompts, keys) -> actions [N, H, A]`, H >= replan_steps.
      replan_steps: steps of each chunk that are executed before the policy observes again.
      control: "other prompt" names a goal other than the episode's own, chosen by its seed; "blank"
        shows images of zeros.
      clips: number of episodes to show to people, including failures if there are any.
      done: finished episodes of an interrupted evaluation, which are not run again.
      on_episode: called with each episode as it ends.

    Raises:
      ValueError: bad starts, actions of a wrong shape or not finite, a single goal for "other
        prompt", an episode that does not end within `max_steps`, or a simulator that failed in all
        episodes.
    """
    spec, seconds = slots.spec, []
    if replan_steps < 1:
        raise ValueError(f"replan_steps is {replan_steps}, expected at least one step.")
    if control == "other prompt" and len(spec.goals) < 2:
        raise ValueError(
            f"The control 'other prompt' needs at least two goals, but '{spec.name}' has "
            f"{list(spec.goals)}."
        )

    def timed(*asked: Any) -> Float[np.ndarray, "n h a"]:
        begin = time.perf_counter()
        actions = np.asarray(policy(*asked), np.float32)
        seconds.append(time.perf_counter() - begin)
        return actions

    def tell(waiting: dict[int, EpisodeRun]) -> None:
        plan(timed, spec, list(waiting.values()), replan_steps)
        for slot, run in waiting.items():
            slots.send(slot, run.actions[-1])

    found = _acted(slots, starts, tell, control, progress, done, on_episode)
    return filmed(slots, [replace(found, seconds=tuple(seconds))], [clips], replan_steps)[0]


def evaluate_expert(
    slots: Slots,
    starts: Sequence[Start],
    *,
    clips: int = 0,
    progress: Progress | None = None,
    done: Iterable[Episode] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """`evaluate` for the slots' scripted expert, which sees the physics and acts step by step.

    Raises:
      ValueError: as `evaluate`, or there is no expert.
    """
    if not slots.spec.expert:
        raise ValueError(f"'{slots.spec.name}' has no scripted expert to evaluate.")

    def tell(waiting: dict[int, EpisodeRun]) -> None:
        for slot in waiting:
            slots.demonstrate(slot, slots.spec.max_steps)

    found = _acted(slots, starts, tell, "own", progress, done, on_episode)
    return filmed(slots, [found], [clips])[0]


def filmed(
    slots: Slots, found: Sequence[Evaluation], clips: Sequence[int], steps: int = _FILMED_STEPS
) -> list[Evaluation]:
    """The evaluations with `clips` clips of their episodes each, including failures if there are
    any. The chosen episodes of all evaluations are run again together, `steps` at a time, by
    repeating their actions."""
    shown = []
    for evaluation, number in zip(found, clips, strict=True):
        obeyed = [e.success if e.obeyed is None else e.obeyed for e in evaluation.episodes]
        named = [evaluation.goals.index(episode.named_goal) for episode in evaluation.episodes]
        shown.append(choose(obeyed, named, number))

    def tell(waiting: dict[int, EpisodeRun]) -> None:
        for slot, run in waiting.items():
            k, i = places[run]
            actions = found[k].episodes[i].actions
            at = np.minimum(run.length + np.arange(steps), len(actions) - 1)
            slots.send(slot, actions[at], film=True)

    places = {
        EpisodeRun(found[k].episodes[i].start): (k, i)
        for k, chosen in enumerate(shown)
        for i in chosen
    }
    films: dict[tuple[int, int], Clip] = {}
    for run in act(slots, partial(next, iter(places), None), tell):
        k, i = places[run]
        like = found[k].episodes[i]
        if run.error is None and (run.length, run.success) == (like.length, like.success):
            films[k, i] = Clip(i, np.concatenate(run.film))
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
    tell: Callable[[dict[int, EpisodeRun]], None],
    control: Control,
    progress: Progress | None,
    done: Iterable[Episode],
    on_episode: Callable[[Episode], None] | None,
) -> Evaluation:
    spec, starts = slots.spec, _checked(starts, slots.spec)
    asked, failures = set(starts), []
    finished = {episode.start: episode for episode in done if episode.start in asked}
    missing = (EpisodeRun(start, control) for start in starts if start not in finished)
    for run in act(slots, partial(next, missing, None), tell):
        if run.error is None:
            episode = finished[run.start] = _episode(run, spec)
            if on_episode is not None:
                on_episode(episode)
        else:
            failures.append(Failure(*run.start, run.error, run.reruns))
        if progress is not None:
            progress(len(finished) + len(failures), len(starts))
    if not finished:
        raise ValueError(
            f"The simulator of '{spec.name}' failed in every episode, {RERUNS + 1} times each; "
            f"its first error: {failures[0].error}"
        )
    return Evaluation(
        suite=spec.name,
        tasks=spec.tasks,
        goals=spec.goals,
        episodes=tuple(finished[start] for start in starts if start in finished),
        fps=spec.fps,
        failures=tuple(sorted(failures, key=lambda f: starts.index(Start(f.task, f.seed)))),
    )


def _episode(run: EpisodeRun, spec: Spec) -> Episode:
    actions = np.concatenate(run.actions)[: run.length]
    bends = np.abs(np.diff(actions.astype(np.float64), n=2, axis=0))
    return Episode(
        task=run.start.task,
        seed=run.start.seed,
        goal=spec.goals[run.goal],
        named_goal=spec.goals[run.named],
        prompt=run.prompt,
        success=run.success,
        named_achieved=_reached(run),
        length=run.length,
        reward=float(np.concatenate(run.rewards).sum(dtype=np.float64)),
        roughness=float(bends.mean()) if bends.size else 0.0,
        reruns=run.reruns,
        actions=actions,
    )


def _reached(run: EpisodeRun) -> bool | None:
    """True if the goal that the prompt names was reached; None if the slots do not report it."""
    if run.named == run.goal:
        return run.success
    return None if run.achieved is None else run.named in run.achieved


def _checked(starts: Sequence[Start], spec: Spec) -> list[Start]:
    starts = [Start(task, int(seed)) for task, seed in starts]
    seeds = [start.seed for start in starts]
    if not starts or min(seeds) < 0 or len(set(starts)) < len(starts):
        raise ValueError(
            f"Expected at least one start, all distinct and with seeds of 0 or more; got "
            f"{len(starts)}, {len(set(starts))} of them distinct, with seeds from "
            f"{min(seeds, default=0)}."
        )
    if unknown := {start.task for start in starts} - set(spec.tasks):
        raise ValueError(f"'{spec.name}' has no task {sorted(unknown)}, only {list(spec.tasks)}.")
    return starts
