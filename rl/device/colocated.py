"""Placement "colocated": environments, policy and learner in one device program.

N envs (states of one traceable environment) act a number of chunks each, and the policy learns from
all of them by PPO; nothing leaves the device. Everything that a run carries from one step to the
next is one tree, so a run resumes exactly.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int, UInt32

from models import Policy
from models.layers.functional import Params, fill, only
from parallel.optimizer import make_optimizer, select
from rl import flow_policy
from rl.checks import check_kept, check_named
from rl.config import RlConfig
from rl.device.unroll import PolicyEnvs, Traceable, Unroll
from rl.objectives import Terms, advantage_of
from rl.records import Experience
from rl.step import loss_terms
from sim.protocol import TRAIN_SEEDS, State

_SHUFFLE = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColocatedState:
    """Everything that a run carries; `step` counts the learner's steps. Random draws derive from
    `step` and from the episodes in `envs`, so there is nothing else to keep."""

    step: Int[Array, ""]
    params: Params
    """Parameters made by `rl.flow_policy.init`."""
    opt_state: Any
    envs: State


class Colocated:
    """One run's program.

    Raises:
      ValueError: the policy does not fit the environment, or the configuration asks for advantages
        that this placement cannot compute, or for unrolls that are too long.
    """

    def __init__(self, policy: Policy, env: Traceable, config: RlConfig) -> None:
        check_named(config)
        self._env, self._model, self._config = env, policy.model, config
        self._envs = PolicyEnvs(env, policy, config)
        updates = config.learner_steps * config.learner.epochs * config.learner.minibatches
        optimizer = config.learner.optimizer
        self._optimizer = replace(optimizer, decay_steps=optimizer.decay_steps or updates)
        self._transformation = make_optimizer(self._optimizer)

    def init(self, params: Params) -> ColocatedState:
        """The initial state of a run with these parameters, which are not consumed.

        Raises:
          ValueError: as `check_kept`.
        """
        check_kept(self._model, params, self._config.learner)
        params = jax.tree.map(jnp.array, params)
        trained = only(params, select(self._optimizer, params)[1])
        envs = jax.jit(self._env.pure_reset)(env_seeds(self._config))
        return ColocatedState(jnp.int32(0), params, self._transformation.init(trained), envs)

    def step(self, state: ColocatedState) -> tuple[ColocatedState, dict[str, Array]]:
        """Makes an unroll and learns from it; the given state is consumed.

        One program on accelerators; `stepwise` on CPUs. Metrics are scalars: means over the updates
        (`weight_mean`, `clip_fraction`, `behaviour_kl`, `loss`, `value_loss`, `grad_norm`), and of
        the unroll, `episodes` that ended, their `successes`, control `steps` acted, `advantage_rms`
        and `explained_variance`. Metrics that placement "host" has too are named as there. `finite`
        is false if an update's loss or gradient was not finite; that update was not made.
        """
        return self.stepwise(state) if jax.default_backend() == "cpu" else self.whole(state)

    def stepwise(self, state: ColocatedState) -> tuple[ColocatedState, dict[str, Array]]:
        """`step` as one program that learns, after others that act."""
        envs, unroll = self._envs.act_stepwise(state.params, state.envs)
        return self._learn(replace(state, envs=envs), unroll)

    @cached_property
    def whole(self) -> Any:
        """`step` as one program."""

        def step(state: ColocatedState) -> tuple[ColocatedState, dict[str, Array]]:
            envs, unroll = self._envs.act(state.params, state.envs)
            return self._learnt(replace(state, envs=envs), unroll)

        return jax.jit(step, donate_argnums=0)

    @cached_property
    def _learn(self) -> Any:
        return jax.jit(self._learnt, donate_argnums=0)

    def _learnt(
        self, state: ColocatedState, unroll: Unroll
    ) -> tuple[ColocatedState, dict[str, Array]]:
        config = self._config
        experience = self._experience(state, unroll)
        learns = state.step >= config.colocated.warmup
        key = jax.random.fold_in(jax.random.key(config.seed), _SHUFFLE)
        key = jax.random.fold_in(key, state.step)

        def update(carry: Any, rows: Int[Array, " b"]) -> tuple[Any, dict[str, Array]]:
            params, opt_state = carry
            part = jax.tree.map(lambda x: x[rows], experience)
            return self._update(params, opt_state, part, learns)

        def epoch(carry: Any, number: Int[Array, ""]) -> tuple[Any, dict[str, Array]]:
            order = jax.random.permutation(
                jax.random.fold_in(key, number), len(experience.advantage)
            )
            rows = order.reshape(config.learner.minibatches, -1)
            return jax.lax.scan(update, carry, rows)

        (params, opt_state), metrics = jax.lax.scan(
            epoch, (state.params, state.opt_state), jnp.arange(config.learner.epochs)
        )
        after = ColocatedState(state.step + 1, params, opt_state, state.envs)
        finite = {"finite": metrics.pop("finite").all()}
        return after, jax.tree.map(jnp.mean, metrics) | finite | _outcomes(unroll, experience)

    def _experience(self, state: ColocatedState, unroll: Unroll) -> Experience:
        """Decisions along one axis, with advantages in units of their root mean square."""
        chosen = self._config.objective
        on_device = advantage_of(chosen).on_device
        assert on_device is not None  # as the config has checked
        ended = unroll.terminated | unroll.truncated
        advantage = on_device(unroll.reward, unroll.drawn.value, unroll.following, ended, chosen)
        scale = jnp.sqrt(jnp.mean(advantage**2)) + 1e-8

        def flat(x: Array) -> Array:
            return x.reshape(advantage.size, *x.shape[2:])

        return Experience(
            batch=jax.tree.map(flat, unroll.batch),
            drawn=jax.tree.map(flat, unroll.drawn),
            advantage=flat(advantage / scale),
            target=flat(advantage + unroll.drawn.value),
            version=jnp.full(advantage.size, state.step),
            weight=jnp.ones(advantage.size),
            observed=jax.tree.map(flat, unroll.observed),
        )

    def _update(
        self, params: Params, opt_state: Any, part: Experience, learns: Bool[Array, ""]
    ) -> tuple[tuple[Params, Any], dict[str, Array]]:
        """Parameters and optimizer state after an update, which changes only the value head unless
        the policy `learns`. They stay unchanged if loss or gradient is not finite."""
        moving, trained = select(self._optimizer, params)

        def loss(wanted: Params) -> tuple[Array, Terms]:
            found = flow_policy.log_prob(
                self._model,
                fill(wanted, params),
                part.batch,
                part.drawn,
                part.observed,
                self._config.flow,
            )
            # the policy that acted is also the proximal one: the step began with it
            behaviour = jnp.asarray(part.drawn.log_prob)
            terms = loss_terms(self._config.objective, found, part, part.version, behaviour)
            return terms.loss / terms.weight, terms

        (total, terms), gradient = jax.value_and_grad(loss, has_aux=True)(only(params, moving))
        gradient, old = _taken(only(gradient, trained), learns), only(params, trained)
        updates, moved = self._transformation.update(gradient, opt_state, old)
        norm = optax.tree_utils.tree_norm(gradient)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        after = fill(optax.apply_updates(old, _taken(updates, learns)), params), moved
        metrics = {
            "finite": finite,
            "loss": total,
            "value_loss": terms.sums["value_loss"] / terms.weight,
            "weight_mean": terms.sums["importance"] / terms.sums["ratios"],
            "clip_fraction": terms.sums["clipped"] / terms.sums["ratios"],
            "behaviour_kl": terms.sums["behaviour_kl"] / terms.sums["ratios"],
            "grad_norm": norm,
        }
        before = params, opt_state
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), after, before), metrics


def env_seeds(config: RlConfig) -> UInt32[np.ndarray, " n"]:
    """Seeds of each env's episodes; none is one that policies are evaluated on."""
    envs = range(config.colocated.envs)
    seeds = [np.random.default_rng((config.seed, i)).integers(TRAIN_SEEDS.stop) for i in envs]
    return np.array(seeds, np.uint32)


def _taken(tree: Params, learns: Bool[Array, ""]) -> Params:
    """Gradients or updates with 0 for all but the value head, unless the policy `learns`."""
    taken = jax.tree.map(lambda x: jnp.where(learns, x, jnp.zeros_like(x)), tree)
    return taken | {"value": tree["value"]}


def _outcomes(unroll: Unroll, experience: Experience) -> dict[str, Array]:
    value, target = unroll.drawn.value.reshape(-1), experience.target
    surprise = target - value
    return {
        "episodes": jnp.sum(unroll.terminated | unroll.truncated),
        "successes": jnp.sum(unroll.terminated),
        "steps": jnp.sum(experience.acted.any(-1)),
        "advantage_rms": jnp.sqrt(jnp.mean(surprise**2)),
        "explained_variance": 1 - jnp.var(surprise) / (jnp.var(target) + 1e-8),
    }
