"""One training step as one program: gradients over the global batch, update and running average.

Gradients of the summed loss are added over micro-batches and divided once by the global count, so
neither accumulation nor the mesh changes what is learnt. The state is created sharded and its
buffers are donated. Sums and counts, weighted by `PackedBatch.weight`, are the model's `loss`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.inputs.packed_batch import PackedBatch
from models.layers import batch_norm
from models.layers.batch_norm import training
from models.layers.float8 import fp8
from models.layers.functional import fill, only
from models.layers.quantized import is_quantized
from models.sharding import ROWS, Rules, constrain, shardings
from parallel.hosts.facts import facts_sharding, settle
from parallel.mesh import check_rows, replicated, rows_sharding
from parallel.optimizer import (
    OptimizerConfig,
    make_optimizer,
    make_schedule,
    own_average,
    select,
    state_shardings,
)

_INIT, _TRAIN = 0, 1
_RUN_ONCE = {"xla_backend_optimization_level": 0}
"""XLA options that compile the many random draws of an initial state in a quarter of the time."""

_MOVED = ("all_gather", "reduce_scatter", "all_reduce")
_PIPELINED = (
    {f"xla_gpu_enable_pipelined_{kind}": True for kind in _MOVED}
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
    else {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _MOVED}
)
"""XLA refuses an option under its older or its later name."""

OVERLAP = {"gpu": {"xla_gpu_enable_latency_hiding_scheduler": True, **_PIPELINED}}
"""XLA flags that overlap one layer's collectives with another's products (docs/compile.md)."""

Params = Any
Metrics = dict[str, Array]


class Trainable(Protocol):
    """The part of a `models.model.Model` that a step needs: parameters as a nested dict, and a loss
    that is a sum with its count."""

    def init(self, key: PRNGKeyArray) -> Params: ...

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a run carries from step to step; `step` counts the updates made. `ema` has
    None for frozen parameters, for which one copy is enough."""

    step: Int[Array, ""]
    params: Params
    ema: Params
    opt_state: Any

    @property
    def averaged(self) -> Params:
        """The parameters to evaluate and to save, none missing."""
        return fill(self.ema, self.params)


def abstract_state(
    model: Trainable, optimizer: OptimizerConfig, rules: Rules, mesh: Mesh
) -> TrainState:
    """The state as ShapeDtypeStructs with shardings; moments and averages are sharded like their
    parameter.

    Raises:
      ValueError: a parameter does not match exactly one rule, or does not divide over the mesh.
    """
    params = jax.eval_shape(lambda: model.init(_key(0, _INIT)))
    whole = abstract_state_of(params, optimizer, rules, mesh)
    return replace(whole, ema=only(whole.ema, select(optimizer, whole.params)[0]))


def abstract_state_of(
    params: Params, optimizer: OptimizerConfig, rules: Rules | Mapping[str, Rules], mesh: Mesh
) -> TrainState:
    """`abstract_state` for given parameters (or their ShapeDtypeStructs) instead of a model; all of
    them have an average. `rules` may be those of each part of the parameters, by its name."""
    shapes = jax.eval_shape(lambda p: _begin(p, optimizer), params)
    if isinstance(rules, Mapping):
        params = {k: shardings(part, rules[k], mesh) for k, part in shapes.params.items()}
    else:
        params = shardings(shapes.params, rules, mesh)
    trained = select(optimizer, params)[1]
    opt_state = state_shardings(
        shapes.opt_state, only(shapes.params, trained), only(params, trained), mesh
    )
    whole: Any = replicated(mesh)
    placed = TrainState(step=whole, params=params, ema=params, opt_state=opt_state)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed
    )


def init_state(
    model: Trainable, optimizer: OptimizerConfig, abstract: TrainState, seed: Any
) -> TrainState:
    """A new state, with every array created in its sharding, so none is ever whole on one
    device."""
    placed = jax.tree.map(lambda x: x.sharding, abstract)
    draw = jax.jit(
        lambda s: _begin(model.init(_key(s, _INIT)), optimizer, abstract.ema),
        out_shardings=placed,
        compiler_options=_RUN_ONCE,
    )
    return draw(seed)


