"""The RL benchmark, shrunk: what it counts and tables, not how fast."""

from dataclasses import replace

import pytest

from models.files.terminal import Console
from models.layers.gemma import GemmaConfig
from models.layers.siglip import SiglipConfig
from rl.config import RolloutConfig
from sim.environments.device_slots import DeviceSlots
from sim.protocol import TRAIN_SEEDS
from sim.suite import Suite
from tests.helpers.rl.point import Point
from tools.bench.rl import rl, rl_modes
from tools.bench.rl.rl_modes import MODES, BenchedRun


def test_the_table_sets_rl_vla3s_beside_ours_and_skips_what_was_left_out():
    rows = {mode: {"samples/s": 10.0 * (k + 1)} for k, mode in enumerate(MODES)}
    rates = rl.over_first({"metaworld": {"left out": "why"}, "lanes": rows})
    assert list(rates) == ["lanes"]
    assert [row["over first"] for row in rates["lanes"].values()] == [1, 2, 3, 4, 5]
    shown = rl.table(rates)
    assert shown.row_count == 1 + len(rl.RL_VLA3)
    cells = [list(column.cells) for column in shown.columns]
    assert cells[-1][0] == "50.0 (5.00)"
    at = cells[0].index("RL-VLA3: LIBERO, pi0.5, 8 GPUs (steps/s)")
    assert cells[-1][at] == "383.4 (1.33)"


@pytest.mark.slow
def test_modes_learn_on_real_threads_and_their_idle_shares_sum_to_one(monkeypatch):
    stack = GemmaConfig(width=16, depth=1, hidden=16, heads=1, kv_heads=1, head_dim=16)
    small = replace(
        rl_modes.MODEL,
        vision=SiglipConfig(width=16, depth=1, hidden=16, heads=1, patch=8),
        language=stack,
        expert=stack,
        image_size=16,
        horizon=4,
    )
    monkeypatch.setattr(rl_modes, "MODEL", small)
    modes = {name: MODES[name] for name in ("synchronous colocated", "all three")}
    monkeypatch.setattr(rl, "MODES", modes)
    load = BenchedRun(
        rollout=RolloutConfig(groups=2, group=2, slots=4, replan_steps=4, deadline=0.005),
        micro=8,
        steps=2,
        warm=1,
        horizon=4,
        picture=Point().image_size,
    )
    lanes = Suite(
        "point",
        ("point",),
        4,
        lambda tasks, count, size: DeviceSlots(Point(), count),
        first_seed=TRAIN_SEEDS.stop,
        slots=4,
        environment=lambda task, size: Point(),
    )
    monkeypatch.setattr(rl, "load_suite", lambda name: lanes)
    quiet = Console(quiet=True)
    slots = rl.in_suite(quiet, "point", (), load)
    on_device = rl.on_device(quiet, "point", load)
    for found in (slots, on_device):
        assert list(found) == list(modes)
        for row in found.values():
            assert row["env-steps/s"] >= row["samples/s"] > 0
    for mode, row in slots.items():
        assert row["lag"] <= (mode == "all three")
        assert {"slot", "inference", "learner"} == set(row["idle"])
        for kind in row["idle"].values():
            assert sum(kind.values()) == pytest.approx(1)
