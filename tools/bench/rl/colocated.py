"""RL with environments, policy and learner on the device: control steps learnt from per
second, by number of environments."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from models.files.terminal import Console
from sim.environments.device_slots import spec_of
from sim.suites import load_suite
from tools.bench.attempt import attempt, tell
from tools.bench.rl.rl_modes import BenchedPolicy, BenchedRun, run_colocated

_SUITE = "tabletop-lift"
_COUNTS, _GPU_COUNTS = (64, 128), (128, 512, 2048)


def run(
    console: Console, counts: Sequence[int] | None = None, tiny: bool = False
) -> dict[str, Any]:
    """Control steps a second of PPO on the tabletop; `ratio` is the rate with most environments
    over that with fewest."""
    on_gpu = jax.default_backend() == "gpu"
    counts = counts or ((4, 8) if tiny else _GPU_COUNTS if on_gpu else _COUNTS)
    load = BenchedRun(steps=1, warm=1, picture=16) if tiny else BenchedRun(steps=5, warm=2)
    suite = load_suite(_SUITE)
    assert suite.environment is not None
    env: Any = suite.environment(suite.tasks[0], load.picture)
    spec, found = spec_of(env, (load.picture, load.picture)), []
    for envs in counts:
        console.print(f"{_SUITE}: {envs} environments")
        # tiny acts once an episode, so that a step of the learner is short
        replan_steps = env.max_steps if tiny else load.rollout.replan_steps
        horizon = max(load.horizon, replan_steps)
        rollout = replace(load.rollout, slots=envs, replan_steps=replan_steps)
        benched = BenchedPolicy(spec, replace(load, rollout=rollout, horizon=horizon))
        found.append({"envs": envs, **attempt(partial(run_colocated, benched, env))})
        tell(console, {"unit": "env-steps/s", "rows": found})
    rates = [row.get("env-steps/s", math.nan) for row in found]
    return {
        "ratio": rates[-1] / rates[0],
        "ours": f"{rates[-1]:,.0f} env-steps/s learnt from with {counts[-1]} environments",
        "other": f"{rates[0]:,.0f} with {counts[0]}",
        "unit": "env-steps/s",
        "impl": env.impl,
        "rows": found,
    }
