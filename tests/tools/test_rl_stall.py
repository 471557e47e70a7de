"""`tools.rl` that no longer goes on, as a process that really stands still: in the middle of an
episode, and in an update."""

import subprocess
import sys

import pytest

from models.checkpoints import own
from parallel.hosts import exits
from tests.helpers.parallel.toy import environment
from tests.helpers.rl.points import save_policy

MINE = """
import os, time
from dataclasses import replace
from rl.learner import FlowLearner
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld
from tests.helpers.rl.points import HOST

STUCK, update, updates = os.environ["STUCK"], FlowLearner.update, []

def slow(learner):
    found = update(learner)
    updates.append(found)
    if STUCK == "update" and len(updates) == 2:
        time.sleep(1000)  # the learner hangs
    return found

class Stuck(DeviceSlots):
    def send(self, slot, actions):
        if STUCK == "episode" and updates:
            time.sleep(1000)  # the simulator hangs
        super().send(slot, actions)

FlowLearner.update = slow
POINTS = Suite("points", ("points",), 4, lambda tasks, count, size: Stuck(PointWorld(), count),
               first_seed=500, together=False, slots=1)
PRESET = replace(HOST, rollout=replace(HOST.rollout, suite=f"{__file__}:POINTS"), eval_every=0,
                 save_every=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stuck", "where"), [("episode", "in send"), ("update", "in slow")])
def test_a_run_that_stands_still_is_ended_and_its_stacks_show_where(tmp_path, stuck, where):
    preset, out = tmp_path / "mine.py", tmp_path / "out"
    preset.write_text(MINE)
    policy = save_policy(tmp_path / "policy")
    command = [sys.executable, "-m", "tools.rl", "--checkpoint", policy, "--out", out]
    done = subprocess.run(
        [*command, "--preset", f"{preset}:PRESET", "--stall-seconds", "4"],
        env=environment(1, STUCK=stuck),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == exits.STALLED, done.stderr
    assert "no progress for" in done.stderr
    assert "rank 0 training at step 1 for" in done.stderr
    stacks = (out / "stacks" / "rank-0.txt").read_text()
    assert 'mine.py", line' in stacks
    assert where in stacks
    assert own.steps(out / "checkpoints") == [1], "what was learnt before is saved"
