"""Conditions of an evaluation over all tasks of a suite: a trained policy, its controls and
perturbations, the suite's expert and other policies, all on the same starts.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, UInt32
from rich.progress import ProgressColumn, Task
from rich.text import Text

from models import Policy
from models.files.terminal import Console, Progress
from models.robot_policy import RobotPolicy
from models.session import RobotSession
from sim.acting import Control
from sim.acting import Policy as Acting
from sim.evaluate import evaluate, evaluate_expert, filmed
from sim.journal import Journal
from sim.protocol import Observation, Slots, Spec, Start
from sim.results import Episode, Evaluation, joined
from sim.suite import Suite
from sim.suites import load_suite
from tools.command_line.bars import columns
from tools.serving.remote import RemotePolicy, RemoteRobot

Beside = Literal["untrained", "expert", "wrong-prompt", "blank-image"]
BESIDE: tuple[Beside, ...] = ("untrained", "expert", "wrong-prompt", "blank-image")
PERTURBATIONS = ("camera", "light", "texture", "distractors", "paraphrase", "delay", "noise")
"""Usual perturbations under which policies are evaluated; suites may have further variants."""
DELAY = 2
"""Control steps by which the perturbation "delay" makes chunks come later."""
NOISE = 0.03
"""Standard deviation of what the perturbation "noise" adds to every executed action, as a fraction
of its range. With this noise, twice as much as in recordings, the tabletop's expert fails on none
of 64 starts of lift, 1 of reach and 4 of push."""

_NAMES = ("all", "trained", "untrained", "expert", "wrong prompt", "blank image", "compared")
"""Names that no variant can have."""
_MOST_ROWS = 32
"""Largest number of rows in a batch. More are hardly faster per row, and padding them is wasted
when fewer wait."""
_SPEED_SECONDS = 600
"""Latest seconds over which the rate shown is taken; slow simulators end few episodes a minute."""


@dataclass(frozen=True)
class Condition:
    """A policy, in this process or behind a server, with its prompts and images; the suite's expert
    if there is no policy."""

    name: str
    policy: Policy | RemotePolicy | None = None
    control: Control = "own"
    clips: int = 2
    checkpoint: str = ""
    """Text that distinguishes the policy's parameters from any others."""
    loaded: Mapping[str, Any] = field(default_factory=dict)
    """Options with which the parameters were loaded and that are not the defaults, as plain
    data."""
    delay: int | None = None
    """Control steps from an observation until its chunk is available, which then continues the
    previous one as the policy does. None if every chunk is waited for and stands alone."""
    noise: tuple[float, ...] = ()
    """Standard deviation, in the robot's units, of the normal noise added to each executed action;
    empty for no noise. The noise derives from episode and step."""

    def check(self, spec: Spec) -> None:
        """Raises ValueError unless the condition can act in such environments."""
        if self.control == "other prompt" and len(spec.goals) < 2:
            raise ValueError(
                f"{spec.name} has a single goal, so there is no wrong prompt; leave 'wrong-prompt' "
                "out of --controls."
            )
        if self.policy is not None:
            self._robot(spec)
            if self.noise and len(self.noise) != len(spec.action_names):
                raise ValueError(
                    f"{spec.name} has {len(spec.action_names)} actions, but the suite's "
                    f"action_range has {len(self.noise)} entries; give one per action."
                )
        elif not spec.expert:
            raise ValueError(
                f"{spec.name} has no scripted expert; leave 'expert' out of --controls."
            )

    def check_delay(self, replan_steps: int) -> None:
        """Raises ValueError unless the policy's chunks can come as late as `delay`."""
        delay, policy = self.delay, self.policy
        if delay is None or policy is None:
            return
        if not 0 <= delay <= replan_steps:
            raise ValueError(
                f"delay is {delay} with replan_steps {replan_steps}, so the policy would "
                "observe again before its last answer arrives; give a delay of 0 to "
                "replan_steps."
            )
        horizon: int | None = (
            len(policy.model.config.answered) if isinstance(policy, Policy) else policy.horizon
        )
        if horizon is not None and replan_steps + delay > horizon:
            raise ValueError(_too_short(horizon, replan_steps, delay))
        if not isinstance(policy, Policy):
            return
        config = policy.model.config
        if policy.continues == "trained" and delay > config.rtc_max_delay:
            raise ValueError(
                f"delay is {delay}, but the policy was trained to continue at most "
                f"{config.rtc_max_delay} steps (model.rtc_max_delay); give a shorter delay, or "
                "chunking 'guided' or 'none'."
            )

    @property
    def picture(self) -> int | None:
        """Edge of the pictures that the policy sees; None for an expert, who sees none."""
        if self.policy is None:
            return None
        if isinstance(self.policy, RemotePolicy):
            return self.policy.picture
        return int(self.policy.model.config.edge)

    def batched(self, slots: int) -> "Condition":
        """The condition with batches of one size that suits so many slots."""
        if isinstance(self.policy, Policy):
            return replace(self, policy=in_batches(self.policy, slots))
        return self

    def header(self) -> dict[str, Any]:
        """Settings that, besides the suite, decide the outcome of a start."""
        if self.policy is None:
            return {}
        told = {"checkpoint": self.checkpoint, "control": self.control, **self.loaded}
        if self.delay is not None:
            continues = self.policy.continues if isinstance(self.policy, Policy) else "none"
            told |= {"delay": self.delay, "chunking": continues}
        if self.noise:
            told["noise"] = self.noise
        if isinstance(self.policy, RemotePolicy):
            return told
        solver = self.policy.model.config.solver  # not in journals from before there were two
        named = {} if solver == "euler" else {"solver": solver}
        return told | {"sampler_steps": self.policy.euler_steps} | named

    def evaluate(
        self, slots: Slots, starts: Sequence[Start], replan_steps: int, **how: Any
    ) -> Evaluation:
        """See `sim.evaluate`."""
        if self.policy is None:
            return evaluate_expert(slots, starts, **how)
        acting = ActingInEpisodes(self._robot(slots.spec), replan_steps, self.delay)
        acts: Acting = acting
        if self.noise:
            acts = _disturbed(acts, acting.steps, self.noise)
        keep = how.pop("on_episode", None)

        def ended(episode: Episode) -> None:
            acting.forget(episode.start)
            if keep is not None:
                keep(episode)

        how |= {"control": self.control, "on_episode": ended}
        return evaluate(slots, acts, starts, replan_steps=acting.steps, **how)

    def _robot(self, spec: Spec) -> RobotPolicy | RemoteRobot:
        if isinstance(self.policy, RemotePolicy):
            return RemoteRobot.in_suite(self.policy, spec)
        assert self.policy is not None
        return RobotPolicy.in_suite(self.policy, spec)


