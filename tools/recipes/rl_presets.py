"""The RL runs that the project ships as presets; `tools.rl` takes one by name, or an `RlConfig` in
a user's file as `path/to/file.py:NAME`.
"""

from dataclasses import replace

from models.model import Model, groups_of
from parallel.optimizer import with_groups
from rl.config import (
    ColocatedConfig,
    FlowConfig,
    LearnerConfig,
    ObjectiveConfig,
    RlConfig,
    RolloutConfig,
)
from tools.recipes.presets import find_preset

_ACTION = (("@action", 1.0), (".", 0.0))
"""Trains the part that draws chunks, and freezes everything that is computed before it, so that no
gradient has to pass through the frozen part."""

_LEARNER = LearnerConfig(epochs=4, minibatches=4, keep_observed=True)
_OPTIMIZER = replace(_LEARNER.optimizer, learning_rate=2e-4)

TABLETOP_PPO = RlConfig(
    learner_steps=100,
    placement="colocated",
    flow=FlowConfig(level=0.35, random="all"),
    objective=ObjectiveConfig(name="ppo", advantage="gae", discount=0.9, gae_lambda=0.9),
    rollout=RolloutConfig(suite="tabletop-lift"),
    learner=replace(
        _LEARNER,
        micro=288,
        warmup=2,
        optimizer=replace(_OPTIMIZER, rate_factors=(("^value/", 10.0), *_ACTION)),
    ),
    colocated=ColocatedConfig(envs=128, unroll=9),
    eval_every=20,
    save_every=20,
)
"""PPO with a value head in MJX: environments, policy and learner on the device."""

TABLETOP_GRPO = RlConfig(
    learner_steps=250,
    placement="host",
    objective=ObjectiveConfig(name="decoupled", advantage="group"),
    rollout=RolloutConfig(suite="tabletop-lift", groups=16, group=8, staleness=1, slots=128),
    learner=replace(
        _LEARNER, optimizer=replace(_OPTIMIZER, schedule="linear", rate_factors=_ACTION)
    ),
    eval_every=20,
    save_every=20,
)
"""GRPO with threads for acting and learning; no value head."""

METAWORLD_GRPO = RlConfig(
    learner_steps=100,
    placement="host",
    objective=ObjectiveConfig(name="decoupled", advantage="group"),
    rollout=RolloutConfig(
        suite="metaworld", tasks=("reach-v3",), groups=8, group=8, staleness=1, replan_steps=8
    ),
    learner=TABLETOP_GRPO.learner,
    eval_every=10,
    eval_episodes=50,
    save_every=10,
)
"""GRPO on Meta-World's own success signal, each simulator in a process."""

RL_PRESETS = {
    "tabletop-ppo": TABLETOP_PPO,
    "tabletop-grpo": TABLETOP_GRPO,
    "metaworld-grpo": METAWORLD_GRPO,
}


def learner_of(config: RlConfig, model: Model) -> LearnerConfig:
    """Settings of a run's learner for this model; its rates may name the model's groups of
    parameters.

    Raises:
      ValueError: the model has no such group.
    """
    optimizer = with_groups(config.learner.optimizer, groups_of(model), "policy/")
    return replace(config.learner, optimizer=optimizer)


def load_rl_preset(name: str) -> RlConfig:
    """A shipped preset by name, or `path/to/file.py:NAME` for an `RlConfig` in a user's file.

    Raises:
      ValueError: there is no preset of that name, or the name in the file is no RlConfig.
      FileNotFoundError: the file is missing.
    """
    return find_preset(name, RL_PRESETS, RlConfig)
