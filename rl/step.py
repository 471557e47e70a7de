"""A learner's step as pure functions: its state, gradient sums over micro-batches, and the update
that divides them once. `rl.learner` compiles them separately, for experience that arrives in parts;
a program that both acts and learns includes all of them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from models.inputs.packed_batch import PackedBatch
from models.layers.float8 import fp8
from models.layers.functional import fill, only
from models.sharding import Rules
from parallel.mesh import replicated
from parallel.optimizer import OptimizerConfig, at_step, select
from parallel.step import Metrics, TrainState, abstract_state_of, apply_gradients, state_from
from rl.config import LearnerConfig
from rl.objectives import (
    ObjectiveConfig,
    Terms,
    advantage_of,
    combine,
    objective,
    summary,
    value_loss,
)
from rl.records import Experience, SampledChunk

Params = Any
LogProb = Callable[
    [Params, PackedBatch, SampledChunk, Any],
    tuple[Float[Array, "n h a"], Float[Array, " n"], Float[Array, " n"]],
]
"""Function that returns log π of the numbers drawn, the value head's estimate, and an entropy for
each decision; it takes `Experience.observed` where that is kept."""

_KEPT = 0.9
"""Decay of the running scale of advantages, from step to step."""


class Scale(NamedTuple):
    """Running mean square of advantages: `square` / `weight`, both 0 before the first step."""

    square: Float[Array, ""]
    weight: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerState(TrainState):
    """Everything that a learner carries from step to step.

    `version` counts the learner's steps, and `step` the updates planned for them: a step that made
    fewer updates still ends where the next begins.
    """

    version: Int[Array, ""]
    scale: Scale


class Total(NamedTuple):
    """Sums over the micro-batches so far; None for the gradients of parameters that do not move."""

    terms: Terms
    gradients: Params


def planned_updates(epochs: int, minibatches: int) -> int:
    """Updates of a learner's step; one with fewer micro-batches than `minibatches` makes fewer."""
    return 1 + (epochs - 1) * minibatches


def optimizer_of(config: LearnerConfig, steps: int) -> OptimizerConfig:
    """The optimizer of a run of `steps` learner's steps; a schedule with no end of its own ends
    with the run."""
    chosen = config.optimizer
    updates = steps * planned_updates(config.epochs, config.minibatches)
    return replace(chosen, decay_steps=chosen.decay_steps or updates)


def abstract_learner_state(
    params: Params, optimizer: OptimizerConfig, rules: Rules | Mapping[str, Rules], mesh: Mesh
) -> LearnerState:
    """The state as ShapeDtypeStructs with shardings, to begin from or to restore into.

    Args:
      params: arrays or ShapeDtypeStructs.
      rules: as in `abstract_state_of`.

    Raises:
      ValueError: a parameter does not match exactly one rule or none of the optimizer's rates, or
        does not divide over the mesh.
    """
    train = abstract_state_of(params, optimizer, rules, mesh)
    number: Any = partial(jax.ShapeDtypeStruct, (), sharding=replicated(mesh))
    scale = Scale(number(jnp.float32), number(jnp.float32))
    return _joined(train, number(jnp.int32), scale)


def learner_state(
    params: Params, optimizer: OptimizerConfig, abstract: LearnerState
) -> LearnerState:
    """A state that begins with the parameters given (f32, in the shardings of `abstract`)."""
    train = TrainState(abstract.step, abstract.params, abstract.ema, abstract.opt_state)
    fresh = abstract.version, abstract.scale
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), fresh),
        out_shardings=jax.tree.map(lambda x: x.sharding, fresh),
    )()
    return _joined(state_from(params, optimizer, train), *zeros)


def scale_of(scale: Scale) -> Float[Array, ""]:
    """Root of the running mean square; 1 before the first step."""
    known = scale.square > 0
    return jnp.sqrt(jnp.where(known, scale.square, 1) / jnp.where(known, scale.weight, 1))


def metrics_of(terms: Terms) -> dict[str, float]:
    """`objectives.summary`, with `advantage_rms` (before scaling) and, where there is a value head,
    `explained_variance`, the share of the targets' variance that it accounts for."""
    read = summary(terms)
    read["advantage_rms"] = math.sqrt(read.pop("advantage_squared"))
    if "value_loss" in read:
        variance = read.pop("target_squared") - read.pop("target") ** 2
        error = 2 * read["value_loss"]
        read["explained_variance"] = 1 - error / variance if variance > 0 else 0.0
    return read


def loss_terms(
    config: ObjectiveConfig,
    found: tuple[Float[Array, "n h a"], Float[Array, " n"], Float[Array, " n"]],
    experience: Experience,
    version: Int[Array | np.ndarray, "*n"],
    proximal: Float[Array, "n h a"] | None,
) -> Terms:
    """`rl.objectives.objective`, plus `value_weight` times half the squared error of values, if
    advantages are computed from these, minus `entropy_weight` times the entropy; all summed.

    Args:
      found: result of `LogProb` for the experience.
      version: of the policy that learns.
      proximal: as in `objective`.
    """
    log_prob, value, entropy = found
    target, weight = experience.target, experience.weight
    terms = objective(
        config,
        log_prob,
        experience.drawn.log_prob,
        experience.advantage,
        experience.acted,
        weight,
        version - experience.version,
        proximal,
    )
    sums = terms.sums | {"entropy": jnp.sum(entropy * weight)}
    loss = terms.loss - config.entropy_weight * sums["entropy"]
    if advantage_of(config).values:
        sums["value_loss"] = value_loss(value, target, weight)
        sums["target"] = jnp.sum(target * weight)
        sums["target_squared"] = jnp.sum(target**2 * weight)
        loss += config.value_weight * sums["value_loss"]
    return terms._replace(loss=loss, sums=sums)


