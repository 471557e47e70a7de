"""Evaluation, open loop, server and notebook give the same actions for the same observations: of a
policy of one moment and of one that reads four, over episodes, refused and lost messages."""

from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data.mixture.recorded import RecordedEpisode
from models import Policy
from models.layers.siglip import SiglipConfig
from models.robot_policy import RobotPolicy
from models.session import RobotSession
from sim.environments.device_slots import spec_of
from sim.protocol import Observation
from tests import own_smol
from tests.helpers.models.tiny_policy import ARM, tiny_policy
from tests.helpers.rl.point import Point
from tools.recipes import bound_recording
from tools.recipes.conditions import ActingInEpisodes
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics

WHOLE, GAPS = tuple(range(9)), (0, 1, 2, 4, 5, 8)
STATES = {"state": (-3, -2, -1, 0), "front": (-3,)}


@dataclass(frozen=True)
class Calm(Policy):
    """The tiny policy, whose chunks begin with no noise, so that keys make no difference."""

    def sample_actions(self, requests, noise=None):
        return super().sample_actions(requests, np.zeros((len(requests), 6, 4), np.float32))


@dataclass(frozen=True)
class LookingBack(Calm):
    """A policy that reads its past as numbers added to its state."""

    def session(self, number=0, *, continues=False):
        return RobotSession(number, observed=STATES, continues=continues)

    def _samples(self, observations, actions=None):
        plain = super()._samples([replace(one, past={}) for one in observations], actions)
        return [
            replace(sample, state=sample.state + digest(one.past))
            for sample, one in zip(plain, observations, strict=True)
        ]


@dataclass(frozen=True)
class Remembering(Calm):
    """A model that reads past states and pictures (tests/own_smol.py)."""


def digest(past):
    """A number that every value of the past changes."""
    weights = np.array([0.1, 0.3, 0.7, 1.3])
    picture = past["front"][0].astype(np.float64).mean() / 255
    return np.float32(weights @ np.stack(past["state"])[:, 0] + picture)


def made(kind):
    policy = tiny_policy().varied(sizes=(1,))
    if kind is Remembering:
        model = own_smol.SmolConfig(
            vision=SiglipConfig(width=16, depth=1, hidden=16, heads=2, patch=8),
            width=16, depth=1, heads=2, image_size=8, state_dim=3, action_dim=4, horizon=6,
        ).build()  # fmt: skip
        words = policy.processor.tokenizer
        processor = model.config.processor(policy.processor.embodiments, words)
        return kind(model, model.init(jax.random.key(0)), processor, sizes=(1,))
    return kind(policy.model, policy.params, policy.processor, sizes=(1,))


@pytest.fixture(
    scope="module", params=[Calm, LookingBack, Remembering], ids=["one", "four", "memory"]
)
def policy(request):
    return made(request.param)


def episode(number):
    """Pictures [t h w 3] and states [t s]."""
    rng = np.random.default_rng(number)
    pictures = rng.integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
    return pictures, rng.normal(size=(9, 3)).astype(np.float32)


def evaluated(policy, steps, *, replan=1, delay=None):
    """The chunk at each of the steps at which evaluation asks, of two episodes side by side."""
    robot = RobotPolicy.in_suite(policy, spec_of(Point(), (8, 8)))
    acting = ActingInEpisodes(robot, replan, delay)
    episodes, chunks = [episode(0), episode(1)], []
    for step in steps:
        images = np.stack([np.stack([e[0][step]] * 2) for e in episodes])
        states = np.stack([e[1][step] for e in episodes])
        keys = np.array([[0, step], [1, step]], np.uint32)
        acts = acting(Observation(images, states), ["push"] * 2, keys)
        sessions = [acting._sessions[number] for number in range(2)]
        if sessions[0].begun == step:
            chunks.append([session.chunk for session in sessions])
        at = step - sessions[0].begun
        for act, session in zip(acts, sessions, strict=True):
            np.testing.assert_array_equal(act, session.chunk[at : at + acting.steps])
    return np.moveaxis(np.array(chunks), 1, 0)


def served(policy, steps, *, committed=None):
    """The chunk for each message of two episodes over one connection; before each message comes
    one that is refused."""
    chunking = "none" if committed is None else "guided"
    found = []
    with Engine(policy, Metrics(), deadline=0, capacity=4, chunking=chunking) as engine:
        session = engine.join(1)
        for number in range(2):
            pictures, states = episode(number)
            last = None
            for step in steps:
                message = {"front": pictures[step], "state": states[step], "prompt": "push"}
                if last is not None and engine.metadata["chunking"]:
                    message |= {"executed": step - last}
                    message |= {} if committed is None else {"committed": committed}
                for wrong in ({"unknown": 1}, {"prompt": "push " * 200}):
                    with suppress(ValueError):
                        engine.read({**message, **wrong}, session)
                        pytest.fail("was not refused")
                chunk = engine.submit(engine.read(message, session)).result(300).actions
                found.append(session.answered(chunk))
                last = step
    return np.array(found).reshape(2, len(steps), *found[0].shape)


