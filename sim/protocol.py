"""What an environment must offer to be recorded, evaluated or learnt in: N of them at once, as pure
functions.

Physics states are opaque pytrees with a leading axis N, so a backend may keep them on a device;
only `Observation` leaves it. Goals are what a task can be told to do (here: which block);
`achieved` reports every goal, so a control can see what a policy did when it was told another.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

State = Any
Scene = Any


class Observation(NamedTuple):
    """All that a policy may see besides the prompt."""

    images: UInt8[Array, "n c h w 3"]
    state: Float[Array, "n s"]


class Transition(NamedTuple):
    """What happened at each of the T steps of a chunk. `observation` at a finished step is the
    terminal one.

    `terminated`: the goal was reached; `truncated`: time ran out (never both). The step after
    either starts a fresh episode. `scene` is what `render` needs to draw that step.
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
    fps: int
    max_steps: int
    goals: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    """Wordings of each goal."""

    def reset(self, seeds: Int[np.ndarray, "n"]) -> State:
        """Fresh episodes, one per seed; the same seed gives the same episode."""

    def goal(self, state: State) -> Int[Array, "n"]:
        """Index into `goals` of each running episode."""

    def observe(self, state: State) -> Observation:
        """What the policy sees now."""

    def step_chunk(self, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
        """Acts T steps; an episode that ends starts anew from a fresh random state (auto-reset)."""

    def render(self, scene: Scene, size: int) -> UInt8[np.ndarray, "*b h w 3"]:
        """Pictures for people, of scenes with any leading axes."""
