"""Gymnasium environments for tests of what those that gymnasium ships do not show."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Seen(gymnasium.Env):
    """Two nested pictures and numbers; succeeds once the sum of all actions passes 3."""

    observation_space = spaces.Dict(
        {
            "pixels": spaces.Dict(
                {
                    "top": spaces.Box(0, 255, (40, 80, 3), np.uint8),
                    "wrist": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                }
            ),
            "agent_pos": spaces.Box(-np.inf, np.inf, (2, 2)),
            "floor": spaces.Discrete(4),
        }
    )
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.total = 0.0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.total += action.sum()
        return self._observe(), 0.0, False, False, {"is_success": self.total > 3}

    def _observe(self):
        pixels = {"top": np.full((40, 80, 3), 100, np.uint8), "wrist": np.eye(8, dtype=np.uint8)}
        pixels["wrist"] = np.repeat(pixels["wrist"][..., None] * 200, 3, 2)
        return {"pixels": pixels, "agent_pos": self.place, "floor": 2}


class Unseen(Seen):
    """Observes text."""

    observation_space = spaces.Text(5)


class Dotted(Seen):
    """Names its parts as datasets do, ends by itself never, and rewards every step."""

    observation_space = spaces.Dict(
        {
            "observation.images.top": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "observation": spaces.Dict({"a.b": spaces.Box(-1, 1, (2,))}),
        }
    )

    def step(self, action):
        return self._observe(), 1.0, False, False, {}

    def _observe(self):
        picture = np.full((8, 8, 3), 7, np.uint8)
        numbers = np.array([0.25, 0.5], np.float32)
        return {"observation.images.top": picture, "observation": {"a.b": numbers}}


gymnasium.register("Seen-v0", Seen, max_episode_steps=20)
gymnasium.register("Unseen-v0", Unseen)
gymnasium.register("Dotted-v0", Dotted, reward_threshold=1000.0)
gymnasium.register("Hard-v0", Dotted, reward_threshold=1001.0)