def in_a_notebook(policy, steps, *, committed=0):
    session, found = policy.session(3, continues=bool(committed)), []
    for number in range(2):
        pictures, states = episode(number)
        last = None
        for step in steps:
            seen = {"image": {"front": pictures[step]}, "state": states[step], "prompt": "push"}
            executed = None if last is None else step - last
            answer = policy.infer(seen, session=session, executed=executed, committed=committed)
            found.append(answer["actions"])
            last = step
        session.reset()
    return np.array(found).reshape(2, len(steps), *found[0].shape)


def recorded(policy, steps, monkeypatch):
    def read(*given):
        number, at = given[-2:]
        states = episode(number)[1][at].astype(np.float32)
        nothing = np.zeros((len(at), 6, 2), np.float32)
        return RecordedEpisode(
            number, at, states, nothing, nothing[..., 0] == 0, nothing[:, 0], ("push",) * len(at),
            np.zeros((9, 2), np.float32),
        )  # fmt: skip

    def pictures(dataset, reading, number, at):
        return [episode(number)[0][at]]

    monkeypatch.setattr(bound_recording, "read_recorded", read)
    monkeypatch.setattr(bound_recording, "read_pictures", pictures)
    recording = SimpleNamespace(
        policy=policy, robot=ARM, dataset=None, settings=None, reading=SimpleNamespace(step=1)
    )
    chunks = []
    for number in range(2):
        one = read(number, np.array(steps))
        shown = pictures(None, None, number, one.at)
        asked = list(bound_recording.recorded_requests(recording, one, shown))
        chunks.append([policy.sample_actions([request])[0] for request in asked])
    return np.array(chunks)


@pytest.mark.parametrize("steps", [WHOLE, GAPS], ids=["whole", "lost"])
def test_all_that_acts_gives_the_same_chunks(policy, steps, monkeypatch):
    wanted = evaluated(policy, steps)
    assert wanted.shape == (2, len(steps), 6, 2)
    np.testing.assert_array_equal(served(policy, steps), wanted)
    np.testing.assert_array_equal(in_a_notebook(policy, steps), wanted)
    if steps == WHOLE or not looks_back(policy):  # a recording lost nothing
        np.testing.assert_array_equal(recorded(policy, steps, monkeypatch), wanted)


def looks_back(policy):
    return policy.session().remembers


@pytest.mark.parametrize("kind", [LookingBack, Remembering])
def test_the_past_makes_a_difference_and_lost_messages_another(kind):
    four = evaluated(made(kind), WHOLE)
    lost = evaluated(made(kind), GAPS)
    np.testing.assert_array_equal(lost[:, :3], four[:, :3])
    assert np.abs(lost[:, 3] - four[:, 4]).max() > 1e-3


def test_a_policy_that_looks_back_sees_what_happens_while_it_acts_a_chunk(policy):
    """It is asked every third step, and sees the steps between."""
    steps = WHOLE if looks_back(policy) else (0, 3, 6)
    chunks = evaluated(policy, steps, replan=3)
    every = evaluated(policy, WHOLE)
    np.testing.assert_array_equal(chunks, every[:, ::3])


def test_chunks_are_continued_alike(policy):
    """Three steps are acted before the next question, one more before its answer."""
    steps = (0, 3, 6)
    wanted = evaluated(policy, WHOLE if looks_back(policy) else steps, replan=3, delay=1)
    np.testing.assert_array_equal(wanted[:, 1:, :1], wanted[:, :-1, 3:4])
    if not looks_back(policy):  # it would see the steps between, which nobody sends
        np.testing.assert_array_equal(served(policy, steps, committed=1), wanted)
        np.testing.assert_array_equal(in_a_notebook(policy, steps, committed=1), wanted)


def test_sessions_of_ended_episodes_are_dropped():
    robot = RobotPolicy.in_suite(made(Calm), spec_of(Point(), (8, 8)))
    acting = ActingInEpisodes(robot, 4)
    start = SimpleNamespace(key=lambda step: (7, step))
    seen = Observation(np.zeros((1, 2, 8, 8, 3), np.uint8), np.zeros((1, 3), np.float32))
    acting(seen, ["push"], np.array([[7, 0]], np.uint32))
    assert set(acting._sessions) == {7}
    acting.forget(start)
    assert not acting._sessions
