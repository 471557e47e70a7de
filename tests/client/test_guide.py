"""The code of the guide and of the package's front page runs as it is printed."""

import re
from pathlib import Path

import numpy as np
import pytest

from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.observation import inputs_of
from tests.helpers.tools.served import Echo, serving

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs/robot.md", ROOT / "client/README.md")


TWO = Normalizer.identity(2)
ARM = Embodiment("arm", ("observation.images.front",), TWO, TWO)


class Hardware:
    """Stands for the reader's camera and arm."""

    def __init__(self):
        self.moves = []

    def read(self):
        return np.zeros((8, 8, 3), np.uint8)

    def joints(self):
        return np.zeros(2, np.float32)

    def move_to(self, action):
        self.moves.append(action)


class LeRobots:
    """Stands for the reader's LeRobot robot."""

    def __init__(self):
        self.action_features = {"a.pos": float, "b.pos": float}
        self.observation_features = {**self.action_features, "wrist_cam": (8, 8, 3)}
        self.is_connected, self.moves = True, []

    def get_observation(self):
        return {"a.pos": 0.0, "b.pos": 0.0, "wrist_cam": np.zeros((8, 8, 3), np.uint8)}

    def send_action(self, action):
        self.moves.append(action)
        return action

    def disconnect(self):
        self.is_connected = False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hardware, robot = Hardware(), LeRobots()
    names = {
        "camera": hardware,
        "arm": hardware,
        "robot": robot,
        "lowest": [-1.0, -1.0],
        "highest": [1.0, 1.0],
    }
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    with serving(Echo(inputs=inputs_of(ARM, reads_state=True))) as running:
        for block in blocks:
            code = block.replace("ws://gpu:8000", running.url).replace("seconds=60", "seconds=1")
            code = code.replace('"wrist_cam": "wrist"', '"wrist_cam": "front"')
            exec(compile(code, str(page), "exec"), names)
            names["arm"] = hardware
    assert len(hardware.moves) >= 2 * len(blocks[:2])
    if "LeRobotRobot" in page.read_text():
        assert robot.moves
        assert not robot.is_connected
        assert [path.name for path in (tmp_path / "seen/monday").iterdir()] == [
            "episode_000000.npz"
        ]
