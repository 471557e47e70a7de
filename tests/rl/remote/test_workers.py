"""Ends of remote work without a Ray: what a new process answers, and what is said of a worker."""

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl.config import DisaggregatedConfig
from rl.environment import describe
from rl.remote import placement
from rl.remote.actor import Answerer, Stored
from rl.remote.cluster import Lost, RayWorker, unstarted
from rl.remote.placement import on_cluster
from rl.remote.slots import Opened, SlotsWorker
from tests.helpers.rl.points import HOST, POINTS
from tests.helpers.rl.toy import Restless


@pytest.fixture
def worker():
    """A `RayWorker` that has no process."""
    made = object.__new__(RayWorker)
    made.name, made._closed = "simulator 3", False
    made._ray = SimpleNamespace(exceptions=pytest.importorskip("ray").exceptions)
    return made


def failed(worker, cause):
    """The result of a call that raised there, as Ray tells it."""
    future = Future()
    error = worker._ray.exceptions.RayTaskError("start", "traceback", cause)
    future.set_exception(error.as_instanceof_cause())
    return future


def test_a_process_that_replaced_a_dead_one_counts_as_lost_until_it_is_told_to_start(worker):
    stored = Stored(b"base", b"moving")
    for ask in (
        lambda: SlotsWorker().exchange([]),
        lambda: Answerer().hold(stored),
        lambda: Answerer().answer(stored, b""),
    ):
        with pytest.raises(Lost, match="died while it was idle"):
            ask()
    with pytest.raises(Lost, match="died while it was idle"):
        worker.result(failed(worker, unstarted()))


def test_a_timeout_that_a_worker_raises_as_it_starts_is_told_as_its_own(worker):
    with pytest.raises(RuntimeError, match="simulator 3 failed: TimeoutError: no display"):
        worker.started(failed(worker, TimeoutError("no display")))


def test_the_environment_is_the_same_whichever_process_has_the_simulators(tmp_path, monkeypatch):
    processes, spec, made = iter((17, 23)), Restless(1).spec, []

    def start(self, open_slots):
        future = Future()
        future.set_result(Opened(spec, 1, False, "here", next(processes)))
        return future

    def on_host(policy, suite, tasks, slots, config, elsewhere):
        made.append((slots[0].spec, *elsewhere.specs))
        return SimpleNamespace()

    monkeypatch.setattr(RayWorker, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(RayWorker, "started", lambda self, future: future.result())
    monkeypatch.setattr(RayWorker, "start", start)
    monkeypatch.setattr(RayWorker, "close", lambda self: None)
    monkeypatch.setattr(placement, "cluster", lambda *_: nullcontext())
    monkeypatch.setattr(placement, "OnHost", on_host)
    spread = DisaggregatedConfig(simulators=1, inference=0, inference_gpus=0.0)
    config = replace(HOST, placement="disaggregated", disaggregated=spread)
    policy = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(edge=32)))
    for _ in range(2):
        with on_cluster(policy, POINTS, ("points",), config, tmp_path / "none", None):
            pass
    (first, one), (second, other) = made
    assert (first.name, second.name) == tuple(
        f"points in simulator 0 (here, process {process})" for process in (17, 23)
    )
    assert describe((one,), POINTS) == describe((other,), POINTS) == describe((spec,), POINTS)
