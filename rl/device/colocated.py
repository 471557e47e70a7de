"""Placement "colocated": environments and policy on the devices that learn. N envs (states of
traceable environments) act a number of chunks each, and micro-batches of these go to the learner.

Everything on the way stays on the devices. Each device has its share of the envs; an env acts the
same whichever device has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from models import Policy
from models.layers.functional import Params
from parallel.hosts.watchdog import alive
from parallel.mesh import check_rows, replicated, rows_sharding
from rl.config import RlConfig
from rl.device.unroll import PolicyEnvs, Traceable, Unroll
from rl.learner import FlowLearner
from rl.objectives import advantage_of
from rl.records import Experience
from sim.protocol import TRAIN_SEEDS, State

_SHUFFLE = 2
_ENVS = "envs"


class Outcomes(NamedTuple):
    """Sums over an unroll of one task's envs: episodes that ended and how many succeeded, control
    steps acted, and rewards."""

    episodes: Int[Array, ""]
    successes: Int[Array, ""]
    steps: Int[Array, ""]
    rewards: Array


@dataclass(frozen=True)
class Colocated:
    """A run's envs, an equal number for each task, on the devices of `mesh`.

    Raises:
      ValueError: the policy does not fit an environment, envs do not divide over tasks and devices,
        or unrolls are too long.
    """

    policy: Policy
    tasks: Sequence[Traceable]
    config: RlConfig
    mesh: Mesh

    def __post_init__(self) -> None:
        envs, parts = self.config.colocated.envs, len(self.tasks) * self.mesh.size
        if envs % parts:
            raise ValueError(
                f"colocated.envs is {envs}, which cannot be split evenly over {len(self.tasks)} "
                f"tasks and {self.mesh.size} devices; choose a multiple of {parts}."
            )
        check_rows(self.config.learner.micro, self.mesh)
        assert self._each  # checks the policy

    def begin(self) -> tuple[State, ...]:
        """Envs of each task at the beginning of their first episodes."""
        seeds = np.split(env_seeds(self.config), len(self.tasks))
        return tuple(
            jax.jit(env.pure_reset, out_shardings=self._split)(some)
            for env, some in zip(self.tasks, seeds, strict=True)
        )

    def step(
        self, learner: FlowLearner, envs: tuple[State, ...]
    ) -> tuple[tuple[State, ...], dict[str, Any], tuple[Outcomes, ...]]:
        """The envs after an unroll that the learner has learnt from, what `FlowLearner.update`
        returned, and the outcomes of each task.

        Raises:
          Diverged: see `FlowLearner.update`.
        """
        envs, parts, outcomes = self.act(learner.state.params, envs, learner.version)
        for part in parts:
            learner.add(part)
            alive()
        return envs, learner.update(), outcomes

    def act(
        self, params: Params, envs: tuple[State, ...], version: int
    ) -> tuple[tuple[State, ...], tuple[Experience, ...], tuple[Outcomes, ...]]:
        """The envs after an unroll, its decisions in micro-batches in an order that is drawn from
        `version` (the last may be padded with rows of weight 0), and the outcomes of each task.

        A single CPU advances envs in groups on threads, one compiled step at a time; other devices
        run a program for each task's unroll.
        """
        acted = [act(params, some) for act, some in zip(self._acts, envs, strict=True)]
        unrolls = tuple(unroll for _, unroll in acted)
        return (tuple(state for state, _ in acted), *self._divided(unrolls, np.int32(version)))

    @cached_property
    def _each(self) -> list[PolicyEnvs]:
        prompts = tuple(goal for env in self.tasks for goal in env.prompts)
        before = np.cumsum([0, *(len(env.prompts) for env in self.tasks)])
        return [
            PolicyEnvs(env, self.policy, self.config, prompts, int(first))
            for env, first in zip(self.tasks, before[:-1], strict=True)
        ]

    @cached_property
    def _split(self) -> NamedSharding:
        return NamedSharding(self._line, PartitionSpec(_ENVS))

    @cached_property
    def _line(self) -> Mesh:
        """The devices in a line: on a mesh with the learner's axes, a model would share its rows
        out once more."""
        return Mesh(self.mesh.devices.reshape(-1), (_ENVS,))

    @cached_property
    def _acts(self) -> list[Any]:
        if self.mesh.size == 1 and jax.default_backend() == "cpu":
            return [some.act_stepwise for some in self._each]
        apart = partial(
            jax.shard_map,
            mesh=self._line,
            in_specs=(PartitionSpec(), PartitionSpec(_ENVS)),
            out_specs=(PartitionSpec(_ENVS), PartitionSpec(None, _ENVS)),
            check_vma=False,
        )
        return [jax.jit(apart(some.act)) for some in self._each]

    @cached_property
    def _divided(self) -> Any:
        rows, whole = rows_sharding(self.mesh), replicated(self.mesh)
        return jax.jit(self._experience, out_shardings=(rows, whole))

    def _experience(
        self, unrolls: tuple[Unroll, ...], version: Int[Array, ""]
    ) -> tuple[tuple[Experience, ...], tuple[Outcomes, ...]]:
        config = self.config
        each = [self._worth(unroll, version) for unroll in unrolls]
        together = jax.tree.map(lambda *parts: jnp.concatenate(parts), *each)
        key = jax.random.fold_in(jax.random.key(config.seed), _SHUFFLE)
        count, micro = len(together.advantage), config.learner.micro
        order = jax.random.permutation(jax.random.fold_in(key, version), count)
        order = jnp.append(order, jnp.repeat(order[:1], -count % micro))
        real = (jnp.arange(len(order)) < count).astype(jnp.float32)
        drawn = replace(jax.tree.map(lambda x: x[order], together), weight=real)
        parts = [
            jax.tree.map(lambda x, at=at: x[at : at + micro], drawn)
            for at in range(0, len(order), micro)
        ]
        return tuple(parts), tuple(map(_outcomes, unrolls))

    def _worth(self, unroll: Unroll, version: Int[Array, ""]) -> Experience:
        """Decisions along one axis, with their advantages."""
        chosen = self.config.objective
        on_device = advantage_of(chosen).on_device
        assert on_device is not None  # as the config has checked
        ended = unroll.terminated | unroll.truncated
        advantage = on_device(unroll.reward, unroll.drawn.value, unroll.following, ended, chosen)

        def flat(x: Array) -> Array:
            return x.reshape(advantage.size, *x.shape[2:])

        return Experience(
            batch=jax.tree.map(flat, unroll.batch),
            drawn=jax.tree.map(flat, unroll.drawn),
            advantage=flat(advantage),
            target=flat(advantage + unroll.drawn.value),
            version=jnp.full(advantage.size, version),
            weight=jnp.ones(advantage.size),
            observed=jax.tree.map(flat, unroll.observed),
        )


def env_seeds(config: RlConfig) -> UInt32[np.ndarray, " n"]:
    """Seeds of each env's episodes; none is one that policies are evaluated on."""
    envs = range(config.colocated.envs)
    seeds = [np.random.default_rng((config.seed, i)).integers(TRAIN_SEEDS.stop) for i in envs]
    return np.array(seeds, np.uint32)


def _outcomes(unroll: Unroll) -> Outcomes:
    return Outcomes(
        episodes=jnp.sum(unroll.terminated | unroll.truncated),
        successes=jnp.sum(unroll.terminated),
        steps=jnp.sum(unroll.batch.action_mask.any(-1)),
        rewards=jnp.sum(unroll.reward),
    )
