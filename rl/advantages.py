"""Advantages of an episode's decisions: GAE, group-relative returns and V-trace, on whole
trajectories (numpy, f64); and GAE of unrolls on a device. `--objective.advantage` chooses one by
name or from a user's file (`Advantage`).

A decision is a chunk: its reward is the sum of its steps' rewards, and the discount applies per
chunk. An episode that ran out of time would continue, so the value head's estimate for its last
observation counts; an episode that terminated would not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Series = Float[np.ndarray, " t"]
"""Numbers of an episode's t decisions."""


class AdvantageAndTarget(NamedTuple):
    """Advantages and targets of one trajectory's decisions."""

    advantage: Series
    target: Series
    """The value head's targets."""


class ValuedEpisode(NamedTuple):
    """A trajectory as its advantages are computed from it: the reward of each decision, the value
    head's estimates (0 without one), and that for the last observation (0 if the episode
    terminated)."""

    rewards: Series
    values: Series
    final: float
    ratios: Series | None = None
    """π_θ/π_b of whole chunks, where the advantage is `reevaluated`."""


@dataclass(frozen=True)
class Advantage:
    """A way to compute advantages.

    Args:
      episodes: (a ticket's episodes, the run's ObjectiveConfig) -> for each episode, the advantages
        and targets of its decisions.
      values: the policy has a value head, which learns the targets; advantages are divided by their
        running size. Without, they are used as they are.
      reevaluated: values and ratios are those of the learner's policy at the beginning of the step,
        not those of the policy that acted.
      by_episode: all episodes have equal weight. Otherwise all decisions have.
      group: fewest episodes of a ticket.
      on_device: (reward, value, following, ended, the run's ObjectiveConfig) -> advantages, all
        [t n], traceable: of chunks of n envs, of which `ended` [t n] ended an episode, and
        `following` is the value of what came next (0 where the episode terminated). None: placement
        "colocated" cannot compute them.
    """

    episodes: Callable[[Sequence[ValuedEpisode], Any], Sequence[AdvantageAndTarget]]
    values: bool = True
    reevaluated: bool = False
    by_episode: bool = False
    group: int = 1
    on_device: Callable[..., Float[Array, "t n"]] | None = None

    def __post_init__(self) -> None:
        if self.on_device is not None and not self.values:
            raise ValueError(
                "An Advantage with on_device needs values, as the policy of placement 'colocated' "
                "always has a value head; leave values true, or on_device out."
            )


