"""Objectives of the learner: PPO, decoupled PPO, truncated importance sampling, AIPO and V-trace's
policy term, as pure functions of log-probabilities.

Losses and metrics are sums over decisions (chunks) times their weight, to be divided once by the
sum of the weights, so that micro-batches, hosts and their order change nothing. Ratios that are
clipped, truncated or left out stay in the denominator (as in AReaL, arXiv 2505.24298). A decision's
surrogate is the sum over its ratios, so if all policies are equal, all levels have the gradient
A ∇ log π.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.files.bounds import check_finite, check_least
from models.files.own_file import by_name, check_choice
from rl.advantages import ADVANTAGES, VTRACE, Advantage

LogRatio = Float[Array, "n r"]
Advantages = Float[Array, "n 1"]
LIMIT = 20.0
"""Log-ratios are bounded to ± this, so that no ratio or square of one overflows; no gradient flows
beyond."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective of the learner.

    `name`: "ppo", "decoupled", "tis", "aipo" or "vtrace", or `path/to/file.py:function`, which runs
    your file; the function is like `ppo` here. `advantage`: "gae" uses a value head; "group"
    compares an episode's return with those of its group (GRPO, arXiv 2402.03300);
    `path/to/file.py:NAME` is an `rl.advantages.Advantage` of yours. `ratio`: what one probability
    ratio covers: a whole chunk, one of its actions, or one number of an action ("token").
    """

    name: str = "ppo"
    advantage: str = "gae"
    ratio: Literal["chunk", "action", "token"] = "chunk"
    clip: float = 0.2
    truncation: float = 2.0
    """Upper bound of importance weights in "decoupled", "tis", "aipo" and "vtrace"."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    discount: float = 0.99
    """Discount per chunk, as in RLinf."""
    gae_lambda: float = 0.95
    value_weight: float = 0.5
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self.name, SURROGATES, "objective.name")
        check_choice(self.advantage, ADVANTAGES, "objective.advantage")
        if self.name == "vtrace" and self.advantage != "gae":
            raise ValueError(
                f"objective.advantage is {self.advantage!r}, but 'vtrace' needs values, as 'gae' "
                f"has them; set it to 'gae', or choose another objective.name."
            )
        if not 0 < self.clip < 1 or not self.truncation >= 1:
            raise ValueError(
                f"objective.clip is {self.clip} and truncation {self.truncation}; expected a clip "
                f"between 0 and 1, and a truncation of at least 1, so that fresh data keeps its "
                f"weight."
            )
        if not 0 <= self.discount <= 1 or not 0 <= self.gae_lambda <= 1:
            raise ValueError(
                f"objective.discount is {self.discount} and gae_lambda {self.gae_lambda}; expected "
                f"both from 0 to 1."
            )
        check_least({"objective.value_weight": (self.value_weight, 0)})
        check_finite("objective", self, "value_weight", "entropy_weight")


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
      ValueError: a user's function does not return a Surrogate.
    """
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
    surrogate = by_name(config.name, SURROGATES, "objective.name")(
        whole, log_ratio(log_prob, near), log_ratio(near, behaviour), advantage[:, None], config
    )
    if not isinstance(surrogate, Surrogate):
        raise ValueError(
            f"objective.name is '{config.name}', whose function returns "
            f"{type(surrogate).__name__}; it must return an rl.objectives.Surrogate."
        )
    gain, clipped, truncated = surrogate
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
    whole: LogRatio,
    step: LogRatio,
    stale: LogRatio,
    advantage: Advantages,
    config: ObjectiveConfig,
) -> Surrogate:
    """min(r A, clip(r, 1 ± ε) A), r = π_θ/π_b (Schulman et al., arXiv 1707.06347).

    Here and in the others `whole`, `step` and `stale` are the logarithms of π_θ/π_b, π_θ/π_p and
    π_p/π_b.
    """
    gain, clipped = _clip(jnp.exp(whole), advantage, config.clip)
    return Surrogate(gain, clipped, jnp.zeros_like(clipped))


def decoupled(
    whole: LogRatio,
    step: LogRatio,
    stale: LogRatio,
    advantage: Advantages,
    config: ObjectiveConfig,
) -> Surrogate:
    """w min(u A, clip(u, 1 ± ε) A), u = π_θ/π_p, w = π_p/π_b, and 0 where w is above the truncation
    (AReaL, arXiv 2505.24298, equation 5 and its code)."""
    gain, clipped = _clip(jnp.exp(step), advantage, config.clip)
    importance = jax.lax.stop_gradient(jnp.exp(stale))
    above = importance > config.truncation
    return Surrogate(jnp.where(above, 0, importance * gain), clipped & ~above, above)


def tis(
    whole: LogRatio,
    step: LogRatio,
    stale: LogRatio,
    advantage: Advantages,
    config: ObjectiveConfig,
) -> Surrogate:
    """Variant of `decoupled` in which w is min(π_p/π_b, C): bounded, not left out (truncated
    importance sampling, Yao et al. 2025; DART-GUI, arXiv 2509.23866)."""
    gain, clipped = _clip(jnp.exp(step), advantage, config.clip)
    importance = jax.lax.stop_gradient(jnp.exp(stale))
    bounded = jnp.minimum(importance, config.truncation)
    return Surrogate(bounded * gain, clipped, importance > config.truncation)


def aipo(
    whole: LogRatio,
    step: LogRatio,
    stale: LogRatio,
    advantage: Advantages,
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


def advantage_of(config: ObjectiveConfig) -> Advantage:
    """The advantages that the learner learns from.

    Raises:
      ValueError, FileNotFoundError: a user's file is missing, or has no Advantage of that name.
    """
    if config.name == "vtrace":
        return VTRACE
    found = by_name(config.advantage, ADVANTAGES, "objective.advantage")
    if not isinstance(found, Advantage):
        raise ValueError(
            f"objective.advantage is '{config.advantage}', which is {type(found).__name__}; it "
            f"must be an rl.advantages.Advantage."
        )
    return found


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
    ratio: Float[Array, "n r"], advantage: Advantages, clip: float
) -> tuple[Float[Array, "n r"], Bool[Array, "n r"]]:
    free, bound = ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage
    return jnp.minimum(free, bound), bound < free
