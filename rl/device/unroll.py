"""N envs (states of one traceable environment) act a number of chunks each, on the device.

If an episode ends within a chunk, the rest of the chunk is not executed, and the env's next chunk
begins a new episode. The observation at which time ran out is kept, so that its value can stand for
the rewards that would have followed (Pardo et al., arXiv 1712.00378).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from models import Policy
from models.inputs.packed_batch import PackedBatch
from models.layers.functional import Params
from models.robot_policy import RobotPolicy
from rl import flow_policy
from rl.config import RlConfig
from rl.records import SampledChunk
from rl.rewards import reward_of
from sim.environments.device_slots import spec_of
from sim.environments.grouped import restarted
from sim.protocol import Environment, Observation, Scene, State, Transition

_WORDING, _NOISE = 0, 1


class Traceable(Environment, Protocol):
    """An `Environment` whose methods can also be traced. Its state identifies the episodes by
    `seed` [n] and `episode` [n], and counts their steps in `step` [n]."""

    image_size: int
    """Edge of observed pictures, pixels."""

    def pure_reset(self, seeds: UInt32[Array, " n"]) -> State:
        """Traceable `reset`."""

    def pure_observe(self, state: State) -> Observation:
        """Traceable `observe`."""

    def pure_pictures(self, scene: Scene) -> Array:
        """Traceable `pictures`."""

    def pure_step(self, state: State, actions: Float[Array, "n t a"]) -> tuple[State, Transition]:
        """Traceable `step_chunk`."""


class Unroll(NamedTuple):
    """Experience of n envs in T chunks."""

    batch: PackedBatch
    """Observations, [T, n, ...]; `action_mask` says which numbers were executed."""
    drawn: SampledChunk
    reward: Float[Array, "t n"]
    """Sum over the executed steps of each chunk."""
    terminated: Bool[Array, "t n"]
    """The episode ended in this chunk."""
    truncated: Bool[Array, "t n"]
    """Its time ran out in this chunk; never true together with `terminated`."""
    following: Float[Array, "t n"]
    """Value of the observation after each chunk: 0 where the episode terminated; where time ran
    out, that of its last observation."""
    observed: Any
    """See `Experience.observed`."""


@dataclass(frozen=True)
class PolicyEnvs:
    """A policy over n envs at once. Every random draw derives only from (seed, the env's seed,
    episode, step), so an env does the same beside any other envs.

    Args:
      prompts: wordings of the goals of all of a run's tasks, so that their batches are alike; by
        default, the env's own.
      first_goal: index of the env's first goal among these.

    Raises:
      ValueError: the policy does not fit the environment, or an unroll has so many chunks that an
        env could run out of time twice during it.
    """

    env: Traceable
    policy: Policy
    config: RlConfig
    prompts: tuple[tuple[str, ...], ...] = ()
    first_goal: int = 0

    def __post_init__(self) -> None:
        replan_steps, chunks = self.config.rollout.replan_steps, self.config.colocated.unroll
        horizon = self.policy.model.config.horizon
        most = -(-self.env.max_steps // replan_steps)
        if not 1 <= replan_steps <= horizon:
            raise ValueError(
                f"rollout.replan_steps is {replan_steps}, but the policy's chunks have "
                f"{horizon} steps; give 1 to {horizon}."
            )
        if not 1 <= chunks <= most:
            raise ValueError(
                f"colocated.unroll is {chunks}, but an episode of {self.env.name} has at most "
                f"{most} chunks of {replan_steps} steps; give 1 to {most}."
            )
        self._robot.check_traced()

    def act(self, params: Params, state: State) -> tuple[State, Unroll]:
        """An unroll, traceable: scans over chunks and their steps."""

        def step(carry: Any, action: Float[Array, "n a"]) -> tuple[Any, Any]:
            return _held(carry, *self.env.pure_step(carry[0], action[:, None]))

        return self._acted(params, state, jax.lax.scan, self._look, step, self._settle)

    def act_stepwise(self, params: Params, state: State) -> tuple[State, Unroll]:
        """The same as `act`, not traceable but one compiled step at a time. A Python loop costs
        nothing on CPUs, where environments can then advance in groups on threads."""
        look, held, settle = self._compiled

        def step(carry: Any, action: Float[Array, "n a"]) -> tuple[Any, Any]:
            return held(carry, *self.env.step_chunk(carry[0], action[:, None]))

        return self._acted(params, state, _looped, look, step, settle)

    def _acted(
        self, params: Params, state: State, loop: Any, look: Any, step: Any, settle: Any
    ) -> tuple[State, Unroll]:
        def chunk(state: State, _: Any) -> tuple[State, Any]:
            told, drawn, observed, actions = look(params, state)
            running = (state, jnp.zeros(len(actions), bool))
            (state, _), steps = loop(step, running, jnp.swapaxes(actions, 0, 1))
            return state, (told, drawn, observed, steps)

        state, done = loop(chunk, state, jnp.arange(self.config.colocated.unroll))
        return state, settle(params, state, *done)

    def _look(
        self, params: Params, state: State
    ) -> tuple["_Told", SampledChunk, Any, Float[Array, "n t a"]]:
        """Observes the envs and draws the policy's chunks, in its own and the robot's units."""
        seen, told = self._see(state)
        model, observed = self.policy.model, None
        if self.config.learner.keep_observed:
            observed = flow_policy.observe(model, params, told.batch)
        keys = jax.vmap(jax.random.fold_in)(self._key(_NOISE, state), state.step)
        words = jax.random.key_data(keys)
        drawn = flow_policy.draw(model, params, told.batch, words, self.config.flow, observed)
        chunks = jnp.asarray(drawn.actions), jnp.asarray(seen.state)
        actions = self._robot.actions(*chunks)
        return told, drawn, observed, actions[:, : self.config.rollout.replan_steps]

    def _settle(
        self,
        params: Params,
        state: State,
        told: "_Told",
        drawn: SampledChunk,
        observed: Any,
        steps: "_Steps",
    ) -> Unroll:
        """Builds the unroll from the transitions of T chunks."""
        chunks, _, envs = steps.live.shape
        acted = steps.live.sum(1)
        place = (np.arange(chunks)[:, None], acted - 1, np.arange(envs))
        last: Transition = jax.tree.map(lambda x: x[place], steps.happened)
        late = (last.truncated.argmax(0), np.arange(envs))
        scene, felt, goal, wording = jax.tree.map(
            lambda x: x[late], (last.scene, last.state, told.goal, told.wording)
        )
        past = Observation(self.env.pure_pictures(scene), felt)
        sights = self._robot.batch(past, goal, wording), self._see(state)[1].batch
        both = jax.tree.map(lambda *x: jnp.concatenate(x), *sights)
        final, coming = jnp.split(flow_policy.value(self.policy.model, params, both), 2)
        following = jnp.concatenate([drawn.value[1:], coming[None]])
        following = jnp.where(last.truncated, final, following)
        mask = self._robot.acted(acted, drawn.actions.shape[2:])
        earned = reward_of(self.config.rollout.reward)(
            jnp.asarray(steps.happened.reward), steps.happened.terminated * 1.0
        )
        return Unroll(
            batch=replace(told.batch, action_mask=mask[:, :, None]),
            drawn=drawn,
            reward=(earned * steps.live).sum(1),
            terminated=last.terminated,
            truncated=last.truncated,
            following=jnp.where(last.terminated, 0, following),
            observed=observed,
        )

    def _see(self, state: State) -> tuple[Observation, "_Told"]:
        seen, goal = self.env.pure_observe(state), self.env.goal(state) + self.first_goal
        wording = jax.vmap(jax.random.uniform)(self._key(_WORDING, state))
        return seen, _Told(self._robot.batch(seen, goal, wording), goal, wording)

    def _key(self, what: int, state: State) -> Key[Array, " n"]:
        """Key of each env's running episode."""
        key = jax.random.fold_in(jax.random.key(self.config.seed), what)

        def one(seed: Array, episode: Array) -> Array:
            return jax.random.fold_in(jax.random.fold_in(key, seed), episode)

        return jax.vmap(one)(state.seed, state.episode)

    @cached_property
    def _robot(self) -> RobotPolicy:
        size = self.env.image_size
        robot = RobotPolicy.in_suite(self.policy, spec_of(self.env, (size, size)))
        return replace(robot, prompts=self.prompts or robot.prompts)

    @cached_property
    def _compiled(self) -> tuple[Any, Any, Any]:
        return jax.jit(self._look), jax.jit(_held), jax.jit(self._settle)


class _Told(NamedTuple):
    """The policy's inputs when it drew a chunk; `wording` in [0, 1) selects the prompt's."""

    batch: PackedBatch
    goal: Int[Array, " n"]
    wording: Float[Array, " n"]


class _Steps(NamedTuple):
    """Steps of a chunk: which counted (the episode had not ended before), and what happened."""

    live: Bool[Array, " n"]
    happened: Transition


def _held(
    before: tuple[State, Bool[Array, " n"]], after: State, happened: Transition
) -> tuple[tuple[State, Bool[Array, " n"]], _Steps]:
    """Takes a step, except in envs whose episode is over: they wait where the next one begins."""
    state, over = before
    happened = jax.tree.map(lambda x: x[:, 0], happened)
    ended = happened.terminated | happened.truncated
    return (restarted(over, state, after), over | ended), _Steps(~over, happened)


def _looped(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, each: Iterable[Any]
) -> tuple[Any, Any]:
    """`jax.lax.scan` as a Python loop."""
    parts = []
    for x in each:
        carry, part = step(carry, x)
        parts.append(part)
    return carry, jax.tree.map(lambda *part: np.stack(part), *parts)
