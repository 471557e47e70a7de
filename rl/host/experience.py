"""Micro-batches with a fixed number of rows, made from tickets as these are completed, with the
worth of each decision. Nothing waits for a step's last ticket.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from models.inputs.packed_batch import PackedBatch, Sample
from rl.advantages import Advantage, ValuedEpisode
from rl.objectives import LIMIT, ObjectiveConfig, advantage_of
from rl.records import Decision, Experience, SampledChunk, Ticket, Trajectory

Pack = Callable[[list[Sample]], PackedBatch]
"""Function that packs samples, one per row, in one of few shapes, as a policy does."""
Evaluate = Callable[
    [Experience],
    tuple[Float[Array | np.ndarray, "n h a"], Float[Array | np.ndarray, " n"]],
]
"""log π and value, by the learner's policy, of chunks that other versions drew."""


class MicroBatch(NamedTuple):
    """Argument of `Learner.add`."""

    experience: Experience
    tickets: tuple[int, ...]
    """Tickets that its decisions come from."""


class _Row(NamedTuple):
    ticket: int
    decision: Decision
    advantage: float = 0.0
    target: float = 0.0
    weight: float = 1.0


def micro_batches(
    tickets: Iterable[Ticket],
    pack: Pack,
    config: ObjectiveConfig,
    size: int,
    evaluate: Evaluate | None = None,
) -> Iterator[MicroBatch]:
    """Yields a step's decisions in the order of `tickets`, `size` rows at a time, each batch as
    soon as it is full. The last batch is padded with rows of weight 0.

    Rows of padding repeat a real row, so that no model gets an empty observation. All decisions
    have equal weight. With group advantages, all episodes have equal weight instead (the 1/|o| of
    GRPO's objective, arXiv 2402.03300, equation 3): a failing episode runs to the end, and its many
    decisions would outweigh the few that made another episode succeed.

    Args:
      tickets: those of one step; the iterable may wait for each.
      evaluate: evaluates the policy at the beginning of the step, for V-trace and other advantages
        that are `reevaluated`.

    Raises:
      ValueError: `evaluate` is missing, or a reward, value or log-probability is not
        finite; names ticket, episode and decision.
    """
    waiting: list[_Row] = []
    for ticket in tickets:
        waiting += _assessed(ticket, pack, config, size, evaluate)
        while len(waiting) >= size:
            yield _batch(waiting[:size], pack, size)
            waiting = waiting[size:]
    if waiting:
        yield _batch(waiting, pack, size)


def _assessed(
    ticket: Ticket, pack: Pack, config: ObjectiveConfig, size: int, evaluate: Evaluate | None
) -> list[_Row]:
    _check_finite(ticket)
    chosen, number = advantage_of(config), ticket.number
    episodes = [_episode(number, t, pack, chosen, size, evaluate) for t in ticket.trajectories]
    found = chosen.episodes(episodes, config)
    lengths = [len(t.decisions) for t in ticket.trajectories]
    if [(len(one.advantage), len(one.target)) for one in found] != [(n, n) for n in lengths]:
        raise ValueError(
            f"objective.advantage is '{config.advantage}', which does not return an advantage and "
            f"a target for each decision of each episode; ticket {number} has episodes of "
            f"{lengths} decisions."
        )
    weights = [1 / n if chosen.by_episode else 1.0 for n in lengths]
    return [
        _Row(number, decision, float(advantage), float(target), weight)
        for trajectory, one, weight in zip(ticket.trajectories, found, weights, strict=True)
        for decision, advantage, target in zip(trajectory.decisions, *one, strict=True)
    ]


def _episode(
    number: int,
    trajectory: Trajectory,
    pack: Pack,
    chosen: Advantage,
    size: int,
    evaluate: Evaluate | None,
) -> ValuedEpisode:
    decisions = trajectory.decisions
    rewards = np.array([float(d.reward.sum()) for d in decisions])
    if not chosen.reevaluated:
        final = 0.0 if trajectory.terminated else trajectory.final_value
        return ValuedEpisode(rewards, np.array([float(d.drawn.value) for d in decisions]), final)
    if evaluate is None:
        raise ValueError(
            "objective.name is 'vtrace', or another whose advantages need the learner's policy; "
            "pass Learner.evaluate to micro_batches."
        )
    rows = [_Row(number, d) for d in decisions]
    if not trajectory.terminated:
        assert trajectory.last is not None
        rows.append(_Row(number, replace(decisions[-1], sample=trajectory.last)))
    values, ratios = _evaluated(rows, pack, size, evaluate)
    count = len(decisions)
    final = 0.0 if trajectory.terminated else float(values[count])
    return ValuedEpisode(rewards, values[:count], final, ratios[:count])


def _evaluated(
    rows: Sequence[_Row], pack: Pack, size: int, evaluate: Evaluate
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Values, and ratios of whole chunks, of the learner's policy."""
    values, ratios = [], []
    for first in range(0, len(rows), size):
        experience = _batch(rows[first : first + size], pack, size).experience
        log_prob, value = (np.asarray(x, np.float64) for x in evaluate(experience))
        gap = np.where(experience.acted, log_prob - experience.drawn.log_prob, 0).sum((1, 2))
        values.append(value)
        ratios.append(np.exp(np.clip(gap, -LIMIT, LIMIT)))
    return np.concatenate(values)[: len(rows)], np.concatenate(ratios)[: len(rows)]


def _batch(rows: Sequence[_Row], pack: Pack, size: int) -> MicroBatch:
    filled = [*rows, *[rows[-1]] * (size - len(rows))]
    decisions = [row.decision for row in filled]
    experience = Experience(
        batch=pack([d.sample for d in decisions]),
        drawn=SampledChunk(*(np.stack(x) for x in zip(*(d.drawn for d in decisions), strict=True))),
        advantage=np.array([row.advantage for row in filled], np.float32),
        target=np.array([row.target for row in filled], np.float32),
        version=np.array([d.version for d in decisions], np.int32),
        weight=np.array([row.weight for row in rows] + [0.0] * (size - len(rows)), np.float32),
    )
    return MicroBatch(experience, tuple(dict.fromkeys(row.ticket for row in rows)))


def _check_finite(ticket: Ticket) -> None:
    for trajectory in ticket.trajectories:
        where = f"Ticket {ticket.number}, episode {trajectory.member} of {trajectory.start.task}"
        if not trajectory.terminated and not np.isfinite(trajectory.final_value):
            raise ValueError(
                f"{where} (seed {trajectory.start.seed}) ended with the value "
                f"{trajectory.final_value}; expected a finite number, so check the value head."
            )
        for i, decision in enumerate(trajectory.decisions):
            found = {
                "reward": decision.reward,
                "value": decision.drawn.value,
                "log_prob": decision.drawn.log_prob[decision.sample.action_mask],
            }
            bad = next((k for k, x in found.items() if not np.isfinite(x).all()), None)
            if bad is not None:
                raise ValueError(
                    f"{where} (seed {trajectory.start.seed}), decision {i}, has {bad} "
                    f"{np.asarray(found[bad]).ravel()[:8]}; expected finite numbers, so check "
                    f"{'the environment' if bad == 'reward' else 'the policy that acted'}."
                )
