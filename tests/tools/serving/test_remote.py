"""A policy behind a server acts in a suite: ours, or one like openpi's that says nothing of
itself."""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tyro
from websockets.sync.server import serve as listen

from models.files.terminal import Console
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.observation import Inputs, inputs_of
from models.inputs.pictures import resize_with_pad
from sim.acting import Policy
from sim.environments.device_slots import spec_of
from sim.protocol import EVAL_SEEDS, Observation
from tests.helpers.sim import libero_like
from tests.helpers.sim.point_world import PointWorld, idle_policy, seeing_policy
from tests.helpers.tools.served import Echo, serving, until
from tools import evaluate
from tools.recipes.evaluation import EvaluateConfig
from tools.recipes.policy import PolicyOptions
from tools.serving.client import Reply
from tools.serving.remote import RemotePolicy, RemoteRobot
from tools.serving.wire import pack, unpack

POINT = Embodiment(
    "pointer", ("top",), Normalizer((0.0,) * 2, (1.0,) * 2), Normalizer((0.0,) * 2, (1.0,) * 2)
)
SUITES = """
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld

def opened(tasks, count, size):
    assert size == 32, size
    return DeviceSlots(PointWorld(), count)

POINTS = Suite("points", ("points",), 6, opened, slots=4)
"""


@dataclass
class Seeing(Echo):
    """Our server around the point world's scripted policy."""

    policy: Policy = seeing_policy
    inputs: Inputs = field(default_factory=lambda: inputs_of(POINT, reads_state=True))

    @property
    def metadata(self):
        return {
            "robot": "pointer",
            "inputs": self.inputs.expected,
            "actions": {"dtype": "float32", "shape": [4, 2]},
            "picture": 32,
        }

    def submit(self, request):
        def answer():
            asked = request.observation
            if asked.prompt == "refuse":
                raise ValueError("a secret of the server")
            seen = Observation(asked.images["top"][None, None], asked.state[None])
            keys = np.zeros((1, 2), np.uint32)
            return Reply(self.policy(seen, [asked.prompt], keys)[0], 0.001)

        return self.pool.submit(answer)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    file = tmp_path_factory.mktemp("suites") / "mine.py"
    file.write_text(SUITES)
    return f"{file}:POINTS"


def told(config):
    with open(config.out.parent / "said", "w+") as file:
        found = evaluate.run(config, Console(file=file, width=1000))
        file.seek(0)
        return found, file.read()


def test_a_policy_behind_our_server_is_evaluated_beside_its_controls(points, tmp_path):
    with serving(Seeing()) as running:
        config = EvaluateConfig(
            policy=running.url,
            suite=points,
            out=tmp_path / "out",
            controls=("wrong-prompt", "blank-image"),
        )
        found, said = told(config)
        assert f"The server at {running.url} describes itself as " in said
        assert '"robot": "pointer"' in said
        with pytest.raises(
            ValueError, match=r"network cannot be re-initialised here.*leave 'untrained' out"
        ):
            evaluate.run(replace(config, controls=("untrained",)), Console(quiet=True))
        until(lambda: running.server.answers.clients == 0)
    assert found["trained"].success.value == 1
    assert found["blank image"].success.value == 0
    assert found["wrong prompt"].success.value == 0
    assert all(episode.named_achieved for episode in found["wrong prompt"].episodes)
    kept = json.loads((tmp_path / "out" / "episodes.jsonl").read_text().splitlines()[0])
    assert kept["evaluates"]["checkpoint"].startswith(running.url)
    assert (tmp_path / "out" / "report.html").exists()


def test_a_servers_chunks_can_come_late_but_not_be_continued(points, tmp_path):
    with serving(Seeing()) as running:
        at = EvaluateConfig(policy=running.url, suite=points, out=tmp_path / "out", replan_steps=2)
        late = told(replace(at, delay=2))[0]["trained"]
        once = told(replace(at, out=tmp_path / "once", replan_steps=4))[0]["trained"]
        for episode, first in zip(late.episodes, once.episodes, strict=True):
            np.testing.assert_array_equal(episode.actions[:4], first.actions[:4])
        with pytest.raises(ValueError, match=r"delay is 2 with .* chunks have only 4 steps"):
            told(replace(at, out=tmp_path / "long", replan_steps=3, delay=2))
        with pytest.raises(ValueError, match=r"--chunking is 'guided', but a server remembers"):
            told(replace(at, delay=2, chunking="guided"))


