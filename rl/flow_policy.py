"""A flow policy as a stochastic policy: chunks drawn with noise at one or all of the denoising
steps, and the log-probabilities of given draws.

Flow-SDE with one random step is RLinf's two-layer decision process on Flow-GRPO's noise (arXiv
2505.05470); the random step is drawn for each chunk separately. Learned noise is ReinFlow's (arXiv
2505.22094). Everything after the action expert is f32.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, UInt32

from models.flow import flow
from models.inputs.packed_batch import PackedBatch
from models.layers.functional import Params
from models.model import FlowModel
from rl.config import FlowConfig
from rl.records import SampledChunk

_VALUE_WIDTHS, _NOISE_WIDTHS = (256, 256), (128, 64)
_STEP, _NOISE = 2**31, 2**31 + 1
"""Words folded into a chunk's key, far from the counters of its initial noise."""


def init(
    model: FlowModel, policy: Params, key: PRNGKeyArray, config: FlowConfig, *, value: bool = True
) -> Params:
    """{"policy", "value", "noise"}: the policy's parameters and the f32 heads that it is given.

    A value head, if requested, estimates 0 at first. If noise is learned, the head for its standard
    deviations begins with the geometric mean of `least` and `most`.
    """
    keys, width = jax.random.split(key), model.feature_width
    params = {"policy": policy}
    if value:
        params["value"] = _mlp(keys[0], (width, *_VALUE_WIDTHS, 1))
    if config.noise == "learned":
        params["noise"] = _mlp(keys[1], (width, *_NOISE_WIDTHS, model.config.action_dim))
    return params


def draw(
    model: FlowModel,
    params: Params,
    batch: PackedBatch,
    keys: UInt32[Array, "n 2"],
    config: FlowConfig,
    observed: Any = None,
) -> SampledChunk:
    """Draws chunks for N rows of one sample each, in the model's units; observations that are
    `observed` already are not read again.

    Integration starts from the same noise as in `Policy.sample_actions` with the same keys; nothing
    else decides a row's noise. If no step adds noise, as at `level` 0, chunks are those of
    `sample_actions` and their log-probabilities are 0.
    """
    field = model.field(params["policy"], batch, observed)
    shape, steps = batch.actions.shape[2:], random_steps(config)
    at = jnp.broadcast_to(jnp.arange(steps), (len(keys), steps))
    if config.random == "one":
        at = jax.vmap(lambda key: jax.random.randint(key, (1,), 0, steps))(_fold(keys, _STEP))
    noise = _fold(keys, _NOISE)

    def step(x: Array, k: Array) -> tuple[Array, tuple[Array, Array, "_Step"]]:
        taken = _step(params, field, x[:, None], jnp.full((len(x), 1), k), config)
        euler, mean, std = (z[:, 0] for z in taken)
        unit = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, k), shape))(noise)
        chosen = (at == k).any(1)[:, None, None]
        after = jnp.where(chosen, mean + std * unit, euler)
        return after, (x, after, _Step(euler, mean, std))

    actions, chain = jax.lax.scan(step, flow.noise(keys, shape), jnp.arange(config.euler_steps))
    rows = jnp.arange(len(at))[:, None]
    before, after, taken = jax.tree.map(lambda x: x[at, rows], chain)
    density = _log_density(after, taken.mean, taken.std).sum(1)
    return SampledChunk(actions, before, after, at, density, _value(params, field, batch))


def log_prob(
    model: FlowModel,
    params: Params,
    batch: PackedBatch,
    drawn: SampledChunk,
    observed: Any,
    config: FlowConfig,
) -> tuple[Float[Array, "n h a"], Float[Array, " n"], Float[Array, " n"]]:
    """Log-probabilities of chunks, for each of their numbers; the value head's estimate; and the
    entropy, in nats, averaged over the numbers that `action_mask` counts.

    With the parameters that drew the chunks, the first two equal the recorded ones except for
    rounding. No gradient of the value reaches the policy.

    Args:
      observed: result of `observe` for the batch, or None.
    """
    field = model.field(params["policy"], batch, observed)
    before, after, at = (jnp.asarray(x) for x in (drawn.before, drawn.after, drawn.at))
    _, mean, std = _step(params, field, before, at, config)
    density = _log_density(after, mean, std).sum(1)
    nats = jnp.where(std > 0, jnp.log(jnp.where(std > 0, std, 1)) + _HALF_LOG_2PI + 0.5, 0)
    acted = batch.action_mask[:, 0]
    entropy = (nats.mean(1) * acted).sum((1, 2)) / jnp.maximum(acted.sum((1, 2)), 1)
    return density, _value(params, field, batch), entropy


def observe(model: FlowModel, params: Params, batch: PackedBatch) -> Any:
    """Computes the results that are constant while the parameters that `model.observing` names are
    frozen; rows come first."""
    return model.observe(params["policy"], batch)


