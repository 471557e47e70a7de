"""The engine with a real policy, small and untrained: what a client is answered is what the policy
alone would say, whoever else asks at the time."""

import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from models import Embodiment, Normalizer, Pi, Policy
from models.config import to_json
from models.files.terminal import Console
from parallel.checkpoint import CheckpointWriter
from tests.helpers.models.processors import word_processor
from tests.helpers.tools.served import client, serving
from tests.helpers.tools.visitor import NEEDS_CLIENT, visit
from tools.recipes.presets import TINY
from tools.serve import ServeConfig, load, run
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics

CAMERAS = ("observation.images.front", "observation.images.wrist")
SIZES = (4,)


def robot(**changed):
    scale = Normalizer((0.25,) * 4, (2.0,) * 4)
    return Embodiment("arm", CAMERAS, scale, scale, **changed)


def make_policy(embodiment, **changed):
    config = replace(TINY.model, chunks=1, euler_steps=2, **changed)
    processor = word_processor(
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
    return Policy(model, params, processor, sizes=SIZES)


@pytest.fixture(scope="module")
def policy():
    return make_policy(robot())


def make_engine(policy, deadline=0.05, **options):
    return Engine(policy, Metrics(), deadline=deadline, capacity=8, **options)


def observation(i):
    rng = np.random.default_rng(i)
    return {
        "observation/front": rng.integers(256, size=(48, 48, 3), dtype=np.uint8),
        "observation/wrist": rng.integers(256, size=(30, 40, 3), dtype=np.uint8),
        "observation/state": rng.normal(size=4),
        "prompt": "lift the red block",
    }


def alone(policy, i, key, cameras=CAMERAS):
    """The policy's answer to `observation(i)` by itself."""
    seen = observation(i)
    images = [seen["observation/front"], seen["observation/wrist"]][: len(cameras)]
    inputs = {
        "image": dict(zip(cameras, images, strict=True)),
        "state": seen["observation/state"],
        "prompt": seen["prompt"],
    }
    return policy.infer(inputs, keys=np.array([key]))["actions"]


@pytest.mark.slow
def test_what_a_client_gets_does_not_depend_on_who_else_asks(policy):
    def ask(url, i):
        with client(url) as one:
            assert one.metadata["actions"] == {"dtype": "float32", "shape": [8, 4]}
            return [one.infer(observation(i))["actions"] for _ in range(2)]

    engine = make_engine(policy, deadline=2.0)  # all four ask within it, busy machine or not
    with engine, serving(engine) as running, ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda i: ask(running.url, i), range(4)))
        batches = engine.statistics.batches
    assert sum(batches.values()) < 8, "requests that waited together shared no batch"
    wanted = {
        (session, request, i): alone(policy, i, (session, request))
        for session in range(1, 5)
        for request in range(2)
        for i in range(4)
    }
    for i, (first, second) in enumerate(told):
        (session,) = [s for s in range(1, 5) if np.array_equal(wanted[s, 0, i], first)]
        np.testing.assert_array_equal(wanted[session, 1, i], second)


def test_cameras_that_clients_do_not_send_are_masked(policy):
    with make_engine(policy, pairs=["image=front"]) as engine, serving(engine) as running:
        assert "observation/wrist" not in engine.metadata["inputs"]
        seen = {k: v for k, v in observation(0).items() if "wrist" not in k}
        with client(running.url) as one:
            told = one.infer({"image": seen.pop("observation/front"), **seen})["actions"]
    np.testing.assert_array_equal(told, alone(policy, 0, (1, 0), CAMERAS[:1]))


@pytest.mark.slow
def test_a_chunk_continues_the_clients_last_one(policy):
    with make_engine(policy, chunking="guided") as engine, serving(engine) as running:
        with client(running.url) as other:
            other.infer(observation(3))
        with client(running.url) as one:
            with pytest.raises(ValueError, match="has not received a chunk yet"):
                one.infer({**observation(0), "executed": 2})
            first = one.infer(observation(0))["actions"]
            for wrong, why in [
                ({"executed": 9}, "'executed' is 9, but the last chunk had 8"),
                ({"executed": 6, "committed": 3}, "committed"),
                ({"committed": 3}, "needs 'executed'"),
            ]:
                with pytest.raises(ValueError, match=why):
                    one.infer({**observation(1), **wrong})
            second = one.infer({**observation(1), "executed": 2, "committed": 3})["actions"]
    np.testing.assert_array_equal(second[:3], first[2:5])
    free = alone(policy, 1, (2, 1))
    assert np.abs(second - free)[3:].max() > 1e-3


