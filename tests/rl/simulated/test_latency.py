"""Latencies have the distributions that they say, and those of real slots can be measured."""

import numpy as np
import pytest

from rl.simulated import latency
from rl.simulated.latency import (
    Constant,
    Latencies,
    LogNormal,
    Measured,
    Stragglers,
    measure,
    read,
    write,
)
from rl.simulated.points import Points
from rl.simulated.synthetic import Synthetic
from sim.protocol import Start
from tests.helpers.rl.ticking import Ticking


def draws(what, n=20_000, seed=0):
    return what.draw(np.random.default_rng(seed), n)


@pytest.mark.parametrize(
    "what",
    [
        Constant(0.3),
        LogNormal(0.2, 0.7),
        Stragglers(LogNormal(0.1, 0.3), 0.1, 8),
        Measured((0.1, 0.2, 0.6)),
    ],
)
def test_draws_have_the_mean_and_derive_from_the_seed(what):
    found = draws(what)
    assert found.mean() == pytest.approx(what.mean, rel=0.03)
    np.testing.assert_array_equal(found, draws(what))
    assert isinstance(what, Constant) or (draws(what, seed=1) != found).any()


def test_log_normal_has_its_median_and_spread():
    logs = np.log(draws(LogNormal(0.2, 0.7)))
    assert np.exp(np.median(logs)) == pytest.approx(0.2, rel=0.03)
    assert logs.std() == pytest.approx(0.7, rel=0.03)


def test_so_many_straggle_and_by_so_much():
    found = draws(Stragglers(Constant(0.1), 0.05, 20))
    assert set(found.round(6)) == {0.1, 2.0}
    assert (found > 1).mean() == pytest.approx(0.05, abs=0.005)


def test_measured_latencies_are_replayed_as_they_are():
    assert set(draws(Measured((0.1, 0.25)))) == {0.1, 0.25}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-0.1),
        lambda: Constant(float("nan")),
        lambda: LogNormal(-0.1, 0.3),
        lambda: LogNormal(0.1, float("nan")),
        lambda: Stragglers(Constant(0.1), 0.1, float("inf")),
        lambda: Measured((0.1, -0.1)),
        lambda: Measured((0.1, float("nan"))),
        lambda: Measured((0.1, float("inf"))),
    ],
)
def test_a_latency_that_may_be_negative_or_endless_is_refused(make):
    with pytest.raises(ValueError, match=r"expected|must be"):
        make()


def test_slots_are_measured_one_chunk_at_a_time(monkeypatch):
    clock = Ticking()
    monkeypatch.setattr(latency.time, "perf_counter", clock.now)
    slots = Synthetic(
        Latencies(Constant(0.25), Constant(1.5)), 1, world=Points(max_steps=10), clock=clock
    )
    starts = [Start("reach", seed) for seed in range(3)]
    found = measure(slots, starts, replan_steps=4)
    assert found.reset.seconds == pytest.approx([1.5] * 3)
    assert set(np.round(found.chunk.seconds, 9)) == {0.25}
    assert len(found.chunk.seconds) <= 3 * 2  # of 4, 4 and 2 steps, the last is left out
    assert len(measure(slots, starts, replan_steps=4, each=1).chunk.seconds) == 3


def test_a_suite_whose_chunks_are_never_whole_cannot_be_measured():
    slots = Synthetic(Latencies(Constant(0), Constant(0)), 1, world=Points(max_steps=3))
    with pytest.raises(ValueError, match="smaller `replan_steps`"):
        measure(slots, [Start("reach", 0)], replan_steps=4)


def test_what_was_measured_is_read_again(tmp_path):
    path = tmp_path / "latencies.json"
    found = Latencies(Measured((0.1, 0.2)), Measured((1.0,)))
    write(path, found.chunk, found.reset, {"suite": "points"})
    assert read(path) == found
    path.write_text('{"chunk": [1, 2.5], "reset": [3]}')
    assert read(path) == Latencies(Measured((1.0, 2.5)), Measured((3.0,)))


@pytest.mark.parametrize("text", ["", "[]", '{"chunk": [1]}', '{"chunk": [], "reset": [1]}'])
def test_a_file_without_latencies_is_named(tmp_path, text):
    path = tmp_path / "latencies.json"
    with pytest.raises(FileNotFoundError, match="measure one with"):
        read(path)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Measured has 0 latencies|lists of seconds"):
        read(path)


def test_stragglers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="share"):
        Stragglers(Constant(1), 1.5)
