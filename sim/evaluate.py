"""Closed-loop evaluation: every seed is one episode, all of them act as one batch, and only what
happens until an episode's first end counts.

Two controls show what a policy uses: a prompt that names another goal than the episode's own, and
images of zeros. Everything random derives from an episode's seed, so an episode has the same goal,
start and wording in whatever batch it runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from sim.clips import Clip, choose
from sim.protocol import Environment, Observation, Scene, State, Transition
from sim.statistics import Rate

Policy = Callable[
    [Observation, list[str], UInt32[np.ndarray, "n 2"]], Float[Array | np.ndarray, "n h a"]
]
"""(observation, prompts, keys) -> action chunks in the robot's units; a key is all that the noise
of its row may depend on."""
Expert = Callable[[Any, State], Float[Array, "n a"]]
"""(environment, state) -> one action each; it may look at the physics."""
Progress = Callable[[int, int], None]
"""Called with (episodes ended, episodes) after every chunk."""

_CLIP_SIZE = 160


@dataclass(frozen=True)
class Episode:
    """What one seed came to."""

    seed: int
    goal: str
    """What the episode asks for; `success` is about it."""
    named_goal: str
    """What the prompt asks for: `goal`, but for the wrong-prompt control."""
    prompt: str
    success: bool
    named_achieved: bool
    length: int
    """Steps until the end, the last included."""
    reward: float
    """Sum of rewards until the end."""


@dataclass(frozen=True)
class Latency:
    """Seconds of one policy call for the whole batch; `first` (which compiles) is not among the
    percentiles unless it is the only call."""

    first: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        return cls(seconds[0], *map(float, np.percentile(seconds[1:] or seconds, (50, 90, 99))))


@dataclass(frozen=True)
class Evaluation:
    """The episodes of one policy under one condition. Equal for equal seeds: timings and pictures
    do not take part in comparison."""

    environment: str
    goals: tuple[str, ...]
    episodes: tuple[Episode, ...]
    roughness: float
    """Mean |second difference| of executed actions over steps and dimensions, in the robot's units
    per step²; smooth motion has little."""
    fps: int
    latency: Latency = field(compare=False)
    clips: tuple[Clip, ...] = field(default=(), compare=False, repr=False)

    @property
    def success(self) -> Rate:
        """How often the episode's own goal was reached."""
        return Rate.of(e.success for e in self.episodes)

    @property
    def named(self) -> Rate:
        """How often the goal that the prompt named was reached."""
        return Rate.of(e.named_achieved for e in self.episodes)

    @property
    def by_goal(self) -> dict[str, Rate]:
        """Success by the episode's own goal, in the environment's order; absent goals left out."""
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
        """All but the pictures, as plain data."""
        return {
            "environment": self.environment,
            "success": self.success.to_json(),
            "named": self.named.to_json(),
            "by_goal": {goal: rate.to_json() for goal, rate in self.by_goal.items()},
            "by_prompt": {prompt: rate.to_json() for prompt, rate in self.by_prompt.items()},
            "roughness": self.roughness,
            "latency": asdict(self.latency),
            "episodes": [asdict(episode) for episode in self.episodes],
        }


def evaluate(
    env: Environment,
    policy: Policy,
    seeds: Sequence[int],
    *,
    execute: int = 4,
    prompt_goal: Literal["own", "other"] = "own",
    blank: bool = False,
    clips: int = 6,
    progress: Progress | None = None,
) -> Evaluation:
    """Lets a policy act from every seed's start until each episode has ended once.

    Args:
      policy: `(observation, prompts, keys) -> actions [N, H, A]`, H >= execute; a key is (seed of
        the episode, step at which the chunk begins).
      seeds: one distinct non-negative integer per episode.
      execute: steps acted of each chunk before the policy looks again.
      prompt_goal: "other" names a goal that is not the episode's, chosen by its seed.
      blank: the policy sees images of zeros.
      clips: how many episodes to render for people, failures among them if there are any.

    Raises:
      ValueError: bad seeds, actions of a wrong shape or not finite, an environment with a single
        goal for "other", or one that does not end an episode within its `max_steps`.
    """

    def act(state: State, prompts: list[str], step: int) -> Float[Array | np.ndarray, "n h a"]:
        observation = env.observe(state)
        if blank:
            observation = observation._replace(images=observation.images * 0)
        keys = np.stack([np.asarray(seeds), np.full(len(prompts), step)], -1)
        return policy(observation, prompts, keys.astype(np.uint32))

    return _evaluate(env, act, seeds, execute, prompt_goal, clips, progress)