@pytest.mark.slow
def test_a_policy_that_was_trained_to_continues_a_clients_chunk_so(policy):
    with pytest.raises(ValueError, match="not trained to continue chunks"):
        make_engine(policy, chunking="trained")
    learnt = replace(policy, model=Pi(replace(policy.model.config, rtc_max_delay=3)))
    with (
        make_engine(learnt, chunking="trained") as engine,
        serving(engine) as running,
        client(running.url) as one,
    ):
        assert one.metadata["most_committed"] == 3
        first = one.infer(observation(0))["actions"]
        with pytest.raises(ValueError, match=r"committed is 4, but .* at most 3 steps"):
            one.infer({**observation(1), "executed": 2, "committed": 4})
        second = one.infer({**observation(1), "executed": 2, "committed": 3})["actions"]
    np.testing.assert_array_equal(second[:3], first[2:5])


def test_a_server_that_continues_no_chunks_says_how_to_start_one(policy):
    with make_engine(policy) as engine, serving(engine) as running, client(running.url) as one:
        assert one.metadata["chunking"] == []
        with pytest.raises(ValueError, match="--chunking"):
            one.infer({**observation(0), "executed": 0})


def test_a_prompt_over_the_limit_is_the_clients_mistake(policy):
    with make_engine(policy) as engine, serving(engine) as running, client(running.url) as one:
        with pytest.raises(ValueError, match="tokens"):
            one.infer({**observation(0), "prompt": "lift " * 40})
        assert 'outcome="bad_input"' in running.server.metrics.text()


def test_relative_actions_need_the_state_even_of_a_model_that_does_not_read_it(policy):
    inert = replace(policy.processor, state_input="none", embodiments=(robot(),))
    moving = replace(inert, embodiments=(robot(relative=(0, 1, 2, -1)),))
    for processor, expected in ((inert, False), (moving, True)):
        with make_engine(replace(policy, processor=processor)) as engine:
            assert ("observation/state" in engine.metadata["inputs"]) == expected


def test_a_policy_without_its_preparation_is_refused(policy):
    with pytest.raises(ValueError, match="without a processor"):
        make_engine(replace(policy, processor=None))


@pytest.mark.slow
def test_the_command_serves_a_checkpoint_until_it_is_told_to_stop(policy, tmp_path):
    config = {"model": to_json(policy.model.config)}
    assets = {"processor": to_json(policy.processor)}
    with CheckpointWriter(tmp_path / "checkpoints", config, assets) as writer:
        writer.save(1, {"ema": policy.params}, {})
    command = ["-m", "tools.serve", "--checkpoint", tmp_path, "--port", "0", "--euler-steps", "2"]
    process = subprocess.Popen(
        [sys.executable, *command, "--sizes", "4"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in process.stdout if "Serving on" in line)
        with client(re.search(r"ws://127\.0\.0\.1:\d+", line)[0]) as one:
            told = one.infer(observation(0))["actions"]
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed, match="shutting down"):
                one.receive()
        assert process.wait(500) == 0
    finally:
        process.kill()
    np.testing.assert_array_equal(told, alone(policy, 0, (1, 0)))


@NEEDS_CLIENT
def test_openpis_client_gets_a_policys_chunks(policy):
    with make_engine(policy) as engine, serving(engine) as running:
        told = visit(running.url, 4)
    assert np.shape(told["good"]) == (8, 4)
    assert "lacks ['wrist']" in told["missing camera"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"token_file": "empty"}, "holds no token"),
        ({"private_key": "empty"}, "without --certificate"),
        ({"certificate": "empty"}, "cannot be used"),
        ({"token_file": "absent"}, "No such file"),
    ],
)
def test_what_cannot_be_served_safely_is_refused_before_anything_is_loaded(changed, why, tmp_path):
    (tmp_path / "empty").touch()
    files = {name: tmp_path / file for name, file in changed.items()}
    with pytest.raises((ValueError, OSError), match=why):
        run(ServeConfig(tmp_path, **files), Console(quiet=True))


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"Cannot .* 127.0.0.1:{port}.*choose another --host"):
            run(ServeConfig(tmp_path / "absent", port=port), Console(quiet=True))