def test_a_change_that_needs_more_steps_than_a_server_tells_of_is_left_out(points, tmp_path):
    with serving(Seeing()) as running:
        at = EvaluateConfig(policy=running.url, suite=points, out=tmp_path / "out", episodes=1)
        found, _ = told(replace(at, perturb=("all",)))
        assert list(found) == ["trained"]
        left_out = json.loads((tmp_path / "out" / "evaluation.json").read_text())["left_out"]
        assert "but chunks have only 4 steps" in left_out["delay"]
        short = replace(at, out=tmp_path / "short", replan_steps=2, perturb=("delay",))
        assert list(told(short)[0]) == ["trained", "delay"]
        with pytest.raises(ValueError, match="replan_steps 4, but chunks have only 4 steps"):
            told(replace(at, out=tmp_path / "named", perturb=("delay",)))
        assert not (tmp_path / "named" / "episodes.jsonl").exists()


def test_late_chunks_of_a_server_that_does_not_tell_their_length_are_evaluated_apart(
    points, tmp_path, monkeypatch
):
    monkeypatch.setattr(RemotePolicy, "horizon", None)
    with serving(Seeing()) as running:
        at = EvaluateConfig(policy=running.url, suite=points, out=tmp_path / "out", episodes=1)
        told(replace(at, perturb=("all",)))
        left_out = json.loads((tmp_path / "out" / "evaluation.json").read_text())["left_out"]
        assert (
            "does not report how many steps its chunks have, and 6 are needed" in left_out["delay"]
        )
        apart = replace(at, out=tmp_path / "apart", replan_steps=2)
        with pytest.raises(ValueError, match="evaluate with --delay 2 separately"):
            told(replace(apart, perturb=("delay",)))
        assert list(told(replace(apart, delay=2))[0]) == ["trained"]


@pytest.mark.parametrize(
    ("actions", "steps"),
    [
        ({"shape": [50, 7]}, 50),
        ({"shape": (50, 7)}, 50),
        ({"shape": [7]}, None),
        ({"shape": ["50", 7]}, None),
        ({"shape": None}, None),
        ("50", None),
        (None, None),
    ],
)
def test_a_servers_chunks_are_as_long_as_it_says_if_it_says_so(actions, steps):
    policy = object.__new__(RemotePolicy)
    policy.metadata = {"actions": actions}
    assert policy.horizon == steps


def test_requests_of_many_slots_are_under_way_at_once():
    """So that a server can batch them."""
    together = threading.Barrier(4)

    def waiting(seen, prompts, keys):
        together.wait(60)
        return idle_policy(seen, prompts, keys)

    env = PointWorld()
    seen = env.observe(env.reset(np.arange(4)))
    with serving(Seeing(policy=waiting)) as running, RemotePolicy(running.url) as policy:
        robot = RemoteRobot.in_suite(policy, spec_of(env, (32, 32)))
        assert robot.act(seen, ["reach red"] * 4, np.zeros((4, 2), np.uint32)).shape == (4, 4, 2)


