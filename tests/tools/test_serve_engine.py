"""The engine with a real policy, small and untrained: what a client is answered is what the policy
alone would say, whoever else asks at the time."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest

from models import Embodiment, Normalizer, Pi, Policy, Processor
from tests.tools.served import client, serving
from tests.tools.test_serve_client import NEEDS_CLIENT, visit
from tools.presets import TINY
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics

CAMERAS = ("observation.images.front", "observation.images.wrist")
SIZES = (4,)


def robot(**changed):
    scale = Normalizer((0.25,) * 4, (2.0,) * 4)
    return Embodiment("arm", CAMERAS, scale, scale, **changed)


def make_policy(embodiment, **changed):
    config = replace(TINY.model, chunks=1, **changed)
    processor = Processor(
        image_size=config.image_size,
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        horizon=config.horizon,
        state_input=config.state_input,
        words=("lift", "the", "red", "block"),
        embodiments=(embodiment,),
        text_limit=32,
    )
    model = Pi(config)
    params = jax.jit(model.init)(jax.random.key(0))
    return Policy(model, params, processor, steps=2, sizes=SIZES)


@pytest.fixture(scope="module")
def policy():
    return make_policy(robot())


def make_engine(policy, **options):
    return Engine(policy, Metrics(), **{"deadline": 0.05, "capacity": 8, **options})


def observation(i):
    rng = np.random.default_rng(i)
    return {
        "observation/front": rng.integers(256, size=(48, 48, 3), dtype=np.uint8),
        "observation/wrist": rng.integers(256, size=(30, 40, 3), dtype=np.uint8),
        "observation/state": rng.normal(size=4),
        "prompt": "lift the red block",
    }


def alone(policy, i, session, request):
    """What the policy answers to `observation(i)` by itself."""
    seen = observation(i)
    images = [seen["observation/front"], seen["observation/wrist"]]
    inputs = {
        "image": dict(zip(CAMERAS, images, strict=True)),
        "state": seen["observation/state"],
        "prompt": seen["prompt"],
    }
    return policy.infer(inputs, keys=np.array([[session, request]]))["actions"][0]


def test_what_a_client_gets_does_not_depend_on_who_else_asks(policy):
    def ask(url, i):
        with client(url) as one:
            assert one.metadata["actions"] == {"dtype": "float32", "shape": [8, 4]}
            return [one.infer(observation(i))["actions"] for _ in range(2)]

    with make_engine(policy) as engine, serving(engine) as running, ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda i: ask(running.url, i), range(4)))
        rows = engine.metrics.batch_rows.collect()[0].samples
    batches = next(sample.value for sample in rows if sample.name.endswith("count"))
    assert batches < 8, "requests that waited together shared no batch"
    wanted = {
        (session, request, i): alone(policy, i, session, request)
        for session in range(1, 5)
        for request in range(2)
        for i in range(4)
    }
    for i, (first, second) in enumerate(told):
        (session,) = [s for s in range(1, 5) if np.array_equal(wanted[s, 0, i], first)]
        np.testing.assert_array_equal(wanted[session, 1, i], second)
