"""The RL benchmark, shrunk: what it counts, simulates and draws, not how fast."""

from dataclasses import replace

import pytest
from rich.console import Console

from models.layers.gemma import GemmaConfig
from models.layers.siglip import SiglipConfig
from rl.config import RolloutConfig
from rl.simulated.events import MODES, Workload
from rl.simulated.latency import Constant, Latencies, LogNormal
from sim.environments.device_slots import DeviceSlots
from sim.protocol import TRAIN_SEEDS
from sim.suite import Suite
from tests.helpers.rl.point import Point
from tools.bench.rl import rl, rl_modes
from tools.bench.rl.rl_modes import BenchedRun

WORKLOAD = Workload(
    slots=8,
    latencies=Latencies(LogNormal(0.1, 0.5), Constant(0.2)),
    inference={1: 0.01, 8: 0.03},
    gradient=0.05,
    update=0.02,
    tickets=8,
    micro=16,
    chunks=Constant(4),
)


def test_simulated_workers_grow_with_their_tickets_and_devices(tmp_path):
    found = rl.in_simulated_time(WORKLOAD, (8, 32), updates=4)
    assert list(found) == ["8", "32"]
    for rows in found.values():
        assert list(rows) == list(MODES)
        assert rows["all three"]["samples/s"] > rows["synchronous colocated"]["samples/s"] > 0
        assert {"slot", "inference", "learner"} == set(rows["all three"]["idle"])
    few, many = (rows["all three"]["samples/s"] for rows in found.values())
    assert 3 < many / few < 5
    for suffix in (".svg", ".png"):
        path = tmp_path / f"workers{suffix}"
        rl.draw(found, path)
        assert path.stat().st_size > 5000
    assert "environment workers" in (tmp_path / "workers.svg").read_text()


def test_the_table_sets_rl_vla3s_beside_ours_and_skips_what_was_left_out():
    found = rl.in_simulated_time(WORKLOAD, (8,), updates=4)
    rates = rl.over_first({"metaworld": {"left out": "why"}, "measured": found["8"]}, found)
    assert list(rates) == ["measured", "8 workers"]
    assert rates["8 workers"]["synchronous colocated"]["over first"] == 1
    shown = rl.table(rates)
    assert shown.row_count == 2 + len(rl.RL_VLA3)
    cells = [list(column.cells) for column in shown.columns]
    at = cells[0].index("RL-VLA3: LIBERO, pi0.5, 8 GPUs (steps/s)")
    assert cells[-1][at] == "383.4 (1.33)"


def test_idle_shares_and_busy_sum_to_one():
    rows = rl.in_simulated_time(WORKLOAD, (8,), updates=4)["8"]
    for row in rows.values():
        for kind in row["idle"].values():
            assert sum(kind.values()) == pytest.approx(1)


@pytest.mark.slow
def test_modes_learn_on_real_threads_and_are_simulated_from_what_they_took(monkeypatch):
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
        picture=16,
        max_steps=8,
    )
    fast = Latencies(Constant(0.001), Constant(0.001))
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
    small_lanes = replace(load, picture=Point().image_size)
    found = rl.on_device(Console(quiet=True), "point", small_lanes)
    assert list(found) == list(modes)
    for row in found.values():
        assert row["env-steps/s"] >= row["samples/s"] > 0

    rows, ran = rl.in_waiting(Console(quiet=True), "fast", fast, load)
    for mode, found in ran.items():
        work = found.workload
        assert list(work.inference) == [1, 2, 4]
        assert min(work.gradient, work.update, *work.inference.values()) > 0
        assert 1 <= work.chunks.mean <= 2
        assert found.lag <= work.staleness == (mode == "all three")
        assert {"slot", "inference", "learner"} == set(found.use.kinds())
        row = rows[mode]
        assert row["simulated"] == pytest.approx(row["samples/s"] * (1 + row["error"]))
        assert row["env-steps/s"] >= row["samples/s"]
