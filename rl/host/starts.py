"""Starts of training episodes, from which no policy is ever judged. Training on the states that a
benchmark evaluates is a known leak of RL for VLAs (SimpleVLA-RL's issue 34); here the two are
disjoint by construction, for the run's own evaluations and for later ones.
"""

from sim.protocol import EVAL_SEEDS
from sim.suite import Suite


def training_seeds(suite: Suite) -> range:
    """Seeds to learn from: those of recordings, up to the next that policies are judged by.

    Raises:
      ValueError: there are none.
    """
    judged = suite.first_seed if suite.first_seed > suite.recorded_from else EVAL_SEEDS.start
    seeds = range(suite.recorded_from, min(judged, EVAL_SEEDS.start))
    if not seeds:
        raise ValueError(
            f"Suite '{suite.name}' has no starts to learn from: recordings begin with seed "
            f"{suite.recorded_from} (recorded_from), and policies are judged from seed {judged} "
            f"on; choose a recorded_from below {EVAL_SEEDS.start}."
        )
    return seeds
