"""Objectives of the learner: PPO, decoupled PPO, truncated importance sampling, AIPO and V-trace's
policy term, as pure functions of log-probabilities.

Losses and metrics are sums over decisions (chunks) times their weight, to be divided once by the
sum of the weights, so that micro-batches, hosts and their order change nothing. Numbers of a chunk
that were not executed are in no ratio. Ratios that are clipped, truncated or left out stay in the
denominator (as in AReaL, arXiv 2505.24298). A decision's surrogate is the sum over its ratios (one,
one per action or one per number), so if all policies are equal, all levels have the gradient
A ∇ log π.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl.config import ObjectiveConfig

LIMIT = 20.0
"""Log-ratios are bounded to ± this, so that no ratio or square of one overflows; no gradient flows
beyond."""


class Terms(NamedTuple):
    """Sums of a batch; `combine` joins those of parts, `summary` divides."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    """Total over all decisions, the divisor."""
    sums: dict[str, Float[Array, ""]]
    maxima: dict[str, Float[Array, ""]]


class Surrogate(NamedTuple):
    """Objective to maximise, for each ratio, and where bounds cut it."""

    gain: Float[Array, "n r"]
    clipped: Bool[Array, "n r"]
    """True where PPO's clip took the gradient."""
    truncated: Bool[Array, "n r"]
    """True where an importance weight was above `truncation`."""


def objective(
    config: ObjectiveConfig,
    log_prob: Float[Array, "n h a"],
    behaviour: Float[Array | np.ndarray, "n h a"],
    advantage: Float[Array | np.ndarray, " n"],
    acted: Bool[Array, "n h a"],
    weight: Float[Array | np.ndarray, " n"],
    lag: Int[Array | np.ndarray, " n"],
    proximal: Float[Array | np.ndarray, "n h a"] | None = None,
) -> Terms:
    """Policy loss of n decisions, with its metrics.

    Args:
      log_prob: log π_θ of the numbers drawn, which is differentiated.
      behaviour: log π of the policy that drew them.
      acted: true for the numbers that count.
      weight: 0 for padding.
      lag: number of updates by which the learner's policy is ahead of the one that acted.
      proximal: log π of the policy at the beginning of the learner's step; None where that is π_θ
        itself, as it is before the first update of a step.

    Raises:
      ValueError: the configuration is out of range.
    """
    check(config)
    rows, horizon, dims = acted.shape
    apart = {"chunk": 1, "action": horizon, "token": horizon * dims}[config.ratio]
    ratios = acted.reshape(rows, apart, -1).any(-1)
    if config.proximal == "interpolated":
        proximal = interpolated(log_prob, behaviour, lag)
    elif proximal is None:
        proximal = log_prob
    near = jax.lax.stop_gradient(proximal)

    def log_ratio(one: Any, other: Any) -> Array:
        each = jnp.where(acted, (one - other).astype(jnp.float32), 0)
        return jnp.clip(each.reshape(rows, apart, -1).sum(-1), -LIMIT, LIMIT)

    whole = log_ratio(log_prob, behaviour)
    gain, clipped, truncated = SURROGATES[config.name](
        whole, log_ratio(log_prob, near), log_ratio(near, behaviour), advantage[:, None], config
    )
    counted = jnp.where(ratios, weight[:, None], 0)
    importance = jax.lax.stop_gradient(jnp.exp(whole))
    per_ratio = {
        "policy_loss": -gain,
        "ratios": jnp.ones_like(gain),
        "clipped": clipped,
        "truncated": truncated,
        "importance": importance,
        "importance_squared": importance**2,
        "behaviour_kl": importance - 1 - jax.lax.stop_gradient(whole),
    }
    sums = {name: jnp.sum(jnp.where(ratios, x, 0) * counted) for name, x in per_ratio.items()}
    sums["lag"] = jnp.sum(lag * weight)
    maxima = {
        "importance": jnp.where(counted > 0, importance, 0).max(),
        "lag": jnp.where(weight > 0, lag, 0).max().astype(jnp.float32),
    }
    return Terms(sums["policy_loss"], jnp.sum(weight), sums, maxima)


def value_loss(
    value: Float[Array, " n"],
    target: Float[Array | np.ndarray, " n"],
    weight: Float[Array | np.ndarray, " n"],
) -> Float[Array, ""]:
    """Half the squared error, summed over decisions."""
    return jnp.sum(0.5 * (value.astype(jnp.float32) - target) ** 2 * weight)


def interpolated(
    log_prob: Float[Array, "n h a"],
    behaviour: Float[Array | np.ndarray, "n h a"],
    lag: Int[Array | np.ndarray, " n"],
) -> Float[Array, "n h a"]:
    """log π of a proximal policy between behaviour and learner (A-3PO, arXiv 2512.06547):
    log π_b + α (log π_θ - log π_b), α = (v_p - v_b) / (v_θ - v_b), where an update leads from
    v_p to v_θ = v_p + 1, and v_p - v_b is the lag. A lag of 0 makes it the behaviour policy."""
    alpha = (lag / (lag + 1.0))[:, None, None].astype(jnp.float32)
    old = jnp.asarray(behaviour)
    return old + alpha * (log_prob - old)


def ppo(
    whole: Float[Array, "n r"],
    step: Float[Array, "n r"],
    stale: Float[Array, "n r"],
    advantage: Float[Array, "n 1"],
    config: ObjectiveConfig,
) -> Surrogate:
    """min(r A, clip(r, 1 ± ε) A), r = π_θ/π_b (Schulman et al., arXiv 1707.06347).

    Here and in the others `whole`, `step` and `stale` are the logarithms of π_θ/π_b, π_θ/π_p and
    π_p/π_b.
    """
    gain, clipped = _clip(jnp.exp(whole), advantage, config.clip)
    return Surrogate(gain, clipped, jnp.zeros_like(clipped))


