"""`Slots` over an `Environment` on a device: slots are rows of one batch, and a poll advances all
commanded slots in one compiled call.

Slots without a command are computed too, as the batch has one shape, but keep their state. An
episode that ends in the middle of a chunk answers with the observation at its end, although the
environment continues with a new episode.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sim.protocol import Environment, Observation, Outcome, Spec, Start, State, Transition

Expert = Callable[[Any, State], Float[Array, "n a"]]
"""(environment, state) -> one action for each environment; it may read the physics."""

FILM_SIZE = 160
"""Edge of a film's pictures, pixels."""


class _Chunk(NamedTuple):
    """Command to a slot: execute `actions`, or as many of the expert's actions."""

    steps: int
    actions: Float[np.ndarray, "t a"] | None = None
    film: bool = False
    noise: float = 0.0


def spec_of(env: Environment, picture: tuple[int, int], expert: bool = False) -> Spec:
    """Properties that all episodes of an environment share."""
    return Spec(
        name=env.name,
        tasks=(env.name,),
        cameras=tuple(env.cameras),
        picture=picture,
        state_names=tuple(env.state_names),
        action_names=tuple(env.action_names),
        fps=env.fps,
        max_steps=env.max_steps,
        goals=tuple(env.goals),
        prompts=tuple(env.prompts),
        expert=expert,
    )


