"""Settings of an RL run, besides the initial policy and the suite's own. Its objective and
advantage are set in objectives.py, and its rewards are named in rewards.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from models.files.bounds import check_finite, check_least
from models.files.own_file import check_choice
from parallel.mesh import MeshConfig
from parallel.monitor.step_trace import traced_steps
from parallel.optimizer import SCHEDULE_FREE, OptimizerConfig
from rl.objectives import ObjectiveConfig
from rl.rewards import REWARDS


@dataclass(frozen=True)
class FlowConfig:
    """Random sampling of chunks from a flow policy (`rl.flow_policy`).

    `noise`: "sde" keeps the marginals of the flow (Flow-GRPO, arXiv 2505.05470), "cps" preserves
    the interpolant's coefficients, and "learned" takes its width from a head of the action expert
    (ReinFlow, arXiv 2505.22094), between the standard deviations `least` and `most`. `level` is the
    `a` of "sde" and "cps". `euler_steps`: number of denoising steps. `random`: the steps with
    noise, either "one", drawn separately for each chunk (the others are plain Euler steps), or
    "all".
    """

    noise: Literal["sde", "cps", "learned"] = "sde"
    level: float = 0.5
    euler_steps: int = 4
    random: Literal["one", "all"] = "one"
    least: float = 0.08
    most: float = 0.16

    def __post_init__(self) -> None:
        fewest = 2 if self.noise == "cps" else 1
        if self.euler_steps < fewest:
            raise ValueError(
                f"flow.euler_steps is {self.euler_steps}; '{self.noise}' needs at least {fewest}, "
                "as the last step of 'cps' adds no noise."
            )
        if not 0 <= self.level < math.inf or (self.noise == "cps" and self.level > 1):
            raise ValueError(
                f"flow.level is {self.level}; expected at least 0, and at most 1 for 'cps'."
            )
        if not 0 < self.least <= self.most < math.inf:
            raise ValueError(
                f"flow.least and flow.most are {self.least} and {self.most}; expected standard "
                f"deviations above 0, with flow.least not above flow.most."
            )


@dataclass(frozen=True)
class RolloutConfig:
    """Settings for acting, and for how far it runs ahead of the learner.

    A ticket is a group of `group` episodes from one start (1 for "gae"); `groups` tickets make one
    learner step. Step s learns from tickets s·groups to (s + 1)·groups - 1. None of these begins
    before the policy has had s - `staleness` updates, so none is ever older than `staleness` when
    the learner uses it.
    """

    suite: str = "tabletop-lift"
    tasks: tuple[str, ...] = ()
    groups: int = 32
    group: int = 1
    staleness: int = 1
    slots: int | None = None
    curriculum: Literal["even", "signal"] = "even"
    """Share of several tasks in each step: equal, or larger the more of a task's groups had both
    successes and failures lately (`rl.host.starts.Curriculum`)."""
    redraws: int = 0
    """Other starts to try, at most, for a ticket whose episodes all succeed or all fail, from which
    groups learn nothing. They begin in time for the same step, so the bound on staleness holds."""
    replan_steps: int = 4
    reward: str = "success"
    """Reward: 1 at the step at which the goal is first reached ("success"), the suite's own
    ("suite"), or `path/to/file.py:function`, which runs your file; see `rl.rewards.Reward`."""
    deadline: float = 0.02
    """Longest time, in seconds, that an observation waits for others to be answered with."""
    inference_devices: int = 0
    """Number of a process's own devices that only act, each for its share of the slots; the others
    only learn. With 0, all devices learn and the first also acts."""
    snapshots: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained parameters in the actors' copies. bfloat16 halves the traffic of each
    version. The recorded log-probabilities are then those of the rounded policy, so ratios start
    close to 1 but not at it: use "decoupled", "tis" or "aipo", which weight by them."""

    def __post_init__(self) -> None:
        check_choice(self.reward, REWARDS, "rollout.reward")
        at_least(self, "rollout", groups=1, group=1, staleness=0, slots=1, replan_steps=1)
        at_least(self, "rollout", redraws=0)
        if self.group < 2 and (self.redraws or self.curriculum == "signal"):
            raise ValueError(
                f"rollout.curriculum is '{self.curriculum}' and rollout.redraws is {self.redraws}, "
                f"but rollout.group is {self.group}: one episode tells nothing of what its start "
                f"can teach. Leave both at their defaults, or act groups of 8."
            )
        at_least(self, "rollout", deadline=0, inference_devices=0)
        check_finite("rollout", self, "deadline")


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of the learner.

    `micro`: number of decisions whose gradient is computed at a time, as they arrive, over all
    devices. Each of the `epochs` over a step's decisions makes `minibatches` updates, except the
    first: it learns while decisions arrive, and makes one update. In the first `warmup` steps only
    the value head learns.

    With `keep_observed`, each decision's observation is read once a step, and what is computed from
    it is kept on the devices for all epochs (18 MB a decision for π0.5). This gives the same
    gradients at a lower cost, where the optimizer's rates freeze all that reads observations.
    """

    micro: int = 64
    epochs: int = 1
    minibatches: int = 1
    warmup: int = 0
    keep_observed: bool = False
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=1e-4,
            schedule="constant",
            warmup_steps=0,
            weight_decay=0.0,
            ema_decay=0.0,
        )
    )

    def __post_init__(self) -> None:
        at_least(self, "learner", micro=1, epochs=1, minibatches=1, warmup=0)
        if self.optimizer.name == SCHEDULE_FREE:
            raise ValueError(
                f"learner.optimizer.name is '{SCHEDULE_FREE}', which keeps an average of the "
                f"parameters for acting, but RL must learn with the same parameters that act; "
                f"choose adamw or muon."
            )


@dataclass(frozen=True)
class ColocatedConfig:
    """Settings of placement "colocated": the number of `envs`, each of which acts `unroll` chunks
    in a learner step."""

    envs: int = 128
    unroll: int = 4

    def __post_init__(self) -> None:
        at_least(self, "colocated", envs=1, unroll=1)


@dataclass(frozen=True)
class DisaggregatedConfig:
    """Workers of placement "disaggregated", each a process on a host that has room for it.

    `simulators` workers share `rollout.slots`, and `inference` workers share the inference (0: this
    process answers, as in "host"). `patience`: seconds after which a worker that does not answer is
    replaced. `inference_gpus`: GPUs of each inference worker (None: one, if the learner has GPUs).
    """

    simulators: int = 2
    inference: int = 1
    simulator_cpus: float = 1.0
    simulator_gpus: float = 0.0
    inference_cpus: float = 1.0
    inference_gpus: float | None = None
    patience: float = 300.0

    def __post_init__(self) -> None:
        at_least(self, "disaggregated", simulators=1, inference=0, patience=1, simulator_cpus=0)
        at_least(self, "disaggregated", simulator_gpus=0, inference_cpus=0, inference_gpus=0)
        check_finite("disaggregated", self, "patience")


@dataclass(frozen=True)
class RlConfig:
    """Everything that decides a run of `tools.rl`.

    The checkpoints that stay are the last `keep`, those of every `keep_every`-th step (0: none),
    and, with `keep_best` "success", the one that succeeded most often from held-out starts.
    """

    learner_steps: int = 100
    seed: int = 0
    placement: Literal["colocated", "host", "disaggregated"] = "host"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Axes of the devices that learn, as in tools.train."""
    flow: FlowConfig = field(default_factory=FlowConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    disaggregated: DisaggregatedConfig = field(default_factory=DisaggregatedConfig)
    held_out_tasks: tuple[str, ...] = ()
    """Tasks that are evaluated beside those learnt, and never learnt from."""
    eval_every: int = 20
    eval_episodes: int = 64
    save_every: int = 50
    keep: int = 3
    keep_every: int = 0
    keep_best: Literal["", "success"] = ""
    profile: str = ""
    """A:B traces steps A to B - 1, counted from 0, into the run's folder."""

    def __post_init__(self) -> None:
        at_least(self, "", learner_steps=1, seed=0, eval_every=0, eval_episodes=1, save_every=0)
        at_least(self, "", keep=1, keep_every=0)
        traced_steps(self.profile, self.learner_steps, "profile")
        rollout, spread = self.rollout, self.disaggregated
        if self.flow.level == 0 and self.flow.noise != "learned":
            raise ValueError(
                f"flow.level is 0, so chunks are not random and the policy would learn nothing; "
                f"raise it, for example to {FlowConfig().level}, or set flow.noise to 'learned'."
            )
        if found := self._unread():
            raise ValueError(
                f"placement is '{self.placement}', which ignores {', '.join(found)}; leave these "
                f"options at their defaults, or choose another placement."
            )
        if self.placement == "disaggregated" and spread.inference and rollout.inference_devices:
            raise ValueError(
                f"rollout.inference_devices is {rollout.inference_devices}, but the policy acts in "
                f"disaggregated.inference = {spread.inference} workers; set one of them to 0."
            )

    def _unread(self) -> list[str]:
        """Options that the placement does not read and that differ from their defaults."""
        found = []
        for where, names in _UNREAD[self.placement].items():
            part: Any = attrgetter(where)(self)
            usual = (
                type(part)() if part is not self.learner.optimizer else LearnerConfig().optimizer
            )
            for name in names:
                if (value := getattr(part, name)) != getattr(usual, name):
                    found.append(f"{where}.{name} = {value}")
        return found


def at_least(config: object, where: str, **least: float) -> None:
    """Raises ValueError unless these fields of a config that is called `where` have these values or
    higher ones; None is left out."""
    prefix = f"{where}." if where else ""
    found = {name: (getattr(config, name), smallest) for name, smallest in least.items()}
    check_least({f"{prefix}{name}": pair for name, pair in found.items() if pair[0] is not None})


def _names(part: type[Any]) -> Sequence[str]:
    return [field.name for field in fields(part)]


_UNREAD: dict[str, dict[str, Sequence[str]]] = {
    "host": {"colocated": _names(ColocatedConfig), "disaggregated": _names(DisaggregatedConfig)},
    "disaggregated": {"colocated": _names(ColocatedConfig)},
    "colocated": {
        "disaggregated": _names(DisaggregatedConfig),
        "rollout": (
            *("groups", "group", "staleness", "curriculum", "redraws"),
            *("deadline", "inference_devices", "snapshots"),
        ),
    },
}
"""Options that a placement does not read, by their part of the config."""