def gae(
    rewards: Series, values: Series, final: float, discount: float, gae_lambda: float
) -> AdvantageAndTarget:
    """A_t = δ_t + γλ A_{t+1}, δ_t = R_t + γ V_{t+1} - V_t, target A_t + V_t (generalized advantage
    estimation, Schulman et al., arXiv 1506.02438, equation 16).

    Args:
      values: V_t, estimated when decision t was drawn.
      final: V after the last decision: 0 if the episode terminated.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    delta = rewards + discount * np.append(values[1:], final) - values
    advantage = _decaying(delta, np.full(len(delta), discount * gae_lambda))
    return AdvantageAndTarget(advantage, advantage + values)


def group(returns: Float[np.ndarray, " n"], scaled: bool = True) -> Float[np.ndarray, " n"]:
    """Advantages of n episodes from one start, relative to their mean return, in standard
    deviations of the group if `scaled` (GRPO, arXiv 2402.03300; arXiv 2503.20783 argues against
    it).

    If all returns are equal (to a millionth), the advantages are exactly 0, so that rounding is not
    scaled up to a standard deviation. Such a group teaches nothing, but its decisions count in the
    batch's mean.

    Raises:
      ValueError: fewer than two episodes.
    """
    returns = np.asarray(returns, np.float64)
    if len(returns) < 2:
        raise ValueError(
            f"A group of {len(returns)} has no episodes to compare; set rollout.group to at least "
            f"2, or objective.advantage to 'gae'."
        )
    if np.ptp(returns) <= 1e-6 * max(1.0, np.abs(returns).max()):
        return np.zeros(len(returns))
    centred = returns - returns.mean()
    return centred / centred.std() if scaled else centred


def vtrace(
    rewards: Series,
    values: Series,
    final: float,
    ratios: Series,
    discount: float,
    gae_lambda: float,
    truncation: float = 1.0,
) -> AdvantageAndTarget:
    """V-trace targets and the advantages of its policy gradient, in rlax's form (IMPALA, arXiv
    1802.01561, equation 1 and section 4.2; `gae_lambda` 1 is the paper's).

    With r_t = π_θ/π_b, ρ_t = min(ρ, r_t) and c_t = λ min(1, r_t):
    v_t = V_t + e_t, e_t = ρ_t (R_t + γ V_{t+1} - V_t) + γ c_t e_{t+1}, and
    A_t = R_t + γ (λ v_{t+1} + (1 - λ) V_{t+1}) - V_t, where v = V after the last decision. The
    policy term applies the weight min(ρ, r_t) of A_t, because it has the newest r_t.

    Args:
      values: V_t, estimated by the learner's value head.
      final: V after the last decision, from the same head: 0 if the episode terminated. With
        another head, the difference between the two heads would become an advantage of every
        episode that ran out of time.
      ratios: r_t of whole chunks.
      truncation: ρ.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    ratios, later = np.asarray(ratios, np.float64), np.append(values[1:], final)
    delta = np.minimum(truncation, ratios) * (rewards + discount * later - values)
    target = values + _decaying(delta, discount * gae_lambda * np.minimum(1.0, ratios))
    expected = gae_lambda * np.append(target[1:], final) + (1 - gae_lambda) * later
    return AdvantageAndTarget(rewards + discount * expected - values, target)


def gae_on_device(
    reward: Float[Array, "t n"],
    value: Float[Array, "t n"],
    following: Float[Array, "t n"],
    ended: Bool[Array, "t n"],
    discount: float,
    gae_lambda: float,
) -> Float[Array, "t n"]:
    """`gae`'s advantages of the chunks of n envs: A = δ + γλ A' within an episode,
    δ = R + γ V' - V, where V' is `following`."""
    delta = reward + discount * following - value
    decay = discount * gae_lambda * ~ended

    def back(later: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        advantage = chunk[0] + chunk[1] * later
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def _each_gae(episodes: Sequence[ValuedEpisode], config: Any) -> list[AdvantageAndTarget]:
    return [gae(e.rewards, e.values, e.final, config.discount, config.gae_lambda) for e in episodes]


def _grouped(episodes: Sequence[ValuedEpisode], config: Any) -> list[AdvantageAndTarget]:
    against = group(np.array([sum(e.rewards.tolist()) for e in episodes]))
    lengths = [len(e.rewards) for e in episodes]
    return [
        AdvantageAndTarget(np.full(n, a), np.zeros(n))
        for n, a in zip(lengths, against, strict=True)
    ]


def _each_vtrace(episodes: Sequence[ValuedEpisode], config: Any) -> list[AdvantageAndTarget]:
    bounds = config.discount, config.gae_lambda, config.truncation
    return [vtrace(e.rewards, e.values, e.final, np.asarray(e.ratios), *bounds) for e in episodes]


ADVANTAGES = {
    "gae": Advantage(
        _each_gae,
        on_device=lambda reward, value, following, ended, config: gae_on_device(
            reward, value, following, ended, config.discount, config.gae_lambda
        ),
    ),
    "group": Advantage(_grouped, values=False, by_episode=True, group=2),
}
VTRACE = Advantage(_each_vtrace, reevaluated=True)
"""Advantages of the objective of that name."""


def _decaying(x: Series, decay: Series) -> Series:
    """y_t = x_t + decay_t y_{t+1}."""
    y, later = np.empty_like(x), 0.0
    for t in reversed(range(len(x))):
        y[t] = later = x[t] + decay[t] * later
    return y
