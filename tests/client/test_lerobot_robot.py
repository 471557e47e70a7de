"""A LeRobot robot under the control loop: one with LeRobot's methods, and where LeRobot is
installed, one of its classes."""

import json
import os
import subprocess
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from chiliad_client import ControlLoop, LeRobotRobot, LoopSettings
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.observation import inputs_of
from tests.helpers.client.fakes import FakeClock, FakeServer
from tests.helpers.tools.served import Echo, serving
from tools.serving.client import Reply

ROOT = Path(__file__).parents[2]
CLIENT, PROGRAM = ROOT / "client", ROOT / "tests/helpers/client/lerobot_mock.py"
GOALS = {"shape": [10, 3]}
JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")


class Arm:
    """A robot with what LeRobot's has, in degrees; like its followers it moves at most `most` at
    once, and refuses what it was not connected for."""

    name, most = "little_arm", 5.0

    def __init__(self):
        self.is_connected = False
        self.at = {name: 10.0 * i for i, name in enumerate(JOINTS)}
        self.sent = []

    @property
    def observation_features(self):
        return {**dict.fromkeys(JOINTS, float), "wrist_cam": (6, 8, 3), "serial": str}

    @property
    def action_features(self):
        return dict.fromkeys(JOINTS, float)

    def connect(self, calibrate=True):
        assert not self.is_connected
        self.is_connected = True

    def get_observation(self):
        assert self.is_connected
        return {**self.at, "wrist_cam": np.full((6, 8, 3), 7, np.uint8), "serial": "7"}

    def send_action(self, action):
        assert self.is_connected
        assert all(type(value) is float for value in action.values())
        sent = {
            name: self.at[name] + float(np.clip(value - self.at[name], -self.most, self.most))
            for name, value in action.items()
        }
        self.at.update(sent)
        self.sent.append(sent)
        return sent

    def disconnect(self):
        assert self.is_connected
        self.is_connected = False


def drive(arm, **options):
    clock = FakeClock()
    inputs = {
        "observation/wrist": {"dtype": "uint8", "shape": ["height", "width", 3]},
        "observation/state": {"dtype": "float32", "shape": [3]},
        "prompt": {"dtype": "str"},
    }
    goal = np.array([50.0, -20.0, 3.0])
    metadata = {"inputs": inputs, "actions": {"shape": [10, 3]}}
    server = FakeServer(clock, lambda m: np.tile(goal, (10, 1)), 0.15, metadata=metadata)
    with LeRobotRobot(arm, **options) as robot:
        loop = ControlLoop(robot, server, "reach", LoopSettings(10), clock=clock)
        report = loop.run(seconds=3)
    return server, report, goal


def test_it_observes_acts_and_is_disconnected():
    arm = Arm()
    server, report, goal = drive(arm, cameras={"wrist_cam": "wrist"})
    first = server.messages[0][1]
    assert first["observation/state"].tolist() == [0.0, 10.0, 20.0]
    assert first["observation/state"].dtype == np.float32
    assert first["observation/wrist"].shape == (6, 8, 3)
    assert list(arm.at.values()) == goal.tolist()
    assert report.ticks["act"] == 28
    assert not arm.is_connected


def test_it_is_held_where_it_stands_and_then_where_it_was_truly_sent():
    arm = Arm()
    drive(arm, cameras={"wrist_cam": "wrist"})
    assert list(arm.sent[0].values()) == [0.0, 10.0, 20.0]
    assert arm.sent[-1] == arm.sent[-2]


def test_a_robot_that_cannot_be_understood_is_refused():
    with pytest.raises(ValueError, match=r"cameras \['wrist_cam'\], not \['top'\]"):
        LeRobotRobot(Arm(), cameras={"top": "front"})

    class Base(Arm):
        @property
        def action_features(self):
            return {"x.vel": float}

    with pytest.raises(ValueError, match=r"have \['x\.vel'\], which it does not observe"):
        LeRobotRobot(Base())

    class Held(LeRobotRobot):
        def hold(self, seen, last):
            return np.zeros(1)

    assert Held(Base()).action_names == ("x.vel",)


def test_only_the_cameras_that_are_named_are_sent():
    arm = Arm()
    arm.connect()
    assert set(LeRobotRobot(arm, cameras={}).observe()) == {"observation/state"}
    assert set(LeRobotRobot(arm).observe()) == {"observation/state", "observation/wrist_cam"}


def test_lerobots_own_class_of_robots_is_driven(tmp_path):
    robots = pytest.importorskip("lerobot.robots", reason="needs lerobot")

    class Real(Arm, robots.Robot):
        config_class = robots.RobotConfig

        def __init__(self):
            config = robots.RobotConfig.__new__(robots.RobotConfig)
            config.id, config.calibration_dir = "mine", tmp_path
            robots.Robot.__init__(self, config)
            Arm.__init__(self)

        is_connected, is_calibrated = False, True

        def calibrate(self):
            pass

        def configure(self):
            pass

    arm = Real()
    _, _, goal = drive(arm, cameras={"wrist_cam": "wrist"})
    assert list(arm.at.values()) == goal.tolist()


def test_lerobots_mock_robot_is_driven_in_real_time_by_our_server():
    """With the Python of an environment that has LeRobot, in a checkout of it (whose tests have the
    robot): CHILIAD_LEROBOT_PYTHON and CHILIAD_LEROBOT_CHECKOUT name them."""
    python, checkout = (
        os.environ.get(f"CHILIAD_LEROBOT_{name}") for name in ("PYTHON", "CHECKOUT")
    )
    if not (python and checkout):
        pytest.skip("needs CHILIAD_LEROBOT_PYTHON and CHILIAD_LEROBOT_CHECKOUT")

    class Goals(Echo):
        metadata = property(lambda self: {"inputs": self.inputs.expected, "actions": GOALS})

        def submit(self, request):
            answer = Future()
            answer.set_result(Reply(np.tile(request.observation.state + 10, (10, 1)), 0.001))
            return answer

    joints = Normalizer.identity(3)
    goals = Goals(inputs=inputs_of(Embodiment("mock", (), joints, joints), reads_state=True))
    with serving(goals) as server:
        done = subprocess.run(
            [python, PROGRAM, server.url, "3"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([checkout, str(CLIENT)])},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["names"] == ["motor_1.pos", "motor_2.pos", "motor_3.pos"]
    assert told["observed"] == told["first"] == [1, 2, 3]
    assert told["last"] == [11, 12, 13]
    assert told["ticks"]["act"] > 40
    assert not told["connected"]
