"""A small policy on disk and the suite of points it acts in."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import jax

from models import Embodiment, Normalizer, Pi
from models.config import to_json
from parallel.checkpoint import CheckpointWriter
from rl.config import FlowConfig, LearnerConfig, ObjectiveConfig, RlConfig, RolloutConfig
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.models.processors import word_processor
from tests.helpers.sim.point_world import PointWorld
from tests.helpers.tools.small_run import MODEL

HOST = RlConfig(
    learner_steps=3,
    placement="host",
    flow=FlowConfig(euler_steps=2),
    objective=ObjectiveConfig(advantage="group"),
    rollout=RolloutConfig(suite="points", groups=2, group=2, staleness=0, slots=1, reward="suite"),
    learner=LearnerConfig(micro=8),
    eval_every=2,
    eval_episodes=2,
    save_every=2,
)


class Eager(PointWorld):
    """Rewards each step to the right too, so that any two episodes differ."""

    def step_chunk(self, state, actions):
        state, happened = super().step_chunk(state, actions)
        return state, happened._replace(reward=happened.reward + happened.state[..., 0])


class Noted(DeviceSlots):
    """Slots that tell which thread began episodes with which seeds."""

    seeds: ClassVar[dict[str, set[int]]] = {}

    def begin(self, slot, start):
        self.seeds.setdefault(threading.current_thread().name, set()).add(start.seed)
        super().begin(slot, start)


def open_slots(tasks, count, size):
    return Noted(Eager(), count)


POINTS = Suite("points", ("points",), 4, open_slots, first_seed=500, together=False, slots=4)


def save_policy(out: Path, cameras=("top",), seed=0) -> Path:
    """A random small policy for the points, as supervised training would leave one."""
    config = replace(MODEL, image_size=32, chunks=1)
    robot = Embodiment(
        "pointer", cameras, Normalizer((0.0,) * 2, (1.0,) * 2), Normalizer((0.0,) * 2, (0.5,) * 2)
    )
    processor = word_processor(
        image_size=32,
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        horizon=config.horizon,
        state_input=config.state_input,
        words=("go", "to", "the", "disc", "reach", "red", "green", "blue"),
        embodiments=(robot,),
        text_limit=32,
    )
    params = jax.jit(Pi(config).init)(jax.random.key(seed))
    assets = {"processor": to_json(processor)}
    with CheckpointWriter(out / "checkpoints", {"model": to_json(config)}, assets) as writer:
        writer.save(1, {"ema": params}, {})
    return out