class DeviceSlots:
    """`sim.protocol.Slots` on a device; a poll does all the work and never times out.

    Args:
      env: where to act; its task has the environment's name.
      count: number of episodes at a time. An environment may advance only whole groups of its own
        `group_size`.
      expert: the expert that demonstrates.
    """

    lockstep = True

    def __init__(self, env: Environment, count: int, expert: Expert | None = None) -> None:
        if count < 1:
            raise ValueError(f"{env.name}: count is {count}, expected at least one slot.")
        self.count = count
        self._env, self._expert = env, expert
        self._state = env.reset(np.zeros(count, np.int64))
        height, width = np.shape(env.observe(self._state).images)[2:4]
        self.spec = spec_of(env, (height, width), expert is not None)
        self._begun: dict[int, int] = {}
        self._told: dict[int, _Chunk] = {}
        self._running = np.zeros(count, bool)
        self._seed = np.zeros(count, np.int64)
        self._acted = np.zeros(count, np.int64)
        self._goal = np.zeros(count, np.int64)

    def begin(self, slot: int, start: Start) -> None:
        """Starts an episode; an episode already in the slot is abandoned.

        Raises:
          ValueError: there is no such slot or task.
        """
        self._check(slot)
        if start.task != self.spec.name:
            raise ValueError(f"{self.spec.name} has no task '{start.task}', only its own.")
        self._told.pop(slot, None)
        self._begun[slot] = start.seed

    def send(self, slot: int, actions: Float[np.ndarray, "t a"], film: bool = False) -> None:
        """Acts T steps, or until the episode ends.

        Raises:
          ValueError: no episode waits in the slot, or the actions have another shape.
        """
        actions = np.asarray(actions, np.float32)
        dims = len(self.spec.action_names)
        if actions.ndim != 2 or not len(actions) or actions.shape[1] != dims:
            raise ValueError(
                f"{self.spec.name}: expected actions of shape [steps, {dims}] for slot {slot}, "
                f"got {actions.shape}."
            )
        self._tell(slot, _Chunk(len(actions), actions, film))

    def demonstrate(self, slot: int, steps: int, noise: float = 0.0) -> None:
        """Lets the expert act T steps, or until the episode ends; see `sim.protocol.Slots`.

        Raises:
          ValueError: no episode waits in the slot, or there is no expert.
        """
        if self._expert is None:
            raise ValueError(f"{self.spec.name} was given no expert, so it cannot demonstrate.")
        self._tell(slot, _Chunk(steps, noise=noise))

    def poll(self, timeout: float | None = None) -> list[Outcome]:
        """Outcomes of all slots that were commanded since the last call."""
        begun, self._begun = self._begun, {}
        told, self._told = self._told, {}
        outcomes = self._begin(begun) if begun else []
        shown = {slot: chunk for slot, chunk in told.items() if chunk.actions is None}
        for steps in {chunk.steps for slot, chunk in told.items() if slot not in shown}:
            same = {s: c for s, c in told.items() if c.steps == steps and s not in shown}
            outcomes += self._send(same, steps)
        return outcomes + (self._demonstrate(shown) if shown else [])

    def wake(self) -> None:
        """Does nothing, as no poll waits."""

    def close(self) -> None:
        """Does nothing, as there is nothing to end."""

    def _begin(self, begun: Mapping[int, int]) -> list[Outcome]:
        slots = list(begun)
        seeds = np.zeros(self.count, np.int64)
        seeds[slots] = list(begun.values())
        self._go_on(self._env.reset(seeds), slots)
        self._running[slots], self._acted[slots] = True, 0
        self._seed[slots] = seeds[slots]
        self._goal[slots] = np.asarray(self._env.goal(self._state))[slots]
        seen = Observation(*map(np.asarray, self._env.observe(self._state)))
        return [
            Outcome(
                slot=slot,
                observation=Observation(seen.images[slot], seen.state[slot]),
                goal=int(self._goal[slot]),
                reward=np.zeros(0, np.float32),
            )
            for slot in slots
        ]

    def _send(self, told: Mapping[int, _Chunk], steps: int) -> list[Outcome]:
        actions = np.zeros((self.count, steps, len(self.spec.action_names)), np.float32)
        for slot, chunk in told.items():
            actions[slot] = chunk.actions
        return self._report(told, self._advance(list(told), actions))

    def _demonstrate(self, told: Mapping[int, _Chunk]) -> list[Outcome]:
        assert self._expert is not None
        acting, parts, wanted = dict(told), [], []
        for t in range(max(chunk.steps for chunk in told.values())):
            action = np.array(self._expert(self._env, self._state), np.float32)
            wanted.append(action.copy())
            for slot, chunk in acting.items():
                if chunk.noise:
                    action[slot] += chunk.noise * self._disturbance(slot, t)
            parts.append(self._advance(list(acting), action[:, None]))
            over = (parts[-1].terminated | parts[-1].truncated)[:, 0]
            acting = {s: c for s, c in acting.items() if t + 1 < c.steps and not over[s]}
            if not acting:
                break
        happened = jax.tree.map(lambda *part: np.concatenate(part, 1), *parts)
        return self._report(told, happened, np.stack(wanted, 1))

    def _disturbance(self, slot: int, t: int) -> Float[np.ndarray, " a"]:
        """Normal noise as wide as each action's range; it depends only on episode and step."""
        rng = np.random.default_rng((int(self._seed[slot]), int(self._acted[slot]) + t))
        low, high = np.asarray(self._env.action_range, np.float32).T
        return rng.normal(size=len(low)) * (high - low)

    def _advance(self, slots: list[int], actions: Float[np.ndarray, "n t a"]) -> Transition:
        """Steps every slot and returns the transition, though only the slots' states are kept."""
        state, happened = self._env.step_chunk(self._state, jnp.asarray(actions))
        self._go_on(state, slots)
        return jax.tree.map(np.asarray, happened)

    def _go_on(self, state: State, slots: list[int]) -> None:
        """Takes over `state`, except for other slots in which an episode runs."""
        kept = self._running.copy()
        kept[slots] = False

        def choose(new: Any, old: Any) -> Any:
            where = np.where if isinstance(new, np.ndarray) else jnp.where
            return where(kept.reshape(-1, *[1] * (new.ndim - 1)), old, new)

        self._state = jax.tree.map(choose, state, self._state) if kept.any() else state

    def _report(
        self,
        told: Mapping[int, _Chunk],
        happened: Transition,
        wanted: Float[np.ndarray, "n t a"] | None = None,
    ) -> list[Outcome]:
        """Each slot's steps until all actions are executed or its episode ends."""
        over = happened.terminated | happened.truncated
        length = np.ones(self.count, np.int64)
        for slot, chunk in told.items():
            ends = np.flatnonzero(over[slot, : chunk.steps])
            length[slot] = ends[0] + 1 if len(ends) else chunk.steps
        rows, last = np.arange(self.count), length - 1
        self._acted[list(told)] += length[list(told)]
        scene = jax.tree.map(lambda x: x[rows, last], happened.scene)
        images, state = np.asarray(self._env.pictures(scene)), happened.state[rows, last]
        outcomes = []
        for slot, chunk in told.items():
            acted = slice(length[slot])
            outcome = Outcome(
                slot=slot,
                observation=Observation(images[slot], state[slot]),
                goal=int(self._goal[slot]),
                reward=np.asarray(happened.reward)[slot, acted],
                terminated=bool(happened.terminated[slot, last[slot]]),
                truncated=bool(happened.truncated[slot, last[slot]]),
                success=bool(happened.terminated[slot, acted].any()),
                achieved=np.any(happened.achieved[slot, acted], 0),
                actions=None if wanted is None else wanted[slot, acted],
                film=self._film(happened, slot)[acted] if chunk.film else None,
            )
            self._running[slot] = not outcome.ended
            outcomes.append(outcome)
        return outcomes

    def _film(self, happened: Transition, slot: int) -> np.ndarray:
        """Renders the whole chunk, so that a compiled renderer sees one shape."""
        return self._env.render(jax.tree.map(lambda x: x[slot], happened.scene), FILM_SIZE)

    def _tell(self, slot: int, chunk: _Chunk) -> None:
        self._check(slot)
        if not self._running[slot] or slot in self._begun or slot in self._told:
            raise ValueError(
                f"{self.spec.name}: slot {slot} has no running episode or is busy; begin an "
                "episode, or poll its outcome first."
            )
        self._told[slot] = chunk

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.count:
            raise ValueError(f"{self.spec.name} has slots 0 … {self.count - 1}, no slot {slot}.")
