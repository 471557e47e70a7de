"""LeRobot's own mock robot under the control loop, for `tests/client/test_lerobot_robot.py`: run by
its path, with a Python that has LeRobot, in a checkout of LeRobot, whose `tests` it imports. Prints
as JSON what was observed, what the robot was sent, and the ticks of each mode."""

import json
import sys

import numpy as np
from lerobot.robots import Robot

from chiliad_client import Connection, LeRobotRobot, drive
from tests.mocks.mock_robot import MockRobot, MockRobotConfig


class Watched(MockRobot):
    """The mock robot, which keeps what it is sent."""

    def send_action(self, action):
        sent.append(list(super().send_action(action).values()))
        return action


url, seconds = sys.argv[1], float(sys.argv[2])
sent: list = []
robot = Watched(MockRobotConfig(n_motors=3, random_values=False, static_values=[1.0, 2.0, 3.0]))
assert isinstance(robot, Robot)
with Connection(url) as server, LeRobotRobot(robot) as arm:
    observed = np.asarray(arm.observe()["observation/state"]).tolist()
    report = drive(arm, server, "hold still", hz=20, seconds=seconds)
print(
    json.dumps(
        {
            "names": arm.state_names,
            "observed": observed,
            "first": sent[0],
            "last": sent[-1],
            "ticks": dict(report.ticks),
            "connected": robot.is_connected,
        }
    )
)