def value(model: FlowModel, params: Params, batch: PackedBatch) -> Float[Array, " n"]:
    """The value head's estimate (0 without a head) for N rows of one sample each."""
    return _value(params, model.field(params["policy"], batch), batch)


def schedule(config: FlowConfig) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Weights c of the predicted noise x̂₁ = x + (1 − t)·v, which is subtracted from the Euler
    step, and standard deviations s of the added noise, by denoising step k.

    The next chunk is normally distributed around x − v/K − c·x̂₁. "sde": c = σ²/(2tK), s = σ/√K
    with σ = level·√(t / (1 − t)), which preserves marginals because −x̂₁/t is the score; at t = 1,
    the 1 − t of the next step is used. "cps": c = t'·(1 − cos(π·level/2)), s = t'·sin(π·level/2)
    for a step to t'. For "learned", c is 0, and s comes from the head (here 0).
    """
    steps = config.euler_steps
    k = np.arange(steps)
    if config.noise == "sde":
        variance = config.level**2 * np.where(k > 0, (steps - k) / np.maximum(k, 1) / steps, 1)
        drift, std = variance / (2 * (1 - k / steps)), np.sqrt(variance)
    elif config.noise == "cps":
        angle, after = np.pi * config.level / 2, 1 - (k + 1) / steps
        drift, std = after * (1 - np.cos(angle)), after * np.sin(angle)
    else:
        drift = std = np.zeros(steps)
    return drift.astype(np.float32), std.astype(np.float32)


def random_steps(config: FlowConfig) -> int:
    """Number of denoising steps, counted from the first, that can be random: the last step of "cps"
    has no noise."""
    return config.euler_steps - (config.noise == "cps")


class _Step(NamedTuple):
    """A denoising step without noise, and its mean and standard deviation with it."""

    euler: Float[Array, "n m h a"]
    mean: Float[Array, "n m h a"]
    std: Float[Array, "n m h a"]


def _step(
    params: Params,
    field: flow.Field,
    x: Float[Array, "n m h a"],
    at: Int[Array, "n m"],
    config: FlowConfig,
) -> _Step:
    drift, std = (jnp.asarray(z)[at][..., None, None] for z in schedule(config))
    time = jnp.asarray(flow.times(config.euler_steps))[at]
    predicted = field(x[:, None], time[:, None])
    velocity = predicted.velocity[:, 0]
    euler = x - velocity * np.float32(1 / config.euler_steps)
    mean = euler - drift * (x + (1 - time[..., None, None]) * velocity)
    if config.noise == "learned":
        wide = jnp.tanh(_apply(params["noise"], predicted.features[:, 0]))
        low, high = np.log(config.least), np.log(config.most)
        return _Step(euler, mean, jnp.exp(low + (high - low) * (wide + 1) / 2))
    return _Step(euler, mean, jnp.broadcast_to(std, mean.shape))


def _value(params: Params, field: flow.Field, batch: PackedBatch) -> Float[Array, " n"]:
    """The value head's estimate, from the expert's mean features of a chunk of zeros at t = 1.

    Everything that the policy knows of an observation passes through the expert, whichever way the
    state enters. The chunk is the same for all observations, so the value depends only on the
    observation, as a baseline must. (Hidden states of the prefix lack π0's state, and their mean
    blurs places.)
    """
    n, _, *shape = batch.actions.shape
    if "value" not in params:
        return jnp.zeros(n)
    seen = field(jnp.zeros((n, 1, 1, *shape)), jnp.ones((n, 1, 1))).features[:, 0, 0]
    return _apply(params["value"], jax.lax.stop_gradient(seen.mean(1)))[:, 0]


_HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))


def _log_density(
    x: Float[Array, "*b"], mean: Float[Array, "*b"], std: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Log-density of a normal distribution, in nats; 0 where its standard deviation is 0."""
    width = jnp.where(std > 0, std, 1)
    density = -0.5 * ((x - mean) / width) ** 2 - jnp.log(width) - _HALF_LOG_2PI
    return jnp.where(std > 0, density, 0)


def _fold(keys: UInt32[Array, "n 2"], what: int) -> Key[Array, " n"]:
    return jax.vmap(
        lambda key: jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), what)
    )(keys)


def _mlp(key: PRNGKeyArray, widths: Sequence[int]) -> Params:
    """Layers with tanh; the last layer begins at 0."""
    layers: dict[str, Any] = {}
    for i, (inner, outer) in enumerate(pairwise(widths)):
        kernel = jax.random.normal(jax.random.fold_in(key, i), (inner, outer)) * inner**-0.5
        last = i == len(widths) - 2
        layers[f"layer{i}"] = {"kernel": kernel * (not last), "bias": jnp.zeros(outer)}
    return layers


def _apply(layers: Params, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
    """Applies the layers in f32, whatever the dtype of the parameters."""
    for i in range(len(layers)):
        layer = layers[f"layer{i}"]
        x = (jnp.tanh(x) if i else x) @ layer["kernel"].astype(jnp.float32) + layer["bias"]
    return x
