"""Starts of training episodes, from which no policy is ever judged. Training on the states that a
benchmark evaluates is a known leak of RL for VLAs (SimpleVLA-RL's issue 34); here the two are
disjoint by construction, for the run's own evaluations and for later ones.
"""

from sim.protocol import EVAL_SEEDS
from sim.suite import Suite


def training_seeds(suite: Suite, evaluated: int) -> range:
    """Seeds to learn from: those of recordings, up to those that policies are judged by. A suite
    whose few fixed starts are all that it has keeps the first `evaluated` for the run's
    evaluations.

    Raises:
      ValueError: none are left.
    """
    judged = suite.first_seed if suite.first_seed > suite.recorded_from else EVAL_SEEDS.start
    if suite.first_seed != suite.recorded_from:
        return range(suite.recorded_from, min(judged, EVAL_SEEDS.start))
    left = range(suite.first_seed + evaluated, suite.first_seed + suite.episodes)
    if not left:
        raise ValueError(
            f"Suite '{suite.name}' has {suite.episodes} starts a task and eval_episodes takes "
            f"{evaluated} of them, so none are left to learn from; lower eval_episodes."
        )
    return left
