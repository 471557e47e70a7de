"""Generations of a population."""

from parallel.optimizer import OptimizerConfig
from rl.config import LearnerConfig, RlConfig
from rl.population.population import Generation

RATE, CLIP = "learner.optimizer.learning_rate", "objective.clip"
CONFIG = RlConfig(
    learner_steps=6,
    learner=LearnerConfig(optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=0)),
    eval_every=2,
    save_every=3,
)


def generation(*rates, step=0, success=None):
    tuned = tuple({RATE: rate, CLIP: 0.2} for rate in rates)
    return Generation(step, success or (0.0,) * len(rates), tuple(range(len(rates))), tuned)
