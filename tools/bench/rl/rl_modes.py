"""One RL run on real threads for each mode of asynchrony: rates, and what everyone waited for."""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from models import Policy
from models.robot_policy import RobotPolicy
from parallel.mesh import make_mesh
from parallel.optimizer import select
from rl import flow_policy
from rl.config import (
    ColocatedConfig,
    FlowConfig,
    ObjectiveConfig,
    RlConfig,
    RolloutConfig,
)
from rl.device.colocated import Colocated
from rl.device.unroll import Traceable
from rl.host.actor import FlowActor
from rl.host.experience import micro_batches
from rl.host.loop import HostConfig, HostSystem, Inference, StepResult, run_host
from rl.host.placement import HostLearner, batch_sizes
from rl.host.starts import Curriculum
from rl.host.timeline import Summary, Timeline
from rl.host.weights import Weights
from rl.learner import FlowLearner, begin_learner
from sim.protocol import Slots, Spec
from tools.bench.models.random_policy import random_policy
from tools.bench.timing import timed
from tools.recipes.presets import TINY
from tools.recipes.rl_presets import TABLETOP_GRPO, TABLETOP_PPO, learner_of

MODEL = TINY.model
_SPANS = 200_000


class Mode(NamedTuple):
    """Mode of a run: which waits it avoids."""

    disaggregated: bool
    """Inference and learner have devices of their own; otherwise all do one, then the other."""
    ahead: bool = False
    """Level 2: rollouts run ahead of the learner by the run's `staleness`, otherwise by nothing."""
    by_slot: bool = False
    """Level 1: slots are answered as they report, otherwise when all have."""
    streamed: bool = False
    """Level 3: gradients of a step's tickets are computed as these complete, otherwise when all
    have."""


MODES = {
    "synchronous colocated": Mode(disaggregated=False),
    "synchronous disaggregated": Mode(disaggregated=True),
    "+ level 2": Mode(True, ahead=True),
    "+ levels 1-2": Mode(True, ahead=True, by_slot=True),
    "all three": Mode(True, ahead=True, by_slot=True, streamed=True),
}


@dataclass(frozen=True)
class BenchedRun:
    """A run that is repeated in every mode."""

    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(groups=8, group=4, slots=16, deadline=0.001)
    )
    micro: int = 64
    steps: int = 12
    """Learner steps that count."""
    warm: int = 3
    """Further steps before these, in which programs are compiled and what was acted meanwhile is
    learnt from; `staleness` more steps follow. Neither count."""
    horizon: int = 8
    picture: int = 48


def attributed(use: Summary) -> dict[str, Any]:
    """Shares of each kind of lane's time: busy, and idle by cause; and what would help."""
    return {
        "idle": {
            kind: {"busy": used.utilisation}
            | {cause: spent / used.seconds for cause, spent in used.idle.items()}
            for kind, used in use.kinds().items()
            if used.seconds
        },
        "advice": use.advice(),
    }


