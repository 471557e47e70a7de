"""The actor's answers: one for each request, of its own alone, in the robot's units."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from models.batcher import Batcher
from models.robot_policy import RobotPolicy
from rl import flow_policy
from rl.config import FlowConfig
from rl.host.actor import FlowActor
from tests.helpers.models.tiny_policy import KEYS, PROMPTS, openpi, tiny_policy

POLICY = tiny_policy().varied(sizes=(4,))
ROBOT = RobotPolicy(POLICY, "arm", (0,))
LONG = " ".join(["push"] * 40)


@pytest.fixture(scope="module")
def actor():
    return FlowActor(ROBOT, FlowConfig(euler_steps=2))


@pytest.fixture(scope="module")
def params(actor):
    key = jax.random.key(5)
    return flow_policy.init(POLICY.model, POLICY.params, key, actor.flow)


def requests():
    return POLICY.prepare({**openpi(5), "prompt": [*PROMPTS[:4], LONG]}, KEYS)


def assert_same(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_requests_answer_is_its_own_to_the_bit_whatever_it_is_asked_with(actor, params):
    asked = requests()
    whole = actor.answer(params, asked)
    assert [answer.actions.shape for answer in whole] == [(6, 2)] * 5
    assert whole[0].drawn.before.shape == (1, 6, 4)
    for order in ([4, 0], [2], [3, 4, 1, 0, 2]):
        answers = actor.answer(params, [asked[i] for i in order])
        for i, answer in zip(order, answers, strict=True):
            assert_same(answer, whole[i])
    assert len({answer.actions.tobytes() for answer in whole}) == 5


@pytest.mark.slow
def test_answers_are_draws_in_the_robots_units(actor, params):
    asked = requests()
    answers = actor.answer(params, asked)
    ((at, count, batch), *_) = POLICY.batches(asked)
    assert (at.tolist(), count) == ([0, 1, 2, 3], 4)
    draw = jax.jit(partial(flow_policy.draw, POLICY.model, config=actor.flow))
    drawn = jax.device_get(draw(params, batch, KEYS[:4]))
    for i in range(4):
        robot = drawn.actions[i, :, :2] * (2.0, 0.5) + (0.5, -1.0)
        np.testing.assert_allclose(answers[i].actions, robot, atol=1e-5)
        np.testing.assert_allclose(answers[i].drawn.log_prob, drawn.log_prob[i], atol=1e-5)


def test_without_noise_answers_are_the_policys(params):
    asked = requests()
    calm = FlowActor(ROBOT, FlowConfig(level=0.0, euler_steps=2))
    chunks = np.stack([answer.actions for answer in calm.answer(params, asked)])
    np.testing.assert_allclose(chunks, POLICY.sample_actions(asked), atol=2e-6)


@pytest.mark.slow
def test_the_values_of_observations_are_those_recorded_with_their_chunks(actor, params):
    head = jax.tree.map(lambda x: x + 0.1, params["value"])
    asked, moved = requests(), params | {"value": head}
    recorded = [answer.drawn.value for answer in actor.answer(moved, asked)]
    assert np.ptp(recorded) > 0
    value = jax.jit(partial(flow_policy.value, POLICY.model))
    for at, count, batch in POLICY.batches(asked):
        expected = [recorded[i] for i in at[:count]]
        np.testing.assert_allclose(value(moved, batch)[:count], expected, rtol=1e-5)


@pytest.mark.slow
def test_a_warm_actor_compiles_nothing_more(params):
    fresh = FlowActor(replace(ROBOT, policy=POLICY.varied()), FlowConfig(euler_steps=2))
    fresh.warm(params)
    assert fresh._draw._cache_size() == 4  # up to 16, 32, 64 and 128 words
    asked = requests()
    for count in (1, 3, 5):
        fresh.answer(params, asked[:count])
    assert fresh._draw._cache_size() == 4


def test_a_batcher_runs_it(actor, params):
    asked = requests()
    run = partial(actor.answer, params)
    with Batcher(run, sizes=POLICY.sizes, deadline=60.0, capacity=8) as batcher:
        futures = [batcher.submit(request) for request in asked[:4]]
        answers = [future.result(120) for future in futures]
    for one, other in zip(answers, actor.answer(params, asked), strict=False):
        assert_same(one, other)


def test_a_request_that_continues_a_chunk_is_refused(actor, params):
    one = openpi(1)
    (request,) = POLICY.prepare(one, KEYS[:1], previous=[np.zeros((2, 2))])
    with pytest.raises(ValueError, match="continues a chunk"):
        actor.answer(params, [requests()[0], request])
