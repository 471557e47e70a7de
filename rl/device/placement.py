"""Placement "colocated" as a run: the policy acts in envs on the devices, then learns from what it
did, in turns. It acts with the newest parameters, so all that it learns from has lag 0."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from models import Policy
from parallel.hosts.distributed import host_count
from parallel.mesh import make_mesh
from rl.config import RlConfig
from rl.device.colocated import Colocated
from rl.environment import describe
from rl.learner import begin_learner, restored, saved
from rl.records import TaskOutcome
from rl.run import step_metrics
from sim.environments.device_slots import spec_of
from sim.protocol import TRAIN_SEEDS
from sim.suite import Suite

_TRACED = ("pure_reset", "pure_observe", "pure_pictures", "pure_step")


class OnDevice:
    """See `rl.run.Placement`.

    Raises:
      ValueError: the suite's tasks are not environments on a device, or it evaluates seeds that are
        learnt from; the job has several hosts; or policy, environments and config do not fit
        together.
    """

    def __init__(
        self, policy: Policy, suite: Suite, tasks: tuple[str, ...], config: RlConfig
    ) -> None:
        if host_count() > 1:
            raise ValueError(
                f"placement 'colocated' learns on the devices of one host, but this job has "
                f"{host_count()} processes; start one (--num-processes 1), or set placement to "
                f"'host'."
            )
        if suite.environment is None:
            raise ValueError(
                f"placement 'colocated' takes tasks that are simulated on the device, such as "
                f"tabletop-lift, but suite '{suite.name}' has simulators of its own; set placement "
                f"to 'host'."
            )
        if suite.first_seed < TRAIN_SEEDS.stop:
            raise ValueError(
                f"Suite '{suite.name}' is evaluated on seeds from {suite.first_seed}, but "
                f"placement 'colocated' learns from seeds below {TRAIN_SEEDS.stop}; set the "
                f"suite's first_seed to {TRAIN_SEEDS.stop}, or placement to 'host'."
            )
        size = policy.model.config.edge
        envs: list[Any] = [suite.environment(task, size) for task in tasks]
        for env in envs:
            if missing := [name for name in _TRACED if not hasattr(env, name)]:
                raise ValueError(
                    f"The environment of suite '{suite.name}' has no {', '.join(missing)}, so it "
                    f"cannot be traced for placement 'colocated'; define them as in "
                    f"sim.environments.tabletop.Tabletop, or set placement to 'host'."
                )
        specs = [spec_of(env, (size, size)) for env in envs]
        self.environment = describe(specs, suite)
        self._tasks = tasks
        mesh = make_mesh(config.mesh, jax.local_devices())
        self._acting = Colocated(policy, envs, config, mesh)
        self._learner = begin_learner(policy, config, mesh)
        self._envs = self._acting.begin()

    def run(
        self,
        on_step: Callable[[dict[str, float]], None],
        should_stop: Callable[[], bool],
        until: int,
    ) -> None:
        learner = self._learner
        while learner.version < until and not should_stop():
            begin = time.perf_counter()
            self._envs, found, outcomes = self._acting.step(learner, self._envs)
            told = {
                task: TaskOutcome(*(np.asarray(x).item() for x in one))
                for task, one in zip(self._tasks, outcomes, strict=True)
            }
            on_step(step_metrics(found, told, time.perf_counter() - begin))

    def state(self) -> dict[str, Any]:
        return saved(self._learner.state) | {"envs": self._envs}

    def record(self) -> Any:
        return {}

    def restore(self, state: dict[str, Any], record: Any) -> None:
        self._learner.resume(restored(state))
        self._envs = state["envs"]
