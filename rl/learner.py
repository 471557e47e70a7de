"""The learner: gradients of micro-batches are summed as they arrive and divided once, so a step's
update is that of its whole batch, whatever the order of arrival.

The caller decides what it learns from; with fresh experience and one micro-batch per step, it is
the synchronous learner. Nothing that it needs waits for the whole batch: advantages are scaled by
their size in earlier steps, and before a step's first update the policy is its own proximal policy.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce, wraps
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Bool, Float

from models import Policy
from models.inputs.packed_batch import PackedBatch
from models.layers.functional import only
from models.model import rules_of
from models.sharding import WHOLE
from parallel.hosts.agreement import agree
from parallel.hosts.distributed import host_count, put_batch
from parallel.mesh import replicated, rows_sharding
from parallel.optimizer import OptimizerConfig, select
from parallel.step import OVERLAP
from rl import flow_policy
from rl.checks import check_kept
from rl.config import LearnerConfig, RlConfig
from rl.objectives import ObjectiveConfig, Terms, advantage_of, combine
from rl.records import Experience
from rl.step import (
    LearnerState,
    LogProb,
    StepFunctions,
    Total,
    abstract_learner_state,
    learner_state,
    metrics_of,
    optimizer_of,
    planned_updates,
)


class Diverged(ArithmeticError):
    """The gradient of a step is not finite."""


class _Added(NamedTuple):
    """A micro-batch of the step, for its later epochs: on the host, or on the devices if observed
    results are kept too."""

    tickets: tuple[int, ...]
    finite: Bool[Array, ""]
    experience: Experience | None
    proximal: Float[Array, "n h a"] | None


def begin_learner(policy: Policy, config: RlConfig, mesh: Mesh) -> "FlowLearner":
    """The learner of a run that begins from this policy (f32, on the host or any device): its
    parameters, sharded as the model's rules say, get the heads that the config asks for.

    Raises:
      ValueError: as `FlowLearner` and `check_kept`.
    """
    model, learning = policy.model, config.learner
    optimizer = optimizer_of(learning, config.learner_steps)
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    values = advantage_of(config.objective).values
    params = flow_policy.init(model, policy.params, key, config.flow, value=values)
    check_kept(model, params, learning)
    rules = dict.fromkeys(params, WHOLE) | {"policy": rules_of(model)}
    abstract = abstract_learner_state(params, optimizer, rules, mesh)
    params = jax.tree.map(_placed, params, abstract.params)
    return FlowLearner(
        partial(flow_policy.log_prob, model, config=config.flow),
        learner_state(params, optimizer, abstract),
        optimizer,
        config.objective,
        learning,
        mesh,
        partial(flow_policy.observe, model) if learning.keep_observed else None,
    )


def saved(state: LearnerState) -> dict[str, Any]:
    """The state as checkpoints hold it: the acting policy where every other run has it, its
    parameters before averaging, and the rest."""
    heads = [
        {name: x for name, x in tree.items() if name != "policy"}
        for tree in (state.params, state.ema)
    ]
    rest = replace(state, params=heads[0], ema=heads[1])
    return {"ema": state.ema["policy"], "params": state.params["policy"], "rl": rest}


def restored(tree: dict[str, Any]) -> LearnerState:
    """The state that `saved` took apart."""
    rest = tree["rl"]
    return replace(
        rest,
        params={"policy": tree["params"], **rest.params},
        ema={"policy": tree["ema"], **rest.ema},
    )


class FlowLearner:
    """Learns step by step: `add` a step's micro-batches as they arrive, then `update`.

    Only one thread may feed it. Save `state`, after an update and before the next `add`. The next
    update consumes its arrays, so copy parameters before you publish them.

    `version` is the number of steps that the policy has learnt. Decisions are counted: those added
    are `learnt` or `pending`, at any time.

    On several hosts, each host brings rows of its own, in micro-batches of the same shapes. Hosts
    update together, and a host with fewer micro-batches repeats its last one with weight 0. V-trace
    needs a single host, because several hosts would have to evaluate in lockstep.

    Args:
      log_prob: differentiable and pure, see `LogProb`.
      state: from `learner_state`, or restored.
      optimizer: that of the state, from `optimizer_of`.
      config: its epochs are passes over each step's experience, with the advantages and the
        proximal policy of the step's beginning. A minibatch is some of the step's micro-batches,
        drawn again for each epoch; if there are fewer micro-batches, each is a minibatch.
      mesh: that of the state; rows are split over its data and fsdp axes.
      observe: computes the part of a micro-batch that does not change as the policy learns, rows
        first. This is done once, unless the experience has it already, and the result is kept on
        the devices for the later epochs. If None, `log_prob` computes everything again.

    Raises:
      ValueError: the configuration makes no sense.
    """

    def __init__(
        self,
        log_prob: LogProb,
        state: LearnerState,
        optimizer: OptimizerConfig,
        objective: ObjectiveConfig,
        config: LearnerConfig,
        mesh: Mesh,
        observe: Callable[[Any, PackedBatch], Any] | None = None,
    ) -> None:
        if advantage_of(objective).reevaluated and host_count() > 1:
            raise ValueError(
                f"objective.name is '{objective.name}', whose advantages need a single host, but "
                f"this run has {host_count()} hosts; choose 'decoupled' or 'tis'."
            )
        self.state, self.optimizer = state, optimizer
        self.learnt = self.pending = 0
        self._mesh = mesh
        updates = planned_updates(config.epochs, config.minibatches)
        self._step = StepFunctions(log_prob, optimizer, objective, updates, config.warmup)
        self._epochs, self._minibatches = config.epochs, config.minibatches
        self._observe = observe if config.epochs > 1 else None
        self.version = int(state.version)
        self._lags: list[np.ndarray] = []
        self._added: list[_Added] = []
        self._last: Experience | None = None
        self._total: Total | None = None
        self._failed: Diverged | None = None
        self._compile()

    def resume(self, state: LearnerState) -> None:
        """Continues from another state of the same shapes and shardings; nothing may be pending."""
        self.state, self.version = state, int(state.version)

    def add(self, experience: Experience, tickets: Sequence[int] = ()) -> None:
        """Adds a micro-batch's gradient to the step's; returns before it is computed.

        Args:
          experience: this host's rows; those of weight 0 are padding.
          tickets: tickets of these decisions, which are named if the gradient is not finite.

        Raises:
          ValueError: the rows do not divide over the mesh.
        """
        self._check_going()
        rows = np.asarray(experience.weight) > 0
        lags = self.version - np.asarray(experience.version)[rows]
        if lags.min(initial=0) < 0:
            raise ValueError(
                f"Tickets {_named(tickets)} were sampled by policy version "
                f"{self.version - lags.min()}, but the learner is at version {self.version}; "
                f"give it the state that sampled them."
            )
        placed = put_batch(experience, self._mesh)
        if self._observe is not None and placed.observed is None:
            placed = replace(placed, observed=self._observe(self.state.params, placed.batch))
        proximal, finite = self._sum(placed, None)
        kept = experience if self._observe is None else placed
        again = (kept, proximal) if self._epochs > 1 else (None, None)
        self._added.append(_Added(tuple(tickets), finite, *again))
        self._lags.append(lags)
        self._last = experience
        self.pending += len(lags)

    def update(self) -> dict[str, Any]:
        """Learns from what was added since the last update; returns metrics.

        The metrics are `step.metrics_of` the last epoch, `grad_norm` (before clipping) and
        `learning_rate` of its last update, `decisions`, the number that all hosts brought, and
        `lags`, the numbers of these that had lag 0, 1, ….

        Raises:
          ValueError: nothing was added, on this host or another.
          Diverged: the gradient is not finite; names step and tickets. The state is that before the
            update, the decisions stay pending, and this learner learns no more.
        """
        self._check_going()
        lags = self._even_out()
        if self._total is None:
            raise ValueError(
                f"Step {self.version} has no decisions to learn from; add its micro-batches first."
            )
        worth, metrics, terms = self._descend(self._added, None, last=self._epochs == 1)
        for epoch in range(1, self._epochs):
            parts, found = self._shuffled(epoch), list[Terms]()
            for i, part in enumerate(parts):
                self._replay(part)
                last = epoch == self._epochs - 1 and i == len(parts) - 1
                _, metrics, terms = self._descend(part, worth, last)
                found.append(terms)
            terms = reduce(combine, found)
        metrics = metrics_of(terms) | metrics | {"decisions": sum(lags), "lags": lags}
        self.learnt, self.pending = self.learnt + self.pending, 0
        self.version += 1
        self._added, self._lags, self._last = [], [], None
        return metrics

    def evaluate(
        self, experience: Experience
    ) -> tuple[Float[np.ndarray, "n h a"], Float[np.ndarray, " n"]]:
        """log π and values of the policy as it is, for V-trace (`experience.micro_batches`)."""
        log_prob, value = self._evaluate(self.state.params, put_batch(experience, self._mesh))
        return np.asarray(log_prob), np.asarray(value)

    def _descend(
        self, parts: Sequence[_Added], worth: Array | None, last: bool
    ) -> tuple[Array, dict[str, Any], Terms]:
        """Updates from the sums of these micro-batches. Returns the mean squared advantage of the
        step (`worth`, or theirs), metrics and terms."""
        assert self._total is not None
        first = worth is None
        worth = self._nothing if worth is None else worth
        found = self._update(self.state, self._total, worth, np.bool_(first), np.bool_(last))
        self.state, worth, metrics, terms = found
        self._total = None
        read = {name: value.item() for name, value in jax.device_get(metrics).items()}
        if not read.pop("finite"):
            self._failed = self._diverged(parts, read)
            raise self._failed
        return worth, read, terms

    def _shuffled(self, epoch: int) -> list[list[_Added]]:
        """The step's minibatches, the same on every host, as all have the same number of parts."""
        order = np.random.default_rng((self.version, epoch)).permutation(len(self._added))
        parts = np.array_split(order, min(self._minibatches, len(order)))
        return [[self._added[i] for i in sorted(part)] for part in parts]

    def _sum(
        self, placed: Experience, proximal: Float[Array, "n h a"] | None
    ) -> tuple[Float[Array, "n h a"], Bool[Array, ""]]:
        """Adds a micro-batch's gradient; see `StepFunctions.add` for what it returns."""
        total = self._zeros(self.state.params, placed) if self._total is None else self._total
        known = placed.drawn.log_prob if proximal is None else proximal
        first = np.bool_(proximal is None)
        self._total, log_prob, finite = self._add(self.state, total, placed, known, first)
        return log_prob, finite

    def _replay(self, parts: list[_Added]) -> None:
        """Adds these micro-batches again."""
        for i, added in enumerate(parts):
            kept: Any = added.experience
            placed = put_batch(kept, self._mesh) if self._observe is None else kept
            _, finite = self._sum(placed, added.proximal)
            parts[i] = added._replace(finite=finite)

    def _even_out(self) -> list[int]:
        """Makes the numbers of micro-batches equal on all hosts, and returns how many of all
        decisions had lag 0, 1, …; ValueError if a host has none."""
        lags = np.bincount(np.concatenate([np.zeros(0, int), *self._lags])).tolist()
        if host_count() == 1:
            return lags

        def joined(brought: list[str]) -> str:
            counts, found = zip(*map(json.loads, brought), strict=True)
            most = max(counts) if min(counts) else 0
            return json.dumps([most, [sum(x) for x in zip_longest(*found, fillvalue=0)]])

        told = agree("micro-batches", json.dumps([len(self._added), lags]), joined)
        wanted, lags = json.loads(told)
        if not wanted or self._last is None:
            raise ValueError(
                f"Step {self.version} has no decisions on at least one host; give each of "
                f"{host_count()} hosts at least one ticket a step."
            )
        nothing = replace(self._last, weight=np.zeros_like(self._last.weight))
        while len(self._added) < wanted:
            self.add(nothing)
        return lags

    def _diverged(self, parts: Sequence[_Added], metrics: dict[str, float]) -> "Diverged":
        flags = [bool(flag) for flag in jax.device_get([part.finite for part in parts])]
        bad = [part.tickets for part, sound in zip(parts, flags, strict=True) if not sound]
        suspects = bad or [part.tickets for part in parts]
        named = _named([ticket for tickets in suspects for ticket in tickets])
        return Diverged(
            f"Step {self.version} has loss {metrics['loss']} and gradient norm "
            f"{metrics['grad_norm']}; the gradients of {len(bad)} of {len(flags)} micro-batches "
            f"are not finite. This update was not made; check tickets {named}, and lower "
            "learner.optimizer.learning_rate."
        )

    def _check_going(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _compile(self) -> None:
        mesh, step = self._mesh, self._step
        placed: Any = jax.tree.map(lambda x: x.sharding, self.state)
        rows, whole = rows_sharding(mesh), replicated(mesh)
        moving, _ = select(step.optimizer, self.state.params)
        gradients = only(placed.params, moving)
        total: Any = Total(*[whole, gradients])
        options = OVERLAP.get(mesh.devices.flat[0].platform)

        def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
            @wraps(function)
            def under_mesh(*args: Any) -> Any:
                with use_abstract_mesh(mesh.abstract_mesh):
                    return function(*args)

            return jax.jit(under_mesh, compiler_options=options, **how)

        def update(
            state: LearnerState, total: Total, worth: Array, first: Array, last: Array
        ) -> tuple[Any, ...]:
            own = total.terms.sums["advantage_squared"] / total.terms.weight
            worth = jnp.where(first, own, worth)
            new, metrics = step.update(state, total, placed.params, worth, last)
            return new, worth, metrics, total.terms

        def evaluate(params: Any, experience: Experience) -> tuple[Array, Array]:
            return step.log_prob(params, experience.batch, experience.drawn, None)[:2]

        # a number of the host would have `update` compiled once more
        self._nothing = jax.jit(lambda: jnp.float32(0), out_shardings=whole)()
        self._zeros = compiled(step.zeros, in_shardings=(placed.params, rows), out_shardings=total)
        self._add = compiled(
            step.add,
            donate_argnums=1,
            in_shardings=(placed, total, rows, rows, whole),
            out_shardings=(total, rows, whole),
        )
        self._update = compiled(
            update,
            donate_argnums=0,
            in_shardings=(placed, total, whole, whole, whole),
            out_shardings=(placed, whole, whole, whole),
        )
        if self._observe is not None:
            self._observe = compiled(
                self._observe, in_shardings=(placed.params, rows), out_shardings=rows
            )
        self._evaluate = compiled(evaluate, in_shardings=(placed.params, rows), out_shardings=whole)


def _placed(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array that every host has, as a global one; no device holds more than its part."""
    whole = np.asarray(x)
    return jax.make_array_from_callback(x.shape, like.sharding, lambda part: whole[part])


def _named(tickets: Sequence[int], most: int = 16) -> str:
    """The tickets in order; only the first of them if there are many."""
    named = sorted(set(tickets))
    return ", ".join(map(str, named[:most])) + (
        f" and {len(named) - most} more" if len(named) > most else ""
    )