@pytest.mark.parametrize("longest", [0, 33])
def test_prompts_cannot_be_longer_than_the_policy_reads(longest, policy, monkeypatch):
    monkeypatch.setattr("tools.recipes.policy.load_policy", lambda *_, **__: policy)
    assert load(ServeConfig(Path(), longest_prompt=8)).processor.text_limit == 8
    with pytest.raises(ValueError, match=f"longest_prompt is {longest}; .* reads 1 to 32 tokens"):
        load(ServeConfig(Path(), longest_prompt=longest))


def test_what_is_compiled_at_start_is_what_clients_with_fewer_cameras_need(policy):
    fresh = replace(policy, sizes=(4,))
    with make_engine(fresh, pairs=["image=front"]) as engine, serving(engine) as running:
        engine.warm()
        compiled = fresh._sample._cache_size()
        with client(running.url) as one:
            seen = observation(0)
            one.infer({"image": seen["observation/front"], "state": [0] * 4, "prompt": "lift"})
        assert fresh._sample._cache_size() == compiled == 2  # 16 and 32 words


@pytest.mark.slow
def test_a_client_may_leave_out_a_camera_that_may_be_absent_and_both_are_compiled(policy):
    (robot,) = policy.processor.embodiments
    may_lack = replace(robot, absent=CAMERAS[1:])
    processor = replace(policy.processor, embodiments=(may_lack,))
    fresh, told = replace(policy, processor=processor, sizes=(4,)), []
    with make_engine(fresh) as engine, serving(engine) as running:
        engine.warm(lambda done, of: told.append((done, of)))
        compiled = fresh._sample._cache_size()
        with client(running.url) as one:
            without = {k: x for k, x in observation(0).items() if "wrist" not in k}
            alike = [one.infer(seen)["actions"] for seen in (without, observation(0))]
        assert fresh._sample._cache_size() == compiled == 4  # 16 and 32 words
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for i, cameras in enumerate((CAMERAS[:1], CAMERAS)):
        expected = alone(fresh, 0, (1, i), cameras)
        np.testing.assert_array_equal(alike[i], expected)


@pytest.mark.slow
def test_every_number_of_cameras_that_a_client_may_send_is_compiled(policy):
    (robot,) = policy.processor.embodiments
    cameras = (*CAMERAS, "observation.images.top")
    may_lack = replace(robot, cameras=cameras, absent=cameras[1:])
    processor = replace(policy.processor, embodiments=(may_lack,))
    fresh = replace(policy, processor=processor, sizes=(1,))
    with make_engine(fresh) as engine, serving(engine) as running:
        engine.start()
        assert fresh._sample._cache_size() == 3
        with client(running.url) as one:
            one.infer(observation(0))  # without the one on top
        assert fresh._sample._cache_size() == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": ""},
        {"prompt": "Greif\tden\0 roten Würfel 🤖\n"},
        {"observation/front": np.zeros((1, 1, 3), np.uint8)},
        {"observation/front": np.zeros((1, 5000, 3), np.uint8)},
        {"observation/state": np.arange(4, dtype=">i8")},
    ],
)
def test_an_odd_observation_is_still_one(policy, changed):
    with make_engine(policy) as engine:
        request = engine.read({**observation(0), **changed}, engine.join(1))
    assert np.isfinite(request.sample.state).all()
    assert request.sample.images[0].shape == (48, 48, 3)


@pytest.mark.slow
def test_anything_is_answered_with_the_smallest_program_until_all_are_there(policy):
    fresh = replace(policy, sizes=(1, 4))
    with make_engine(fresh) as engine, serving(engine) as running:
        engine.start()
        sampler = fresh._sample
        assert sampler._cache_size() == 1
        with client(running.url) as one:
            early = [
                one.infer(observation(0) | {"prompt": text})["actions"]
                for text in ("lift", "lift " * 20)
            ]
        assert sampler._cache_size() == 1
        engine.warm()
        assert sampler._cache_size() == 4  # 1 and 4 rows, 16 and 32 words
        with client(running.url) as two:
            late = two.infer(observation(0) | {"prompt": "lift"})["actions"]
        assert sampler._cache_size() == 4
    assert late.shape == early[0].shape
    assert np.isfinite([*early, late]).all()
