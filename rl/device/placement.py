"""Placement "colocated" as a run: one call of the device program is a step."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from models import Policy
from rl import flow_policy
from rl.config import RlConfig
from rl.device.colocated import Colocated
from rl.environment import describe
from rl.learner import Diverged
from sim.environments.device_slots import spec_of
from sim.protocol import TRAIN_SEEDS
from sim.suite import Suite

_TRACED = ("pure_reset", "pure_observe", "pure_pictures", "pure_step")


class OnDevice:
    """See `rl.run.Placement`.

    Raises:
      ValueError: the suite is not an environment on a device, or evaluates seeds that are learnt
        from; the run has several tasks; or policy, environment and config do not fit together.
    """

    def __init__(
        self, policy: Policy, suite: Suite, tasks: tuple[str, ...], config: RlConfig
    ) -> None:
        if suite.environment is None or len(tasks) > 1:
            raise ValueError(
                f"placement 'colocated' takes one task that is simulated on the device, such as "
                f"tabletop-lift, not {list(tasks)} of suite '{suite.name}'; set placement to "
                f"'host'."
            )
        if suite.first_seed < TRAIN_SEEDS.stop:
            raise ValueError(
                f"Suite '{suite.name}' is evaluated on seeds from {suite.first_seed}, but "
                f"placement 'colocated' learns from seeds below {TRAIN_SEEDS.stop}; set the "
                f"suite's first_seed to {TRAIN_SEEDS.stop}, or placement to 'host'."
            )
        env: Any = suite.environment(tasks[0], policy.model.config.edge)
        if missing := [name for name in _TRACED if not hasattr(env, name)]:
            raise ValueError(
                f"The environment of suite '{suite.name}' has no {', '.join(missing)}, so it "
                f"cannot be traced for placement 'colocated'; define them as in "
                f"sim.environments.tabletop.Tabletop, or set placement to 'host'."
            )
        size = policy.model.config.edge
        self.environment = describe(spec_of(env, (size, size)), suite)
        self._program = Colocated(policy, env, config)
        self._decisions = config.colocated.envs * config.colocated.unroll
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        params = flow_policy.init(policy.model, policy.params, key, config.flow)
        # committed, as every step leaves it; any other state would be compiled for again
        self._state = jax.device_put(self._program.init(params), jax.local_devices()[0])

    def run(
        self,
        on_step: Callable[[dict[str, float]], None],
        should_stop: Callable[[], bool],
        until: int,
    ) -> None:
        while int(self._state.step) < until and not should_stop():
            begin = time.perf_counter()
            self._state, on_device = self._program.step(self._state)
            found = {name: float(value) for name, value in jax.device_get(on_device).items()}
            if not found.pop("finite"):
                raise Diverged(
                    f"Step {int(self._state.step) - 1} has loss {found['loss']} and gradient norm "
                    f"{found['grad_norm']}, which must be finite; it was not saved. Start another "
                    f"run from the last checkpoint (--checkpoint) with a lower "
                    f"learner.optimizer.learning_rate."
                )
            seconds = time.perf_counter() - begin
            episodes, successes = found["episodes"], found.pop("successes")
            found["env_steps"] = found.pop("steps")
            found["env_steps_per_second"] = found["env_steps"] / seconds
            found |= {"step_seconds": seconds, "lag": 0.0, "lag/0": self._decisions}
            on_step(found | ({"success": successes / episodes} if episodes else {}))

    def state(self) -> dict[str, Any]:
        policy = self._state.params["policy"]
        heads = {name: x for name, x in self._state.params.items() if name != "policy"}
        return {"ema": policy, "rl": replace(self._state, params=heads)}

    def record(self) -> Any:
        return {}

    def restore(self, state: dict[str, Any], record: Any) -> None:
        rest = state["rl"]
        self._state = replace(rest, params={"policy": state["ema"], **rest.params})
