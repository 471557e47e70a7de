"""Rewards of an episode's steps, by name or from a user's file. They are elementwise, in numpy or
JAX alike, so that they apply to a chunk on the host and to all envs on a device.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from models.files.own_file import by_name

Reward = Callable[[Any, Any], Any]
"""(suite, reached) -> reward, all f32 [...]: the suite's own reward of each step; 1 for the step at
which the goal is first reached, and 0 for all others."""

REWARDS: dict[str, Reward] = {
    "success": lambda suite, reached: reached,
    "suite": lambda suite, reached: suite,
}


def reward_of(name: str) -> Reward:
    """The reward that `rollout.reward` names. When called, it raises ValueError if a user's
    function returns another shape than it was given.

    Raises:
      ValueError, FileNotFoundError: there is no such reward, or its file is missing.
    """
    chosen = by_name(name, REWARDS, "rollout.reward")

    def reward(suite: Any, reached: Any) -> Any:
        found = chosen(suite, reached)
        if np.shape(found) != np.shape(suite):
            raise ValueError(
                f"rollout.reward is '{name}', whose function returns the shape {np.shape(found)} "
                f"for steps of shape {np.shape(suite)}; return one number for each step."
            )
        return found

    return reward
