"""Two interfaces to simulation: `Environment`, N episodes on a device as pure functions, and
`Slots`, N places for episodes that report as they finish, with any simulator behind them.

Recording, evaluation and asynchronous RL (EnvPool's send and receive, Weng et al. 2022) need only
`Slots`, made by `sim.environments.device_slots` or `sim.processes.processes`. Goals are the things
that a policy can be told to do in a task; an environment's `achieved` reports every goal, so that a
control can see what a policy did when told another, simulators in processes only the episode's own.
"""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

State = Any
Scene = Any

TRAIN_SEEDS = range(0, 1_000_000_000)
"""Seeds of episodes for learning."""
EVAL_SEEDS = range(1_000_000_000, 2_000_000_000)
"""Seeds of episodes for judging policies; no demonstration starts from one. Only LIBERO has few
starts for judging, numbered from 0, and is recorded from others (`Suite.recorded_from`)."""


class Start(NamedTuple):
    """An episode: the same start gives the same episode in any slot and beside any other
    episodes."""

    task: str
    seed: int

    def key(self, step: int) -> tuple[int, int]:
        """The two 32-bit words of the key of a policy's noise at a step of this episode."""
        return zlib.crc32(f"{self.seed} {self.task}".encode()), step


class Observation(NamedTuple):
    """Everything that a policy may see besides the prompt."""

    images: UInt8[Array | np.ndarray, "*n c h w 3"]
    state: Float[Array | np.ndarray, "*n s"]


@dataclass(frozen=True)
class Spec:
    """Properties that all episodes of some slots share."""

    name: str
    tasks: tuple[str, ...]
    cameras: tuple[str, ...]
    """Keys of a dataset: "observation.images.front"."""
    picture: tuple[int, int]
    """Height and width of observed pictures, pixels."""
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    fps: int
    """Control steps per second."""
    max_steps: int
    """Largest number of steps of an episode."""
    goals: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    """Wordings of each goal."""
    expert: bool = False
    """True if `demonstrate` works."""

    def wording(self, goal: int, seed: int) -> str:
        """The wording of a goal in an episode with this seed."""
        wordings = self.prompts[goal]
        return wordings[int(np.random.default_rng(seed).random() * len(wordings))]


class Outcome(NamedTuple):
    """Outcome of a slot's last command."""

    slot: int
    observation: Observation
    """Current observation, [c h w 3] and [s]; the terminal one if the episode ended."""
    goal: int
    """Goal of the episode, an index into `Spec.goals`."""
    reward: Float[np.ndarray, " t"]
    """Rewards by executed step: none after `begin`, fewer than sent if the episode ended."""
    terminated: bool = False
    """The environment has ended the episode: success, or final failure."""
    truncated: bool = False
    """Time ran out; never both."""
    success: bool = False
    """The episode's own goal was achieved at one of these steps."""
    achieved: Bool[np.ndarray, " g"] | None = None
    """Goals achieved at any of these steps; None if the slots judge only the episode's own goal."""
    actions: Float[np.ndarray, "t a"] | None = None
    """The expert's actions, from `demonstrate`."""
    film: UInt8[np.ndarray, "t h w 3"] | None = None
    """A picture for people after every step, if requested."""
    error: str | None = None
    """The simulator died or hung: the episode does not count and can be started again."""

    @property
    def ended(self) -> bool:
        """True if the slot waits for another `begin`."""
        return self.terminated or self.truncated or self.error is not None


def failed(slot: int, spec: Spec, error: str, goal: int = 0) -> Outcome:
    """Outcome of a slot whose simulator died or hung."""
    nothing = Observation(
        np.zeros((len(spec.cameras), *spec.picture, 3), np.uint8),
        np.zeros(len(spec.state_names), np.float32),
    )
    return Outcome(
        slot=slot,
        observation=nothing,
        goal=goal,
        reward=np.zeros(0, np.float32),
        error=error,
    )


class Slots(Protocol):
    """Places for episodes. Each slot gets one command at a time and answers with one `Outcome`.

    Only one thread may command and poll them; other threads may call only `wake`.
    """

    spec: Spec
    count: int
    lockstep: bool
    """One computation advances all commanded slots: command as many as you can, then poll."""

    def begin(self, slot: int, start: Start) -> None:
        """Starts an episode; an episode already in the slot is abandoned."""

    def send(self, slot: int, actions: Float[np.ndarray, "t a"], film: bool = False) -> None:
        """Acts T steps, or until the episode ends. Observed pictures are rendered once, at the
        end."""

    def demonstrate(self, slot: int, steps: int, noise: float = 0.0) -> None:
        """Lets the task's scripted expert act `steps` steps, with normal noise added to its
        actions; `noise` is its standard deviation as a fraction of the action's range."""

    def poll(self, timeout: float | None = None) -> list[Outcome]:
        """Outcomes since the last call. If a slot is busy, waits for at least one, unless the
        timeout (seconds) passes or `wake` is called first."""

    def wake(self) -> None:
        """Makes a waiting poll, or else the next one, return the finished outcomes. May be called
        from any thread at any time."""

    def close(self) -> None:
        """Ends the simulators."""


class Transition(NamedTuple):
    """Transitions of the T steps of a chunk. `observation` at a finished step is the terminal one.

    `terminated`: the goal was reached; `truncated`: time ran out (never both). The step after
    either starts a new episode. `scene` is what `render` needs to draw that step.
    """

    reward: Float[Array, "n t"]
    terminated: Bool[Array, "n t"]
    truncated: Bool[Array, "n t"]
    achieved: Bool[Array, "n t g"]
    state: Float[Array, "n t s"]
    scene: Scene


class Environment(Protocol):
    """A family of episodes with one task, whose goal and initial state derive from a seed."""

    name: str
    cameras: tuple[str, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    action_range: tuple[tuple[float, float], ...]
    """Lowest and highest value of each action."""
    fps: int
    max_steps: int
    goals: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    """Wordings of each goal."""

    def reset(self, seeds: Int[np.ndarray, " n"]) -> State:
        """New episodes, one per seed; the same seed gives the same episode."""

    def goal(self, state: State) -> Int[Array, " n"]:
        """Index into `goals` of each running episode."""

    def observe(self, state: State) -> Observation:
        """Current observations."""

    def step_chunk(self, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
        """Acts T steps; an episode that ends restarts from a new random state (auto-reset)."""

    def pictures(self, scene: Scene) -> UInt8[Array, "n c h w 3"]:
        """Images of `observe`'s cameras for N scenes, such as terminal ones."""

    def render(self, scene: Scene, size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people, of scenes with any leading axes."""
