"""A small Gaussian policy with a value head, and tickets of made-up episodes for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.inputs.packed_batch import Layout, PackedBatch, Sample, pack
from parallel.optimizer import OptimizerConfig
from rl.records import Decision, SampledChunk, Ticket, Trajectory
from sim.protocol import Start

HORIZON, DIMS, STATE = 3, 2, 8
LAYOUT = Layout(
    prefix=8,
    images=1,
    samples=1,
    text=4,
    image_size=4,
    tokens_per_image=1,
    state_tokens=1,
    state_dim=STATE,
    horizon=HORIZON,
    action_dim=DIMS,
)
RULES = (
    (r"kernel$", PartitionSpec("fsdp")),
    (r"bias$", PartitionSpec()),
)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, schedule="constant", warmup_steps=0, decay_steps=100, weight_decay=0.0
)


def params(seed: int = 0) -> Any:
    rng = np.random.default_rng([1, seed])
    shapes = {
        "policy": {"kernel": (STATE, HORIZON * DIMS), "bias": (HORIZON * DIMS,)},
        "value": {"kernel": (STATE,), "bias": ()},
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return tree.unflatten([jnp.asarray(0.3 * rng.normal(size=x), jnp.float32) for x in leaves])


def log_prob(
    params: Any, batch: PackedBatch, drawn: SampledChunk, observed: Any = None
) -> tuple[Any, Any, Any]:
    """Log-density of a Gaussian of width 1/2 around a linear function of the state."""
    state = observe(params, batch) if observed is None else observed
    policy, value = params["policy"], params["value"]
    mean = (state @ policy["kernel"] + policy["bias"]).reshape(-1, HORIZON, DIMS)
    error = (drawn.after[:, 0] - mean) / 0.5
    entropy = jnp.sum(policy["bias"] ** 2) * jnp.ones(len(state))
    return -0.5 * error**2, state @ value["kernel"] + value["bias"], entropy


def observe(params: Any, batch: PackedBatch) -> Any:
    return jnp.asarray(batch.state[:, 0])


def packed(samples: list[Sample]) -> PackedBatch:
    return pack([[sample] for sample in samples], LAYOUT)


def ticket(
    number: int, members: int = 1, version: int = 0, like: Any = None, moved: float = 0.1
) -> Ticket:
    """Episodes of two to five chunks, a pure function of the arguments.

    Args:
      like: parameters of the policy that acted, those of seed 0 if None.
      moved: how far its log-probabilities are from those that it would give.
    """
    given = jax.tree.map(np.asarray, params() if like is None else like)
    trajectories = tuple(_episode(number, m, version, given, moved) for m in range(members))
    return Ticket(number, trajectories)


def _episode(number: int, member: int, version: int, given: Any, moved: float) -> Trajectory:
    rng = np.random.default_rng([7, number, member])
    decisions = []
    for i in range(rng.integers(2, 6)):
        sample = _sample(rng, 1000 * number + 10 * member + i)
        acted, state = sample.action_mask, sample.state
        mean = (state @ given["policy"]["kernel"] + given["policy"]["bias"]).reshape(HORIZON, DIMS)
        after = (mean + 0.5 * rng.normal(size=mean.shape)).astype(np.float32)
        old = -0.5 * ((after - mean) / 0.5) ** 2 + moved * rng.normal(size=mean.shape)
        drawn = SampledChunk(
            actions=after,
            before=np.zeros((1, HORIZON, DIMS), np.float32),
            after=after[None],
            at=np.zeros(1, np.int32),
            log_prob=old.astype(np.float32),
            value=np.float32(rng.normal()),
        )
        reward = rng.normal(size=acted[:, 0].sum()).astype(np.float32)
        decisions.append(Decision(sample, drawn, version, reward))
    ended = bool(rng.integers(2))
    return Trajectory(
        start=Start("reach", number),
        member=member,
        decisions=tuple(decisions),
        terminated=ended,
        final_value=float("nan") if ended else float(rng.normal()),
        success=ended,
        last=None if ended else _sample(rng, 1000 * number + 10 * member + 9),
    )


def _sample(rng: np.random.Generator, id: int) -> Sample:
    """An observation with a chunk of which some steps were acted."""
    acted = np.zeros((HORIZON, DIMS), bool)
    acted[: rng.integers(1, HORIZON + 1)] = True
    return Sample(
        images=(),
        text=np.ones(2, np.int32),
        state=rng.normal(size=STATE).astype(np.float32),
        actions=np.zeros((HORIZON, DIMS), np.float32),
        action_mask=acted,
        id=id,
    )
