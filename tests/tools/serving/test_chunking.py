"""Real-time chunking's state under attack: whatever a client says of its last chunk, in whatever
order, it is an error by name or the continuation of that client's own last answer."""

import itertools
from contextlib import ExitStack, suppress

import msgpack
import numpy as np
import pytest

from models import Pi, Policy
from models.inputs.observation import CONTROLS
from models.requests import with_committed
from tests.helpers.models.processors import word_processor
from tests.helpers.tools.served import OBSERVATION, ROBOT, client, serving
from tools.recipes.presets import TINY
from tools.serving.engine import Engine
from tools.serving.limits import Limits
from tools.serving.metrics import Metrics
from tools.serving.wire import pack, unpack

HORIZON = TINY.model.horizon
STEPS = [
    *(0, 1, 2, 3, HORIZON - 1, HORIZON, HORIZON + 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63)),
    *(
        True,
        False,
        None,
        1.0,
        0.5,
        float("nan"),
        float("inf"),
        "1",
        "",
        b"1",
        [],
        [1],
        {},
        {"a": 1},
    ),
    *(np.int64(2), np.float32(2), np.array(2), np.array([2]), np.bool_(True), np.array([[1]])),
]


class Numbered(Policy):
    """A policy whose chunks, without computing, tell whose they are: (client, request)."""

    def sample_actions(self, requests, noise=None):
        chunks = [
            request.key.astype(np.float32) + np.arange(HORIZON)[:, None] / 64
            for request in requests
        ]
        return with_committed(np.stack(chunks), [request.left for request in requests])


@pytest.fixture
def engine():
    config = TINY.model
    shape = (config.image_size, config.state_dim, config.action_dim, config.horizon)
    words = tuple(OBSERVATION["prompt"].split())
    processor = word_processor(*shape, "token", words, (ROBOT,), text_limit=32)
    policy = Numbered(Pi(config), None, processor, sizes=(1, 4))
    with Engine(policy, Metrics(), deadline=0, capacity=64, chunking="guided") as engine:
        yield engine


def free(number, request):
    return np.array([number, request], np.float32) + np.arange(HORIZON)[:, None] / 64


def sent(message):
    """The message as it arrives; None for what the wire does not take."""

    def packed(x):
        return msgpack.unpackb(pack({"x": x}))["x"]

    with suppress(ValueError, OverflowError):
        return unpack(msgpack.packb(message, default=packed))


def attack(engine, pairs):
    """Numbers of (executed, committed) that were continued and refused."""
    session = engine.join(1)
    session.chunk = free(1, 0)
    before, continued, refusals = session.chunk.copy(), 0, []
    for pair in pairs:
        controls = {k: v for k, v in zip(CONTROLS, pair, strict=True) if v != "absent"}
        message = sent({**OBSERVATION, **controls})
        if message is None:
            continue
        try:
            request = engine.read(message, session)
        except ValueError as error:
            refusals.append(str(error))
            continue
        assert (request.left is None) == (not controls), controls
        chunk = engine.submit(request).result(60).actions
        if controls:
            first, then = int(controls["executed"]), int(controls.get("committed", 0))
            np.testing.assert_array_equal(chunk[:then], before[first : first + then])
            continued += 1
        assert len(chunk) == HORIZON
        np.testing.assert_array_equal(session.chunk, before)
    assert all("executed" in why or "committed" in why for why in refusals)
    return continued, len(refusals)


def test_any_value_and_type_of_steps_is_continued_exactly_or_refused_by_name(engine):
    given = [*STEPS, "absent"]
    continued, refused = attack(engine, itertools.product(given, given))
    assert continued > 20
    assert refused > 700


def test_interleaved_clients_continue_their_own_chunks_and_nobody_elses(engine):
    rng = np.random.default_rng(0)
    with serving(engine, limits=Limits(rate=1e9)) as running, ExitStack() as stack:
        robots = [stack.enter_context(client(running.url)) for _ in range(6)]
        last = [robot.infer(OBSERVATION)["actions"] for robot in robots]
        assert len({chunk[0, 0] for chunk in last}) == len(robots)
        for _ in range(100):
            i = rng.integers(len(robots))
            executed = int(rng.integers(HORIZON + 1))
            committed = int(rng.integers(HORIZON + 1 - executed))
            controls = {"executed": executed, "committed": committed}
            answer = robots[i].infer({**OBSERVATION, **controls})["actions"]
            wanted = last[i][executed : executed + committed]
            np.testing.assert_array_equal(answer[:committed], wanted)
            last[i] = answer


def test_a_replayed_request_continues_the_newest_answer_and_never_an_older_one(engine):
    message = pack({**OBSERVATION, "executed": 2, "committed": 3})
    with serving(engine) as running, client(running.url) as robot:
        chunk = robot.infer(OBSERVATION)["actions"]
        for _ in range(20):
            robot.connection.send(message)
        for _ in range(20):
            answer = robot.receive()["actions"]
            np.testing.assert_array_equal(answer[:3], chunk[2:5])
            chunk = answer


def test_a_refused_request_leaves_the_last_chunk_as_it_was(engine):
    with serving(engine) as running, client(running.url) as robot:
        chunk = robot.infer(OBSERVATION)["actions"]
        for wrong in ({"executed": HORIZON + 1}, {"executed": 1, "committed": HORIZON}):
            with pytest.raises(ValueError, match=r"executed|committed"):
                robot.infer({**OBSERVATION, **wrong})
        answer = robot.infer({**OBSERVATION, "executed": 1, "committed": 2})["actions"]
        np.testing.assert_array_equal(answer[:2], chunk[1:3])


def test_who_comes_back_has_no_chunk_of_its_former_connection(engine):
    with serving(engine) as running:
        for _ in range(5):
            with client(running.url) as robot:
                with pytest.raises(ValueError, match="has not received a chunk yet"):
                    robot.infer({**OBSERVATION, "executed": 0})
                robot.infer(OBSERVATION)


@pytest.mark.fuzz
def test_thousands_of_random_steps_are_continued_exactly_or_refused(engine):
    rng = np.random.default_rng(1)

    def steps():
        kinds = [
            lambda: int(rng.integers(-3, HORIZON + 3)),
            lambda: int(rng.integers(-(2**62), 2**62)) >> int(rng.integers(62)),
            lambda: STEPS[rng.integers(len(STEPS))],
        ]
        return kinds[rng.integers(3)]()

    pairs = [(steps(), steps()) for _ in range(5000)]
    continued, refused = attack(engine, pairs)
    assert continued > 200
    assert refused > 3000