def evaluate_expert(
    env: Environment,
    expert: Expert,
    seeds: Sequence[int],
    *,
    clips: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """The same for a scripted expert, which sees the physics state and acts step by step."""

    def act(state: State, prompts: list[str], step: int) -> Float[Array, "n 1 a"]:
        return expert(env, state)[:, None]

    return _evaluate(env, act, seeds, 1, "own", clips, progress)


def _evaluate(
    env: Environment,
    act: Callable[[State, list[str], int], Float[Array | np.ndarray, "n h a"]],
    seeds: Sequence[int],
    execute: int,
    prompt_goal: Literal["own", "other"],
    clips: int,
    progress: Progress | None,
) -> Evaluation:
    seeds = _checked_seeds(seeds)
    state = env.reset(np.asarray(seeds))
    goal = np.asarray(env.goal(state))
    named, prompts = _instructions(env, seeds, goal, prompt_goal)

    parts: list[Transition] = []
    executed, seconds = [], []
    ended = np.zeros(len(seeds), bool)
    for step in range(0, env.max_steps, execute):
        start = time.perf_counter()
        actions = np.asarray(act(state, prompts, step), np.float32)
        seconds.append(time.perf_counter() - start)
        _check_actions(env, actions, seeds, step, execute)
        executed.append(actions[:, :execute])
        state, transition = env.step_chunk(state, jnp.asarray(executed[-1]))
        parts.append(jax.tree.map(np.asarray, transition))
        ended |= (parts[-1].terminated | parts[-1].truncated).any(1)
        if progress is not None:
            progress(int(ended.sum()), len(seeds))
        if ended.all():
            break
    if not ended.all():
        raise ValueError(
            f"Environment '{env.name}' did not end the episode of seed {seeds[ended.argmin()]} "
            f"within its max_steps = {env.max_steps}."
        )

    t = jax.tree.map(lambda *chunks: np.concatenate(chunks, 1), *parts)
    length = (t.terminated | t.truncated).argmax(1) + 1
    alive = np.arange(t.reward.shape[1]) < length[:, None]
    success = (t.terminated & alive).any(1)
    achieved = (t.achieved & alive[..., None]).any(1)
    reward = (t.reward * alive).sum(1, dtype=np.float64)
    obeyed = np.where(named == goal, success, achieved[np.arange(len(seeds)), named])
    shown = choose(obeyed.tolist(), named.tolist(), clips)
    return Evaluation(
        environment=env.name,
        goals=tuple(env.goals),
        episodes=tuple(
            Episode(
                seed=seed,
                goal=env.goals[goal[i]],
                named_goal=env.goals[named[i]],
                prompt=prompts[i],
                success=bool(success[i]),
                named_achieved=bool(achieved[i, named[i]]),
                length=int(length[i]),
                reward=float(reward[i]),
            )
            for i, seed in enumerate(seeds)
        ),
        roughness=_roughness(np.concatenate(executed, 1), alive),
        fps=env.fps,
        latency=Latency.of(seconds),
        clips=_render(env, t.scene, shown, length),
    )


def _checked_seeds(seeds: Sequence[int]) -> list[int]:
    seeds = [int(seed) for seed in seeds]
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"Evaluation seeds must be distinct non-negative integers, at least one, got {seeds}."
        )
    return seeds


def _instructions(
    env: Environment, seeds: list[int], goal: np.ndarray, prompt_goal: Literal["own", "other"]
) -> tuple[np.ndarray, list[str]]:
    """The goal that each episode's prompt names, and a wording of it, both drawn from its seed."""
    if prompt_goal == "other" and len(env.goals) < 2:
        raise ValueError(
            f"prompt_goal 'other' needs an environment with two goals, "
            f"'{env.name}' has {list(env.goals)}."
        )
    named, prompts = goal.copy(), []
    for i, seed in enumerate(seeds):
        rng = np.random.default_rng(seed)
        wording, shift = rng.random(), rng.random()
        if prompt_goal == "other":
            named[i] = (goal[i] + 1 + int(shift * (len(env.goals) - 1))) % len(env.goals)
        wordings = env.prompts[named[i]]
        prompts.append(wordings[int(wording * len(wordings))])
    return named, prompts


def _check_actions(
    env: Environment, actions: np.ndarray, seeds: list[int], step: int, execute: int
) -> None:
    n, a = len(seeds), len(env.action_names)
    shape = actions.shape
    if actions.ndim != 3 or shape[0] != n or shape[1] < execute or shape[2] != a:
        names = ", ".join(env.action_names)
        raise ValueError(
            f"The policy returned actions of shape {shape} at step {step}, expected "
            f"[{n} episodes, at least {execute} steps, {a} actions ({names})]."
        )
    finite = np.isfinite(actions[:, :execute]).all((1, 2))
    if not finite.all():
        raise ValueError(
            f"The policy returned an action that is not finite at step {step} of the episode of "
            f"seed {seeds[finite.argmin()]} in '{env.name}'."
        )


def _roughness(actions: Float[np.ndarray, "n t a"], alive: Bool[np.ndarray, "n t"]) -> float:
    bends = np.abs(np.diff(actions.astype(np.float64), n=2, axis=1))[alive[:, 2:]]
    return float(bends.mean()) if bends.size else 0.0


def _render(
    env: Environment, scene: Scene, shown: list[int], length: np.ndarray
) -> tuple[Clip, ...]:
    """One call per step for all shown episodes, so that a compiled renderer sees one shape."""
    if not shown:
        return ()
    steps = range(int(length[shown].max()))
    frames = [
        env.render(jax.tree.map(lambda x, t=t: x[shown, t], scene), _CLIP_SIZE) for t in steps
    ]
    return tuple(
        Clip(i, np.stack([f[j] for f in frames[: length[i]]])) for j, i in enumerate(shown)
    )