@contextmanager
def openpis(answer, metadata=None):
    """A server as openpi's is: what it wants to be sent, nobody says."""
    asked = []

    def session(connection):
        connection.send(pack(metadata or {}))
        for message in connection:
            asked.append(unpack(message))
            connection.send(answer(asked[-1]))

    with listen(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def still(message):
    chunk = np.zeros((10, libero_like.ACTIONS))
    return pack({"actions": chunk, "policy_timing": {"infer_ms": 1.0}})


def at_arm(policy):
    return RemoteRobot.in_suite(policy, spec_of(libero_like.Arm(), (32, 32)))


def test_a_server_that_says_nothing_is_sent_what_openpis_libero_client_sends(tmp_path):
    suite = f"{libero_like.__file__}:DRAWN"
    with openpis(still) as (url, asked):
        config = EvaluateConfig(policy=url, suite=suite, episodes=1, out=tmp_path / "out")
        found, _ = told(config)
    assert found["trained"].success.trials == 1
    env = libero_like.Arm(40)
    seen = env.observe(env.reset(np.array([EVAL_SEEDS.start])))
    first = asked[0]
    assert set(first) == {
        "observation/image",
        "observation/wrist_image",
        "observation/state",
        "prompt",
    }
    for key, picture in zip(
        ("observation/image", "observation/wrist_image"), seen.images[0], strict=True
    ):
        assert first[key].shape == (224, 224, 3)
        np.testing.assert_array_equal(first[key], resize_with_pad(picture, 224))
    np.testing.assert_array_equal(first["observation/state"], seen.state[0])
    assert first["prompt"] == found["trained"].episodes[0].prompt


def test_a_map_of_cameras_names_a_servers_keys():
    with openpis(still) as (url, asked):
        cameras = {"image2": "images/cam_high", "observation.images.image": "images/cam_low"}
        with RemotePolicy(url, cameras=cameras) as policy:
            robot = at_arm(policy)
            seen = libero_like.Arm().observe(libero_like.Arm().reset(np.array([0])))
            robot.act(seen, ["reach red"], np.zeros((1, 2), np.uint32))
    first = resize_with_pad(seen.images[0, 0], 224)
    np.testing.assert_array_equal(asked[0]["images/cam_low"], first)
    assert not np.array_equal(asked[0]["images/cam_high"], first)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: "Traceback\n  File\nKeyError: 'state'", "refused a request: KeyError: 'state'"),
        (lambda _: pack({"action": np.zeros(3)}), r"answered \['action'\] with actions None"),
        (lambda _: pack({"actions": np.zeros(3)}), r"with actions float64 \(3,\); expected"),
        (lambda _: b"\x00", "does not speak openpi's protocol"),
    ],
)
def test_what_is_no_chunk_is_an_error_with_the_servers_words(answer, why):
    seen = libero_like.Arm().observe(libero_like.Arm().reset(np.array([0])))
    with openpis(answer) as (url, _), RemotePolicy(url) as policy:
        robot = at_arm(policy)
        with pytest.raises(ValueError, match=why):
            robot.act(seen, ["reach red"], np.zeros((1, 2), np.uint32))


def test_a_server_of_another_robot_is_refused_with_what_both_have():
    why = r"states {'observation/state': \[2\]} and answers with actions of 2 dims"
    with (
        serving(Seeing()) as running,
        RemotePolicy(running.url) as policy,
        pytest.raises(ValueError, match=why) as refused,
    ):
        at_arm(policy)
    assert "7 state and 6 action dims" in str(refused.value)


def test_a_server_whose_cameras_are_unknown_is_refused_with_the_question():
    spec = spec_of(PointWorld(), (32, 32))
    why = r"does not say which images it takes.*--cameras CAMERA=KEY"
    with (
        openpis(still) as (url, _),
        RemotePolicy(url) as policy,
        pytest.raises(ValueError, match=why),
    ):
        RemoteRobot.in_suite(policy, spec)


def test_a_token_is_shown_and_without_it_one_is_asked_for(tmp_path):
    with serving(Seeing(), token="secret") as running:
        with RemotePolicy(running.url, "secret") as policy:
            assert policy.picture == 32
        with pytest.raises(ValueError, match=r"Cannot connect to .*401.*--token-file"):
            RemotePolicy(running.url)


def test_nobody_at_an_address_is_an_error_in_a_sentence(tmp_path):
    with serving(Seeing()) as running:
        url = running.url
    with pytest.raises(ConnectionError, match=f"{url} does not answer"):
        RemotePolicy(url)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, "either --checkpoint, or --policy"),
        ({"policy": "localhost:8000"}, "'localhost:8000'; give a server's ws://HOST:PORT"),
        ({"policy": "ws://a", "euler_steps": 2}, "euler_steps is 2, .*--euler-steps there"),
        ({"policy": "ws://a", "solver": "ab2"}, "solver is ab2, .*--solver there"),
        (
            {"policy": "ws://a", "options": tyro.cli(PolicyOptions, args=["--horizon", "5"])},
            "horizon is 5, but the policy is loaded by its server",
        ),
    ],
)
def test_options_of_loading_are_the_servers_own(changed, why, points, tmp_path):
    with pytest.raises(ValueError, match=why):
        evaluate.run(
            EvaluateConfig(suite=points, out=tmp_path / "out", **changed), Console(quiet=True)
        )
    assert not (tmp_path / "out").exists()