def state_from(
    params: Params, optimizer: OptimizerConfig, abstract: TrainState, *, consume: bool = False
) -> TrainState:
    """A state that begins with the given parameters (in the dtypes and shardings of `abstract`);
    with `consume`, they are donated and no second copy is made."""
    placed = jax.tree.map(lambda x: x.sharding, abstract)
    begin = jax.jit(
        lambda p: _begin(p, optimizer, abstract.ema),
        out_shardings=placed,
        donate_argnums=(0,) if consume else (),
    )
    return begin(params)


def make_train_step(
    model: Trainable,
    optimizer: OptimizerConfig,
    mesh: Mesh,
    abstract: TrainState,
    accumulation: int = 1,
    hosts: bool = False,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Jitted `step(state, batch, seed) -> (state, metrics)`; the state given is consumed.

    The model's key derives from (seed, state.step). Metrics are f32 scalars: `loss` (mean over the
    global batch), `loss_NAME` for each of its terms if it has several, `grad_norm` (before
    clipping), `learning_rate`, `count`, and bool `finite`, which is false if loss or gradient is
    not finite; the new state must then not be kept.

    With `hosts` the step takes a fourth argument, `put_facts` of every host, and settles its state
    by these facts (`parallel.hosts.facts`). Metrics then also hold `good`, whether the update was
    finite and within the limit, and `hosts`, the facts of all hosts, f32 [devices, 5].

    Raises:
      ValueError: (when called) the rows do not divide over devices and micro-batches.
    """
    placed = jax.tree.map(lambda x: x.sharding, abstract)

    def step(
        state: TrainState, batch: PackedBatch, seed: Any, facts: Any = None
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(_key(seed, _TRAIN), state.step)
        moving, _ = select(optimizer, state.params)
        with use_abstract_mesh(mesh.abstract_mesh):
            loss, count, terms, summed = _sum_gradients(
                model, state.params, moving, batch, key, mesh, accumulation
            )
        new, metrics = apply_gradients(state, loss, count, summed, optimizer, placed.params)
        metrics |= {f"loss_{name}": term / count for name, term in terms.items()}
        if not hosts:
            return new, metrics
        with use_abstract_mesh(mesh.abstract_mesh):
            sound, norm = metrics["finite"], metrics["grad_norm"]
            kept, good = settle(state, new, state.step, sound, norm, facts)
        return kept, {**metrics, "good": good, "hosts": facts}

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, rows_sharding(mesh), None, *[facts_sharding(mesh)] * hosts),
        out_shardings=(placed, replicated(mesh)),
        compiler_options=OVERLAP.get(mesh.devices.flat[0].platform),
    )


@jax.named_scope("update")
def apply_gradients(
    state: TrainState,
    loss_sum: Float[Array, ""],
    count: Float[Array, ""],
    summed: Params,
    optimizer: OptimizerConfig,
    placed: Params,
) -> tuple[TrainState, Metrics]:
    """One update, and its metrics as `make_train_step` describes them (in a traced program).

    Args:
      summed: gradient of the loss sum, None for frozen parameters.
      placed: the parameters' shardings.
    """
    _, trained = select(optimizer, state.params)
    gradients = jax.tree.map(
        lambda g, s: jax.lax.with_sharding_constraint(g / count, s),
        only(summed, trained),
        only(placed, trained),
    )
    old = only(state.params, trained)
    updates, opt_state = make_optimizer(optimizer).update(gradients, state.opt_state, old)
    new = optax.apply_updates(old, updates)
    params = fill(new, state.params)
    whole = fill(summed, state.params)
    params = _recorded(params, state.params, whole)
    kept = _present(state.ema)
    with jax.named_scope("ema"):
        if (own := own_average(optimizer, opt_state, new)) is not None:
            ema = only(fill(own, params), kept)
        else:
            decay = jnp.minimum(optimizer.ema_decay, (1 + state.step) / (10 + state.step))
            ema = jax.tree.map(
                lambda e, p: e + (1 - decay).astype(e.dtype) * (p - e),
                state.ema,
                only(params, kept),
            )
        ema = _recorded(ema, only(state.params, kept), only(whole, kept))
    loss, norm = loss_sum / count, optax.tree_utils.tree_norm(gradients)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": jnp.asarray(make_schedule(optimizer)(state.step), jnp.float32),
        "count": count,
        "finite": jnp.isfinite(loss) & jnp.isfinite(norm),
    }
    return TrainState(state.step + 1, params, ema, opt_state), metrics


def _recorded(updated: Params, params: Params, gradients: Params) -> Params:
    """`updated` with what a step records instead of learning: scales of float8, and statistics."""
    updated = fp8.advance(updated, params, gradients)
    return batch_norm.advance(updated, params, gradients)


def _key(seed: Any, what: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.key(seed), what)


def _begin(params: Params, optimizer: OptimizerConfig, averages: Params = None) -> TrainState:
    """The initial state, with averages for the parameters that `averages` has, or for all."""
    moving, trained = select(optimizer, params)

    def kept(leaf: Any, moves: Any) -> Any:
        if is_quantized(leaf) or moves or leaf.dtype != jnp.float32:
            return leaf
        return leaf.astype(optimizer.frozen_dtype)

    params = jax.tree.map(kept, params, moving, is_leaf=is_quantized)
    ema = params if averages is None else only(params, _present(averages))
    fresh = make_optimizer(optimizer).init(only(params, trained))
    return TrainState(jnp.int32(0), params, ema, fresh)


def _present(tree: Params) -> Params:
    """True where the tree has a leaf, False where it has None."""
    return jax.tree.map(lambda x: x is not None, tree, is_leaf=lambda x: x is None)


def _sum_gradients(
    model: Trainable,
    params: Params,
    moving: Any,
    batch: PackedBatch,
    key: PRNGKeyArray,
    mesh: Mesh,
    accumulation: int,
) -> tuple[Float[Array, ""], Float[Array, ""], Metrics, Params]:
    """Loss sum, count, sums of the loss's terms and gradient of the loss sum over all rows, one
    micro-batch at a time; the gradient is None for frozen parameters."""
    rows = len(batch.state)
    check_rows(rows, mesh, accumulation)
    wanted, names = only(params, moving), getattr(model, "term_names", ())

    def losses(p: Params, b: PackedBatch) -> tuple[Array, tuple[Array, Metrics]]:
        if names:
            return cast(Any, model).losses(training(fill(p, params)), b, key)
        total, count = model.loss(training(fill(p, params)), b, key)
        return total, (count, {})

    gradient = jax.value_and_grad(losses, has_aux=True)
    if accumulation == 1:
        (loss_sum, (count, terms)), summed = gradient(wanted, batch)
        return loss_sum, count, terms, summed

    def split(x: Array) -> Array:
        """Row r goes to micro-batch r % accumulation, so that no row leaves its device."""
        parts = jnp.moveaxis(x.reshape(rows // accumulation, accumulation, *x.shape[1:]), 1, 0)
        return constrain(parts, None, ROWS)

    def add(carry: Any, part: PackedBatch) -> tuple[Any, None]:
        (loss_sum, (count, terms)), gradients = gradient(wanted, part)
        return fp8.add(carry, (loss_sum, count, terms, gradients)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), wanted)
    nothing = dict.fromkeys(names, jnp.float32(0))
    start = (jnp.float32(0), jnp.float32(0), nothing, zeros)
    sums, _ = jax.lax.scan(add, start, jax.tree.map(split, batch))
    return sums