@dataclass(frozen=True)
class Perturbation:
    """A change under which a policy acts from the same starts; `about` describes it."""

    about: str
    suite: Suite
    condition: Condition


def perturbations(
    suite: Suite,
    trained: Condition,
    asked: Sequence[str],
    tasks: tuple[str, ...],
    replan_steps: int,
    episodes: int,
) -> tuple[list[Perturbation], dict[str, str]]:
    """Perturbations of a condition in a suite. "all" stands for the usual ones and the suite's
    variants; those of them that are impossible are left out, and the reasons are returned by name.

    Raises:
      ValueError, FileNotFoundError: a perturbation that is asked for by name is impossible.
    """
    every = (*PERTURBATIONS, *suite.variants) if "all" in asked else ()
    named = [name for name in asked if name != "all"]
    found, left_out = [], {}
    for name in dict.fromkeys((*every, *named)):
        try:
            change = _perturbation(name, suite, trained, tasks, replan_steps)
            change.suite.judged(episodes)
            found.append(change)
        except (ValueError, FileNotFoundError) as error:
            if name in named:
                raise
            left_out[name] = str(error)
    return found, left_out


def _perturbation(
    name: str, suite: Suite, trained: Condition, tasks: tuple[str, ...], replan_steps: int
) -> Perturbation:
    acting = replace(trained, name=name, clips=2)
    if name in suite.variants:
        if name in _NAMES:
            raise ValueError(
                f"Suite '{suite.name}' has a variant named '{name}', which is also the name of "
                "a condition; rename the variant."
            )
        wanted = suite.variants[name]
        if isinstance(wanted, str):
            other = load_suite(wanted)
        else:
            other = replace(wanted, source=wanted.source or suite.source)
        other.groups(tasks or suite.tasks)
        if other.first_seed != suite.first_seed:
            raise ValueError(
                f"Variant '{name}' of suite '{suite.name}' has first_seed {other.first_seed}, "
                f"but the suite has {suite.first_seed}; give it the same first_seed."
            )
        return Perturbation(other.about or other.name, other, acting)
    if name == "delay":
        if isinstance(trained.policy, RemotePolicy) and trained.policy.horizon is None:
            raise ValueError(
                f"The server at {trained.policy.url} does not report how many steps its chunks "
                f"have, and {replan_steps + (trained.delay or 0) + DELAY} are needed; evaluate "
                f"with --delay {(trained.delay or 0) + DELAY} separately, into another --out."
            )
        late = replace(acting, delay=(trained.delay or 0) + DELAY)
        late.check_delay(replan_steps)
        return Perturbation(f"chunks that come {DELAY} control steps later", suite, late)
    if name == "noise" and suite.action_range:
        spread = tuple(NOISE * (high - low) for low, high in suite.action_range)
        about = f"normal noise of {NOISE} of their range on executed actions"
        return Perturbation(about, suite, replace(acting, noise=spread))
    if name == "noise":
        raise ValueError(
            f"Suite '{suite.name}' has no action_range, of which the noise would be a share; "
            "set its action_range."
        )
    known = [*suite.variants, "delay", "noise"]
    raise ValueError(
        f"Suite '{suite.name}' has no variant '{name}'; choose all, or some of {known}."
    )