@dataclass(frozen=True)
class StepFunctions:
    """Shared functions of a step. The loss is that of `loss_terms`. Advantages from values are
    divided by `scale_of` the steps before; group advantages are used as they are. The learning
    rate's schedule advances by `updates` in each step, however many updates were made. In the first
    `warmup` steps only the value head changes.
    """

    log_prob: LogProb
    optimizer: OptimizerConfig
    objective: ObjectiveConfig
    updates: int = 1
    warmup: int = 0

    def zeros(self, params: Params, experience: Experience) -> Total:
        """Sums of nothing; the experience gives only shapes."""
        moving, _ = select(self.optimizer, params)
        gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), only(params, moving))
        scale, version = Scale(jnp.float32(0), jnp.float32(0)), jnp.int32(0)
        given = experience, jnp.asarray(experience.drawn.log_prob), True
        shapes = jax.eval_shape(self._loss, params, params, version, scale, *given)[1][0]
        return Total(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), gradients)

    def add(
        self,
        state: LearnerState,
        total: Total,
        experience: Experience,
        proximal: Float[Array, "n h a"],
        first: Bool[Array, ""],
    ) -> tuple[Total, Float[Array, "n h a"], Bool[Array, ""]]:
        """Adds a micro-batch to the sums. Returns the sums; log π of the micro-batch's numbers,
        which is the proximal policy's for the step's later epochs; and whether the micro-batch's
        own loss and gradient are finite.

        Args:
          proximal: log π of the proximal policy.
          first: in the first epoch, whose policy is the proximal one, `proximal` does not count.
        """
        wanted = only(state.params, select(self.optimizer, state.params)[0])
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (terms, log_prob)), gradients = gradient(
            wanted, state.params, state.version, state.scale, experience, proximal, first
        )
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree_utils.tree_norm(gradients))
        summed = Total(combine(total.terms, terms), fp8.add(total.gradients, gradients))
        return summed, log_prob, finite

    def update(
        self,
        state: LearnerState,
        total: Total,
        placed: Params,
        worth: Float[Array, ""],
        last: Bool[Array, ""],
    ) -> tuple[LearnerState, Metrics]:
        """The state after an update from the sums, and the metrics of `apply_gradients`; the state
        stays unchanged if these are not finite.

        Args:
          placed: the parameters' shardings.
          worth: the step's mean squared advantage.
          last: in the step's last update, which makes a new version.
        """
        terms, version, scale = total.terms, state.version, state.scale
        gradients, learns = total.gradients, version >= self.warmup
        if self.warmup:
            gradients = _of_value(gradients, jax.tree.map(jnp.zeros_like, gradients), learns)
        train, metrics = apply_gradients(
            state, terms.loss, terms.weight, gradients, self.optimizer, placed
        )
        if self.warmup:  # decay and averages must not move the rest either
            params = _of_value(train.params, state.params, learns)
            train = replace(train, params=params, ema=_of_value(train.ema, state.ema, learns))
        version, kept = version + last, 1 - _KEPT
        ended = (version * self.updates).astype(train.step.dtype)
        step = jnp.where(last, ended, train.step)
        train = replace(train, step=step, opt_state=at_step(train.opt_state, step))
        now = Scale(_KEPT * scale.square + kept * worth, _KEPT * scale.weight + kept)
        new = _joined(train, version, jax.tree.map(partial(jnp.where, last), now, scale))
        return jax.tree.map(lambda x, y: jnp.where(metrics["finite"], x, y), new, state), metrics

    def _loss(
        self,
        wanted: Params,
        params: Params,
        version: Int[Array, ""],
        scale: Scale,
        experience: Experience,
        proximal: Float[Array, "n h a"],
        first: Bool[Array, ""] | bool,
    ) -> tuple[Float[Array, ""], tuple[Terms, Float[Array, "n h a"]]]:
        """Loss sum; its terms and log π."""
        found = self.log_prob(
            fill(wanted, params), experience.batch, experience.drawn, experience.observed
        )
        proximal = jnp.where(first, jax.lax.stop_gradient(found[0]), proximal)
        worth = experience.advantage
        from_values = advantage_of(self.objective).values
        scaled = replace(experience, advantage=worth / scale_of(scale) if from_values else worth)
        terms = loss_terms(self.objective, found, scaled, version, proximal)
        square = jnp.sum(worth**2 * experience.weight)
        terms = terms._replace(sums=terms.sums | {"advantage_squared": square})
        return terms.loss, (terms, jax.lax.stop_gradient(found[0]))


def _of_value(after: Params, before: Params, learns: Bool[Array, ""]) -> Params:
    """`after`, but only for the value head unless the policy `learns`."""
    kept = jax.tree.map(lambda x, y: jnp.where(learns, x, y), after, before)
    return kept | {"value": after["value"]}


def _joined(train: TrainState, version: Any, scale: Any) -> LearnerState:
    return LearnerState(train.step, train.params, train.ema, train.opt_state, version, scale)
