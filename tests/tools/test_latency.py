"""The command measures a suite and writes what the RL benchmark reads."""

from pathlib import Path

import pytest
from rich.console import Console

from rl.simulated.latency import Constant, Latencies, Measured, MeasuredLatency, read
from rl.simulated.points import Points
from rl.simulated.synthetic import Synthetic
from sim.suite import Suite
from tools import latency
from tools.latency import LatencyConfig


def test_a_suites_latencies_are_written_for_the_benchmark(tmp_path, monkeypatch):
    fixed = Latencies(Constant(0.001), Constant(0.002))

    def open_slots(tasks, count, size):
        assert (tasks, count) == (("reach",), 1)
        return Synthetic(fixed, count, world=Points(picture=size))

    found = Suite("points", ("reach", "other"), 50, open_slots)
    monkeypatch.setattr(latency, "load_suite", lambda name: found)
    out = tmp_path / "points.json"
    latency.main(LatencyConfig(out, chunks=6, resets=3, image_size=16), Console(quiet=True))
    measured = read(out)
    assert (len(measured.chunk.seconds), len(measured.reset.seconds)) == (6, 3)
    assert min(measured.chunk.seconds) >= 0.001
    assert min(measured.reset.seconds) >= 0.002


def test_every_task_that_is_named_is_measured_also_of_a_suite_that_opens_one_at_a_time(
    tmp_path, monkeypatch
):
    fixed, measured = Latencies(Constant(0.0), Constant(0.0)), []

    def measure(slots, starts, **_):
        measured.extend(start.task for start in starts)
        return MeasuredLatency(Measured((0.1,)), Measured((0.2,)))

    def open_slots(tasks, count, size):
        return Synthetic(fixed, count, world=Points(picture=size))

    found = Suite("points", ("reach", "push", "lift"), 50, open_slots, together=False)
    monkeypatch.setattr(latency, "load_suite", lambda name: found)
    monkeypatch.setattr(latency, "measure", measure)
    out = tmp_path / "points.json"
    latency.main(LatencyConfig(out, tasks=("reach", "lift"), resets=1), Console(quiet=True))
    assert measured == ["reach", "lift"]
    assert len(read(out).chunk.seconds) == 2


def test_a_task_that_the_suite_lacks_is_named(monkeypatch):
    found = Suite("points", ("reach",), 50, lambda tasks, count, size: None)
    monkeypatch.setattr(latency, "load_suite", lambda name: found)
    with pytest.raises(ValueError, match="no task"):
        latency.main(LatencyConfig(Path("x"), tasks=("lift",)), Console(quiet=True))
