"""The simulation benchmark counts what was done, and MuJoCo's half of it draws."""

import os
import re

import numpy as np
import pytest

from sim.environments import physics
from sim.environments.bodies import SUBSTEPS, Bodies
from sim.environments.scenery import FRONT
from sim.protocol import Observation, Outcome, Spec
from sim.simulators.offscreen import choose_renderer
from sim.suite import Suite
from tools.bench.sim import sim
from tools.bench.sim.sim import Backend


def test_the_first_call_compiles_and_is_not_counted():
    calls = []
    found = sim.rates("steps", 10, lambda: calls.append(np.ones(1000).sum()), seconds=0)
    assert len(calls) == 3
    assert set(found) == {"steps/s", "steps/CPU-s"}
    assert min(found.values()) > 0


def test_on_a_gpu_a_renderer_that_cannot_draw_leaves_its_error_alone(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "none")
    backend = Backend(None, None, lambda: physics.model(Bodies()), SUBSTEPS, FRONT)
    qpos = physics.model(Bodies()).qpos0[None].astype(np.float32)
    drawn = sim.drawings(backend, qpos, {}, seconds=0.01, spared=True)
    assert all(rates["frames/s"] > 0 for rates in drawn["caster"].values())
    for rates in drawn["renderer"].values():
        assert re.search(r"gave no answer to .*: \w+Error: .*needs\.$", rates["error"])


@pytest.mark.slow
def test_c_mujoco_and_its_renderer_do_the_same_scene_as_ours():
    environment = dict(os.environ)
    try:
        choose_renderer(environment)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    model = physics.model(Bodies())
    backend = Backend(None, None, lambda: model, SUBSTEPS, FRONT)
    qpos = np.repeat(model.qpos0[None], 2, 0).astype(np.float32)
    rolled = sim.rollouts(backend, qpos, (1, 3), seconds=0.05)
    assert set(rolled) == {"1", "3"}
    drawn = sim.drawings(backend, qpos, environment, seconds=0.05)
    for way in ("caster", "renderer"):
        assert set(drawn[way]) == {"plain", "shadows"}
        assert all(rates["frames/s"] > 0 for rates in drawn[way].values())
    table = sim._table({"tabletop": {"rollout": rolled, **drawn}, "other": {"left out": "why"}})
    assert table.row_count == 7


class Still:
    """Slots that answer one at a time, last first."""

    spec = Spec("still", ("a",), ("c", "d"), (4, 4), ("s",), ("x", "y"), 10, 500, ("g",), (("p",),))

    def __init__(self, count: int) -> None:
        self.count, self.waiting, self.sent = count, [], []

    def begin(self, slot, start):
        self.waiting.append(slot)

    def send(self, slot, actions, film=False):
        self.begin(slot, None)
        self.sent.append(actions.shape)

    def poll(self, timeout=None):
        seen = Observation(np.zeros((2, 4, 4, 3), np.uint8), np.zeros(1))
        return [Outcome(self.waiting.pop(), seen, 0, np.zeros(0))]

    def close(self):
        assert not self.waiting


def test_a_suite_in_processes_is_timed_until_every_slot_has_answered(monkeypatch):
    opened = []

    def open_slots(tasks, count, size):
        opened.append(Still(count))
        return opened[-1]

    monkeypatch.setattr(sim, "load_suite", lambda name: Suite(name, ("a",), 50, open_slots))
    found = sim.slots("still", (1, 3))
    assert set(found) == {"1", "3"}
    assert [len(slots.sent) for slots in opened] == [34, 3 * 34]
    assert {shape for slots in opened for shape in slots.sent} == {(16, 2), (1, 2)}