def decoupled(
    whole: Float[Array, "n r"],
    step: Float[Array, "n r"],
    stale: Float[Array, "n r"],
    advantage: Float[Array, "n 1"],
    config: ObjectiveConfig,
) -> Surrogate:
    """w min(u A, clip(u, 1 ± ε) A), u = π_θ/π_p, w = π_p/π_b, and 0 where w is above the truncation
    (AReaL, arXiv 2505.24298, equation 5 and its code)."""
    gain, clipped = _clip(jnp.exp(step), advantage, config.clip)
    importance = jax.lax.stop_gradient(jnp.exp(stale))
    above = importance > config.truncation
    return Surrogate(jnp.where(above, 0, importance * gain), clipped & ~above, above)


def tis(
    whole: Float[Array, "n r"],
    step: Float[Array, "n r"],
    stale: Float[Array, "n r"],
    advantage: Float[Array, "n 1"],
    config: ObjectiveConfig,
) -> Surrogate:
    """Variant of `decoupled` in which w is min(π_p/π_b, C): bounded, not left out (truncated
    importance sampling, Yao et al. 2025; DART-GUI, arXiv 2509.23866)."""
    gain, clipped = _clip(jnp.exp(step), advantage, config.clip)
    importance = jax.lax.stop_gradient(jnp.exp(stale))
    bounded = jnp.minimum(importance, config.truncation)
    return Surrogate(bounded * gain, clipped, importance > config.truncation)


def aipo(
    whole: Float[Array, "n r"],
    step: Float[Array, "n r"],
    stale: Float[Array, "n r"],
    advantage: Float[Array, "n 1"],
    config: ObjectiveConfig,
) -> Surrogate:
    """A surrogate whose gradient is min(π_θ/π_b, ρ) A ∇ log π_θ (LlamaRL, arXiv 2505.24034).

    It is V-trace's policy term too (IMPALA, arXiv 1802.01561, section 4.2) where the advantage is
    V-trace's.
    """
    importance = jnp.exp(jax.lax.stop_gradient(whole))
    bounded = jnp.minimum(importance, config.truncation)
    slope = 1 + whole - jax.lax.stop_gradient(whole)
    nothing = jnp.zeros(jnp.broadcast_shapes(whole.shape, advantage.shape), bool)
    return Surrogate(bounded * slope * advantage, nothing, importance > config.truncation)


SURROGATES: dict[str, Callable[..., Surrogate]] = {
    "ppo": ppo,
    "decoupled": decoupled,
    "tis": tis,
    "aipo": aipo,
    "vtrace": aipo,
}


def check(config: ObjectiveConfig) -> None:
    """Raises ValueError if the configuration makes no sense."""
    if config.name not in SURROGATES:
        raise ValueError(
            f"objective.name is {config.name!r}; expected one of {', '.join(SURROGATES)}."
        )
    if config.name == "vtrace" and config.advantage != "gae":
        raise ValueError(
            f"objective.advantage is {config.advantage!r}, but 'vtrace' needs values, which only "
            f"'gae' has; set it to 'gae', or choose another objective.name."
        )
    if not 0 < config.clip < 1 or not config.truncation >= 1:
        raise ValueError(
            f"objective.clip is {config.clip} and truncation {config.truncation}; expected a clip "
            f"between 0 and 1, and a truncation of at least 1, so that fresh data keeps its weight."
        )
    if not 0 <= config.discount <= 1 or not 0 <= config.gae_lambda <= 1:
        raise ValueError(
            f"objective.discount is {config.discount} and gae_lambda {config.gae_lambda}; expected "
            f"both from 0 to 1."
        )


def combine(one: Terms, other: Terms) -> Terms:
    """Terms of the decisions of both together."""
    return Terms(
        one.loss + other.loss,
        one.weight + other.weight,
        jax.tree.map(jnp.add, one.sums, other.sums),
        jax.tree.map(jnp.maximum, one.maxima, other.maxima),
    )


def summary(terms: Terms) -> dict[str, float]:
    """Metrics of a whole batch. Over ratios: the fractions clipped and truncated, the estimate
    w - 1 - log w of KL(π_b‖π_θ), and the mean, maximum and effective sample size (Σw)²/(NΣw²), from
    0 to 1, of the importance weights w = π_θ/π_b. Other sums become means over decisions.
    """
    loss, weight, sums, maxima = jax.tree.map(float, jax.device_get(terms))
    sums = dict(sums)
    ratios, total, squares, *fractions = (
        sums.pop(name)
        for name in (
            "ratios",
            "importance",
            "importance_squared",
            "clipped",
            "truncated",
            "behaviour_kl",
        )
    )
    clipped, truncated, kl = (x / ratios if ratios else 0.0 for x in fractions)
    return {
        "loss": loss / weight,
        "count": weight,
        "clip_fraction": clipped,
        "truncated_fraction": truncated,
        "behaviour_kl": kl,
        "weight_mean": total / ratios if ratios else 0.0,
        "weight_max": maxima["importance"],
        "ess": total**2 / (ratios * squares) if squares else 0.0,
        "lag_max": maxima["lag"],
        **{name: value / weight for name, value in sums.items()},
    }


def _clip(
    ratio: Float[Array, "n r"], advantage: Float[Array, "n 1"], clip: float
) -> tuple[Float[Array, "n r"], Bool[Array, "n r"]]:
    free, bound = ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage
    return jnp.minimum(free, bound), bound < free
