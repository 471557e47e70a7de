"""The MJX arm in real time behind a slow network, through our server with real-time chunking: it is
killed and started again, and messages are lost."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chiliad_client import Backoff, Connection, ControlLoop, LoopSettings, SafetyLimits
from models import Pi, Policy
from models.inputs.embodiment import Embodiment, Normalizer
from models.requests import with_committed
from sim.environments import arm_control
from sim.environments.arm import Arm
from sim.environments.arm_model import HOME, LIMITS, SPEEDS
from tests.helpers.client.bad_network import bad_network
from tests.helpers.client.log import CommandLog
from tests.helpers.models.processors import word_processor
from tests.helpers.tools.served import Running
from tools.recipes.presets import TINY
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics
from tools.serving.server import PolicyServer

HZ, HORIZON, PROMPT = 10, 20, "reach down"
GOAL = HOME + np.array((0.3, 0.5, 0.0, -0.1, 0.0, 0.2, 0.3))
MOST_AGE = 1.8
ROBOT = Embodiment("arm", Arm.cameras, Normalizer.identity(15), Normalizer.identity(8))


class TowardsGoal(Policy):
    """Chunks that lead the joints to `GOAL` by 0.02 rad a step, without computing anything."""

    def sample_actions(self, requests, noise=None):
        chunks = []
        for request in requests:
            joints, steps = request.state[:7], np.arange(1, HORIZON + 1)[:, None]
            way = GOAL - joints
            moved = joints + np.sign(way) * np.minimum(np.abs(way), 0.02 * steps)
            chunks.append(np.concatenate([moved, np.zeros((HORIZON, 1))], 1))
        lefts = [request.left for request in requests]
        return with_committed(np.stack(chunks).astype(np.float32), lefts)


@dataclass
class SimulatedArm:
    """An MJX arm whose joints are told, as a robot's owner would wrap it."""

    arm: Arm = field(default_factory=lambda: Arm("reach", 32, group_size=1, control="joint"))
    sent: list = field(default_factory=list)

    def __post_init__(self):
        self.state = self.arm.reset([3])
        self.act(self.hold(self.observe(), None))  # compiles before the clock runs
        self.sent.clear()

    def observe(self):
        seen = self.arm.observe(self.state)
        pictures, felt = np.asarray(seen.images)[0], np.asarray(seen.state)[0]
        return {
            "observation/front": pictures[0],
            "observation/wrist": pictures[1],
            "observation/state": felt,
        }

    def act(self, action):
        self.sent.append(np.array(action))
        physics = self.arm.physics_step(self.state.physics, jnp.asarray(action[None], jnp.float32))
        self.state = self.state._replace(physics=physics)

    def hold(self, seen, last):
        return np.append(seen["observation/state"][:7], 0.0) if last is None else last


@jax.jit
def tip(joints):
    return arm_control.tip(joints)[:3]


def forward(action, seen):
    return np.asarray(tip(jnp.asarray(action[:7], jnp.float32)))


@pytest.fixture(scope="module")
def policy():
    config = replace(TINY.model, horizon=HORIZON, state_dim=15)
    shape = (config.image_size, config.state_dim, config.action_dim, config.horizon)
    words = tuple(PROMPT.split())
    return TowardsGoal(
        Pi(config),
        None,
        word_processor(*shape, "token", words, (ROBOT,), text_limit=32),
        sizes=(1,),
    )


def ended(running):
    with suppress(RuntimeError):  # it has stopped before
        running.stop()
    running.join()


def troubles(log, network, first, start_another):
    """Yields False at each tick until the next trouble is due, and ends after the last."""
    yield from log.until("act", 10)
    network.dead = True
    network.cut()
    first.stop()
    yield from log.until("hold", 5)
    network.to = start_another()
    network.dead = False
    yield from log.until("act", 10)
    network.loses = True
    yield from log.until("hold", 5)
    network.loses = False
    yield from log.until("act", 10)


@pytest.mark.slow
def test_an_arm_is_driven_through_delay_a_killed_server_and_lost_messages(policy):
    robot, log = SimulatedArm(), CommandLog()
    start = forward(robot.hold(robot.observe(), None), {})
    step = np.append(SPEEDS / HZ, 1.0)
    low, high = np.append(LIMITS[:, 0], 0.0), np.append(LIMITS[:, 1], 1.0)
    wall = start[2] - 0.05  # the goal is below it
    limits = SafetyLimits(low, high, step, ([-1, -1, wall], [1, 1, 2]), forward)
    settings = LoopSettings(HZ, replan=6, max_age=MOST_AGE)
    with ExitStack() as opened:
        engine = opened.enter_context(
            Engine(policy, Metrics(), deadline=0, capacity=4, chunking="guided")
        )

        def started():
            running = Running(PolicyServer(engine))
            opened.callback(ended, running)
            return running

        first = started()
        network = opened.enter_context(bad_network(first.port, delay=0.1))
        server = opened.enter_context(
            Connection(network.url, backoff=Backoff(0.05, 0.5), answer_within=3.0)
        )
        server.wait(300)
        loop = ControlLoop(robot, server, PROMPT, settings, limits, recorder=log)
        plan = troubles(log, network, first, lambda: started().port)
        report = loop.run(seconds=300, until=lambda seen: next(plan, True))
    assert next(plan, "over") == "over"
    assert report.lost >= 1
    assert report.answers >= 5
    sent = np.array(robot.sent)
    assert (sent >= low).all()
    assert (sent <= high).all()
    assert (np.abs(np.diff(sent, axis=0)) <= step + 1e-9).all()
    assert min(forward(action, {})[2] for action in sent) >= wall
    assert report.limited["box"] > 0
    ticks = [command.tick for command in log.commands]
    assert len(set(ticks)) == len(ticks) == len(robot.sent)
    assert report.missed == ticks[-1] + 1 - len(ticks)
    acted = [command for command in log.commands if command.mode == "act"]
    assert max(command.age for command in acted) <= MOST_AGE * HZ
    for before, now in pairwise(log.commands):
        if now.mode == "hold":
            np.testing.assert_array_equal(now.sent, before.sent)
    assert forward(sent[-1], {})[2] < start[2] - 0.02
