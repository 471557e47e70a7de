"""Starts of training episodes, which no evaluation of the run takes. Training on the states that a
benchmark evaluates is a known leak of RL for VLAs (SimpleVLA-RL's issue 34); here the two ranges
are disjoint by construction. Of a suite with a few fixed starts, `tools.evaluate` takes both.
"""

from sim.suite import Suite


def training_seeds(suite: Suite, evaluated: int) -> range:
    """Seeds to learn from: all before those that evaluation takes (`suite.first_seed` and on). A
    suite that has a few fixed starts, counted from 0, keeps the first `evaluated` for evaluation.

    Raises:
      ValueError: none are left.
    """
    if suite.first_seed > 0:
        return range(suite.first_seed)
    left = range(evaluated, suite.episodes)
    if not left:
        raise ValueError(
            f"Suite '{suite.name}' has {suite.episodes} starts a task and eval_episodes takes "
            f"{evaluated} of them, so none are left to learn from; lower eval_episodes."
        )
    return left
