"""`python -m tools.serve` killed by SIGKILL under a robot, and started again."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest

from chiliad_client import Backoff, Connection, ControlLoop, LoopSettings
from tests.helpers.client.log import CommandLog
from tests.helpers.data.recording import make_episode, write
from tests.helpers.tools.served import free_port

HZ = 5


class Pointer:
    """A robot with the cameras, state and actions of the recording."""

    def __init__(self):
        self.sent = []

    def observe(self):
        return {
            "observation/front": np.zeros((48, 64, 3), np.uint8),
            "observation/wrist": np.zeros((48, 48, 3), np.uint8),
            "observation/state": np.zeros(4, np.float32),
        }

    def act(self, action):
        self.sent.append(action)

    def hold(self, seen, last):
        return np.zeros(3) if last is None else last


@pytest.mark.slow
def test_the_robot_is_held_while_its_server_is_dead_and_goes_on_with_the_next(tmp_path):
    dataset = write(tmp_path / "dataset", [make_episode(0, 1500)])
    port, log, robot = free_port(), CommandLog(), Pointer()
    command = [sys.executable, "-m", "tools.serve", "--port", str(port)]
    command += ["--replay", str(dataset), "--replay-steps", "10"]

    with ExitStack() as opened:

        def served():
            started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            opened.callback(started.wait)
            opened.callback(started.kill)
            return started

        def killed_and_started_again():
            """Yields False at each tick until its part is over."""
            first = served()
            yield from log.until("act", 12)
            first.send_signal(signal.SIGKILL)
            yield from log.until("hold", 5)
            served()
            yield from log.until("act", 12)

        plan = killed_and_started_again()
        with Connection(f"ws://127.0.0.1:{port}", backoff=Backoff(0.1, 1.0)) as server:
            loop = ControlLoop(robot, server, "push", LoopSettings(HZ, replan=4), recorder=log)
            report = loop.run(seconds=540, until=lambda seen: next(plan, True))
    assert next(plan, "over") == "over"
    ticks = [c.tick for c in log.commands]
    assert len(set(ticks)) == len(ticks) == len(robot.sent)
    assert report.missed == ticks[-1] + 1 - len(ticks)
    for before, now in pairwise(log.commands):
        if now.mode == "hold":
            np.testing.assert_array_equal(now.sent, before.sent)
        else:
            assert 0 < now.age < 10 + max(report.delays)
