"""Meta-World without us: its experts act from the same starts, as its own examples do, but for
hands that open away from the thing, as ours do.

python bare_metaworld.py FIRST_SEED EPISODES TASK ... prints [task, seed, success, length] of each
episode as JSON.
"""

import json
import sys

import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP


def main(first: int, episodes: int, tasks: list[str]) -> None:
    results = []
    for task in tasks:
        env = ALL_V3_ENVIRONMENTS[task]()
        env.seeded_rand_vec, env._freeze_rand_vec, env._set_task_called = True, False, True
        env._partially_observable = False
        del env.sawyer_observation_space
        for seed in range(first, first + episodes):
            env.seed(seed)
            observation, _ = env.reset()
            policy = ENV_POLICY_MAP[task]()
            for length in range(1, 501):  # noqa: B007
                action = np.clip(policy.get_action(observation), -1, 1)
                if action[3] == 0 and hasattr(policy, "_grab_effort"):
                    action[3] = -1
                observation, _, _, _, info = env.step(action)
                if info["success"]:
                    break
            results.append([task, seed, bool(info["success"]), length])
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
