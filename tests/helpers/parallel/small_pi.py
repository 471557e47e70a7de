"""A small π0.5 whose sizes every mesh axis divides, batches for it as a pure function of the step,
and runs of it on a mesh: what one device computes, every mesh must."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from models.families.pi.model import SHARDING_RULES, Pi, PiConfig
from models.inputs.packed_batch import PackedBatch, Sample, pack
from models.layers.float8.fp8 import is_history
from parallel.hosts.distributed import put_batch, row_share
from parallel.optimizer import OptimizerConfig
from parallel.step import TrainState, abstract_state, make_train_step, state_from
from tests.helpers.models.pi_sizes import SPLIT

CONFIG = SPLIT
LAYOUT = CONFIG.layout(prefix=32, samples=3, images=4)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, decay_steps=40, ema_decay=0.9)
ROWS = 16
"""Rows of a batch: two micro-batches of one row for each of eight devices."""
STEPS = 8
"""Steps of a run: enough that an error of any gradient shows in a later loss. On eight forced
devices a step costs as much as a twentieth of its compilation."""
_SEED = 3


class Run(NamedTuple):
    """The mean loss of each step, and the state after the last."""

    losses: np.ndarray
    state: TrainState


def losses(mesh: Mesh, accumulation: int = 1, steps: int = STEPS) -> np.ndarray:
    """Mean loss of each step, [steps]."""
    return train(mesh, accumulation, steps).losses


def train(
    mesh: Mesh,
    accumulation: int = 1,
    steps: int = STEPS,
    config: PiConfig = CONFIG,
    optimizer: OptimizerConfig = OPTIMIZER,
    first: int = 0,
) -> Run:
    """A run from `parameters(config)` with the batches from `first` on; of several processes each
    brings its share of the rows."""
    step, state = compiled(mesh, accumulation, config, optimizer)
    found = []
    for i in range(first, first + steps):
        state, metrics = step(state, placed(i, mesh), _SEED)
        found.append(metrics["loss"])
    return Run(np.array([float(x) for x in found]), state)


def gradient(state: TrainState) -> np.ndarray:
    """The first step's gradient up to a factor, of all parameters, flat."""
    moments = optax.tree.get(state.opt_state, "mu")
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(moments)])


def compiled(
    mesh: Mesh,
    accumulation: int = 1,
    config: PiConfig = CONFIG,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> tuple[Any, TrainState]:
    """The train step, compiled once, and the state it begins with."""
    step, abstract = _compiled(mesh, accumulation, config, optimizer)
    return step, state_from(parameters(config), optimizer, abstract)


@functools.lru_cache(maxsize=16)  # each keeps 500 memory mappings
def _compiled(
    mesh: Mesh, accumulation: int, config: PiConfig, optimizer: OptimizerConfig
) -> tuple[Any, Any]:
    model = Pi(config)
    abstract = abstract_state(model, optimizer, SHARDING_RULES, mesh)
    step = make_train_step(model, optimizer, mesh, abstract, accumulation)
    state = state_from(parameters(config), optimizer, abstract)
    lowered = step.lower(state, placed(0, mesh), _SEED)
    return lowered.compile(), abstract


def placed(step: int, mesh: Mesh) -> PackedBatch:
    """The batch of a step, on the mesh's devices."""
    index, count = row_share(mesh)
    mine = slice(index * ROWS // count, (index + 1) * ROWS // count)
    return put_batch(jax.tree.map(lambda x: x[mine], batch(step)), mesh)


@functools.cache
def batch(step: int) -> PackedBatch:
    """Rows of one to three samples with one or two pictures and texts of unlike lengths (numpy);
    what is predicted follows from the state."""
    rng = np.random.default_rng(step)
    shape = (CONFIG.horizon, CONFIG.action_dim)
    rows = []
    for row in range(ROWS):
        samples = []
        for slot in range(1 + row % 3):
            images = rng.integers(0, 256, (1 + (row + slot) % 2, 8, 8, 3), dtype=np.uint8)
            state = rng.normal(size=CONFIG.state_dim).astype(np.float32)
            mask = np.zeros(shape, bool)
            mask[: rng.integers(1, CONFIG.horizon + 1)] = True
            samples.append(
                Sample(
                    images=tuple(images)[: 1 if slot == 2 else 2],
                    text=rng.integers(1, 260, rng.integers(1, 5)).astype(np.int32),
                    state=state,
                    actions=np.tile(state, (CONFIG.horizon, 1)),
                    action_mask=mask,
                    id=(step * ROWS + row) * LAYOUT.samples + slot,
                )
            )
        rows.append(samples)
    return pack(rows, LAYOUT)


def parameters(config: PiConfig) -> Any:
    """Random everywhere (numpy, f32): π0.5 begins with closed gates, behind which an error of the
    expert would not show; only histories of float8 scales are empty."""
    rng = np.random.default_rng(0)

    def leaf(path: Any, x: Any) -> np.ndarray:
        drawn = rng.normal(scale=0.15, size=x.shape).astype(np.float32)
        return np.zeros_like(drawn) if is_history(path) else drawn

    return jax.tree_util.tree_map_with_path(
        leaf, jax.eval_shape(Pi(config).init, jax.random.key(0))
    )