@dataclass(frozen=True)
class BenchedPolicy:
    """A policy of random weights for the observations of some slots, with what draws from it. It
    serves all modes, so that each program is compiled once."""

    spec: Spec
    load: BenchedRun

    @cached_property
    def policy(self) -> Policy:
        spec, load = self.spec, self.load
        config = MODEL.changed(chunks=1, horizon=load.horizon, image_size=load.picture)
        words = sorted({word for texts in spec.prompts for text in texts for word in text.split()})
        dims = len(spec.state_names), len(spec.action_names)
        return random_policy(config, words, spec.cameras, *dims, self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of batches that a run has."""
        return batch_sizes(self.load.rollout.slots or 1)

    @cached_property
    def actor(self) -> FlowActor:
        return FlowActor(RobotPolicy.in_suite(self.policy, self.spec), FlowConfig())

    def warm(self) -> None:
        """Compiles all sizes."""
        self.policy.warm(compute=lambda asked: self.actor.answer(self.params, asked))

    @cached_property
    def params(self) -> Any:
        """Parameters with the heads that RL adds."""
        key = jax.random.key(1)
        made = flow_policy.init(
            self.policy.model, self.policy.params, key, FlowConfig(), value=False
        )
        return jax.device_put(made, jax.local_devices()[0])


_OBJECTIVE = ObjectiveConfig(name="decoupled", advantage="group")


def run_mode(
    acting: BenchedPolicy, slots: Slots, mode: Mode, seeds: range = range(1_000_000)
) -> dict[str, Any]:
    """Learns on real threads with some of the levels of asynchrony; returns control steps and
    decisions learnt from a second, over the steps that count, the largest lag, and `attributed`.

    Colocated, policy and learner take turns on the first device; disaggregated, the learner has the
    second, if there is one.
    """
    load, device = acting.load, jax.local_devices()[-1 if mode.disaggregated else 0]
    rollout = load.rollout if mode.ahead else replace(load.rollout, staleness=0)
    steps = load.warm + load.steps + rollout.staleness
    learner = _learner(acting, device, steps)
    timeline = Timeline(_SPANS)
    moving = select(learner.optimizer, learner.state.params)[1]
    params = jax.tree.map(jax.numpy.copy, learner.state.params)
    weights = Weights(params, trained=moving)
    moments: list[tuple[float, Summary, StepResult]] = []
    run_host(
        HostSystem(
            [slots],
            [Inference(acting.actor, partial(jax.device_put, device=jax.local_devices()[0]))],
            HostLearner(learner),
            weights,
            Curriculum(
                0, slots.spec.tasks, seeds, tickets=rollout.groups, staleness=rollout.staleness
            ).start,
            lambda tickets: micro_batches(tickets, acting.policy.rows, _OBJECTIVE, load.micro),
        ),
        HostConfig(rollout, steps, each=mode.by_slot, stream=mode.streamed),
        on_step=lambda learnt: moments.append((time.monotonic(), timeline.summary(), learnt)),
        timeline=timeline,
    )
    (begun, before, _), (ended, after, _) = moments[load.warm - 1], moments[-1 - rollout.staleness]
    counted = [learnt for _, _, learnt in moments[load.warm : len(moments) - rollout.staleness]]
    acted = sum(one.env_steps for learnt in counted for one in learnt.outcomes.values())
    return {
        "env-steps/s": acted / (ended - begun),
        "samples/s": sum(sum(x.lags.values()) for x in counted) / (ended - begun),
        "lag": max(max(learnt.lags) for learnt in counted),
        **attributed(after.since(before)),
    }


def run_colocated(acting: BenchedPolicy, env: Traceable) -> dict[str, Any]:
    """Measures what `run_mode` does of `rl.device.colocated`. In a step, each environment acts as
    many chunks as an episode has at most."""
    load, policy = acting.load, acting.policy
    replan_steps, envs = load.rollout.replan_steps, load.rollout.slots or 1
    unroll = -(-env.max_steps // replan_steps)
    learning = replace(TABLETOP_PPO.learner, micro=max(1, envs * unroll // 4), warmup=0)
    config = RlConfig(
        placement="colocated",
        rollout=RolloutConfig(replan_steps=replan_steps),
        learner=learner_of(replace(TABLETOP_PPO, learner=learning), policy.model),
        colocated=ColocatedConfig(envs=envs, unroll=unroll),
    )
    mesh = make_mesh(devices=jax.local_devices()[:1])
    program, learner = (
        Colocated(policy, [env], config, mesh),
        begin_learner(policy, config, mesh),
    )
    states = program.begin()
    for _ in range(load.warm):
        states, _, _ = program.step(learner, states)
    acted = 0
    with timed() as took:
        for _ in range(load.steps):
            states, _, (outcomes,) = program.step(learner, states)
            acted += int(outcomes.steps)
    return {
        "env-steps/s": acted / took.wall,
        "samples/s": load.steps * envs * unroll / took.wall,
        "lag": 0,
        "idle": {"device": {"busy": 1.0}},
        "advice": "",
    }


def _learner(acting: BenchedPolicy, device: Any, steps: int) -> FlowLearner:
    """A learner with settings as users have them: the action expert learns, in several epochs."""
    config = replace(TABLETOP_GRPO, learner_steps=steps, flow=FlowConfig(), objective=_OBJECTIVE)
    config = replace(config, learner=learner_of(config, acting.policy.model))
    return begin_learner(acting.policy, config, make_mesh(devices=[device]))