def conditions(
    policy: Policy | RemotePolicy, beside: Sequence[Beside], checkpoint: str = ""
) -> list[Condition]:
    """The trained policy, then those of its controls that are asked for, in their usual order.

    Raises:
      ValueError: a control needs the network of a policy behind a server.
    """
    found = [Condition("trained", policy, "own", 6, checkpoint)]
    if "untrained" in beside:
        if isinstance(policy, RemotePolicy):
            raise ValueError(
                f"The policy runs on the server {policy.url}, so its network cannot be "
                "re-initialised here; leave 'untrained' out of --controls."
            )
        params = jax.jit(policy.model.init)(jax.random.key(0))
        found.append(Condition("untrained", policy.varied(params=params), "own", 2, checkpoint))
    if "expert" in beside:
        found.append(Condition("expert"))
    if "wrong-prompt" in beside:
        found.append(Condition("wrong prompt", policy, "other prompt", 2, checkpoint))
    if "blank-image" in beside:
        found.append(Condition("blank image", policy, "blank", 2, checkpoint))
    return found


def in_batches(policy: Policy, slots: int) -> Policy:
    """The policy with batches of one size that suits so many slots."""
    return policy.varied(sizes=(min(slots, _MOST_ROWS),))


def evaluate_all(
    suite: Suite,
    wanted: Sequence[Condition],
    console: Console,
    *,
    tasks: tuple[str, ...] = (),
    episodes: int | None = None,
    slots: int | None = None,
    replan_steps: int = 4,
    journal: Journal | None = None,
) -> dict[str, Evaluation]:
    """Evaluates every condition, the first of which has a policy, on the same starts of a suite's
    tasks (all, if none are named).

    Policies compute batches of one size, so that an episode does not depend on how many others
    wait. They see pictures of their own size (or of `Suite.drawn`, if the suite sets it, which they
    resize). An expert acts beside the first condition.

    Raises:
      ValueError: no such task, or policies, controls, suite and journal do not fit each other; no
        episode has run then.
    """
    groups = suite.groups(tasks)
    episodes = suite.episodes if episodes is None else episodes
    if episodes < 1 or replan_steps < 1 or (slots is not None and slots < 1):
        raise ValueError(
            f"episodes is {episodes}, replan_steps {replan_steps} and slots {slots}; each must "
            "be at least 1."
        )
    seeds = suite.judged(episodes)
    for condition in wanted:
        condition.check_delay(replan_steps)
    count = suite.count(slots, len(groups[0]) * episodes)
    wanted = [condition.batched(count) for condition in wanted]
    about = {
        "suite": suite.name,
        "tasks": tuple(task for group in groups for task in group),
        "first_seed": suite.first_seed,
        "replan_steps": replan_steps,
    } | ({"source": suite.source} if suite.source else {})
    parts: dict[str, list[Evaluation]] = {condition.name: [] for condition in wanted}
    bars = Progress(
        *columns(_Rate()), console=console, transient=True, speed_estimate_period=_SPEED_SECONDS
    )
    with bars as progress:

        def evaluated(
            condition: Condition, opened: Slots, group: tuple[str, ...], size: int
        ) -> Evaluation:
            starts = [Start(task, seed) for task in group for seed in seeds]
            name, keep, done = condition.name, None, []
            if journal is not None:
                header = about | {"picture": size} | condition.header()
                asked = set(starts)
                done = [e for e in journal.begin(name, header) if e.start in asked]
                keep = partial(journal.add, name)
            says = name if len(groups) == 1 else f"{name}, {group[0]}"
            bar = progress.add_task(says, total=len(starts), completed=len(done))
            result = condition.evaluate(
                opened,
                starts,
                replan_steps,
                clips=0,
                progress=lambda ended, _: progress.update(bar, completed=ended),
                done=done,
                on_episode=keep,
            )
            progress.remove_task(bar)
            console.print(f"  {says}: {result.success}{_lost(result)}")
            return result

        for group in groups:
            for size, acting in _by_picture(wanted, suite).items():
                with closing(suite.open(group, count, size)) as opened:
                    for condition in wanted:
                        condition.check(opened.spec)
                    found = [evaluated(condition, opened, group, size) for condition in acting]
                    clips = [-(-condition.clips // len(groups)) for condition in acting]
                    shown = filmed(opened, found, clips, replan_steps)
                    for condition, result in zip(acting, shown, strict=True):
                        parts[condition.name].append(result)
    return {name: joined(found, suite.name) for name, found in parts.items()}


class ActingInEpisodes:
    """A robot's policy as evaluation calls it (`sim.acting.Policy`), with a session for each
    episode.

    It is asked for a chunk every `replan_steps` steps, or when one ends. With a `delay`, a chunk
    comes so many steps after its observation: it begins with the actions of the previous one that
    the robot executes meanwhile, and continues it as the policy does; an episode's first chunk is
    waited for.

    Attributes:
      steps: how many steps to execute before the next call; `replan_steps`, or 1 if the policy
        reads the observations between.
    """

    def __init__(
        self, robot: RobotPolicy | RemoteRobot, replan_steps: int, delay: int | None = None
    ) -> None:
        self._robot, self._replan_steps, self._delay = robot, replan_steps, delay
        self._sessions: dict[int, RobotSession] = {}
        self.steps = 1 if self._session(0).lookback else replan_steps

    def __call__(
        self, observation: Observation, prompts: list[str], keys: UInt32[np.ndarray, "n 2"]
    ) -> Float[np.ndarray, "n _t a"]:
        """Actions of the next `steps` steps; the keys are those of `Start.key`."""
        episodes, steps = keys.T.tolist()
        new = {e: self._session(e) for e, step in zip(episodes, steps, strict=True) if not step}
        self._sessions |= new
        sessions = [self._sessions[episode] for episode in episodes]
        since = [step - one.begun for one, step in zip(sessions, steps, strict=True)]
        asking = []
        for i, session in enumerate(sessions):
            if session.chunk is None or since[i] >= min(self._replan_steps, len(session.chunk)):
                asking.append(i)
            else:
                assert isinstance(self._robot, RobotPolicy)
                seen = observation.images[i], observation.state[i]
                session.observe(self._robot.observed(seen, prompts[i]), steps[i])
        if asking:
            chunks = self._robot.act(
                Observation(observation.images[asking], observation.state[asking]),
                [prompts[i] for i in asking],
                keys[asking],
                sessions=[sessions[i] for i in asking],
                executed=[since[i] if steps[i] else None for i in asking],
                committed=self._delay or 0,
            )
            if self._delay is not None and chunks.shape[1] < self._replan_steps + self._delay:
                raise ValueError(_too_short(chunks.shape[1], self._replan_steps, self._delay))
        return np.stack([self._next(*row) for row in zip(sessions, steps, strict=True)])

    def forget(self, start: Start) -> None:
        """Drops the session of an episode that has ended."""
        self._sessions.pop(start.key(0)[0], None)

    def _session(self, episode: int) -> RobotSession:
        return self._robot.session(episode, continues=self._delay is not None)

    def _next(self, session: RobotSession, step: int) -> Float[np.ndarray, "_t a"]:
        assert session.chunk is not None
        return session.chunk[step - session.begun :][: self.steps]


def _disturbed(acts: Acting, replan_steps: int, noise: tuple[float, ...]) -> Acting:
    """A policy with noise added to its executed actions."""

    def act(
        observation: Observation, prompts: list[str], keys: UInt32[np.ndarray, "n 2"]
    ) -> Float[np.ndarray, "n t a"]:
        chunks = np.asarray(acts(observation, prompts, keys), np.float32)[:, :replan_steps]
        count, dims = chunks.shape[1], len(noise)
        draws = [
            [np.random.default_rng((episode, step + t)).normal(size=dims) for t in range(count)]
            for episode, step in keys.tolist()
        ]
        return chunks + np.asarray(noise, np.float32) * np.asarray(draws, np.float32)

    return act


def _too_short(horizon: int, replan_steps: int, delay: int) -> str:
    return (
        f"delay is {delay} with replan_steps {replan_steps}, but chunks have only {horizon} "
        f"steps, fewer than their sum {replan_steps + delay}; give a shorter delay or fewer "
        "replan_steps."
    )


def _by_picture(wanted: Sequence[Condition], suite: Suite) -> dict[int, list[Condition]]:
    """Groups conditions by the edge of the pictures to draw, the first's first."""
    first = next(c.picture for c in wanted if c.picture is not None)
    found: dict[int, list[Condition]] = {}
    for condition in wanted:
        found.setdefault(suite.edge(condition.picture or first), []).append(condition)
    return found


def _lost(found: Evaluation) -> str:
    """Text that warns of failed simulators."""
    text = f"; {found.reruns} reruns after simulator failures" if found.reruns else ""
    if found.failures:
        first = found.failures[0]
        text += (
            f"; {len(found.failures)} starts were given up and are not counted, the first "
            f"{first.task} seed {first.seed}: {first.error}"
        )
    return text


class _Rate(ProgressColumn):
    """Episodes a minute; those of an earlier run do not count."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{60 * speed:.1f}/min" if speed else "")
