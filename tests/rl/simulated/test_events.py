"""Simulated time against cases that are solved by hand, and against what no schedule can beat."""

import json
from dataclasses import replace

import pytest

from rl.simulated.events import MODES, Workload, simulate
from rl.simulated.latency import Constant, Latencies, LogNormal, Stragglers

RESET, CHUNK, DRAW, GRADIENT, UPDATE = 0.5, 0.1, 0.02, 0.3, 0.25

ONE = Workload(
    slots=1,
    latencies=Latencies(Constant(CHUNK), Constant(RESET)),
    inference={1: DRAW},
    gradient=GRADIENT,
    update=UPDATE,
    tickets=1,
    micro=8,
    deadline=0.0,
    chunks=Constant(5),
)
"""One slot whose episodes have five chunks, each episode learnt from by itself."""
EPISODE = RESET + 5 * (DRAW + CHUNK)
LEARN = GRADIENT + UPDATE

VARIED = replace(
    ONE,
    slots=12,
    latencies=Latencies(Stragglers(LogNormal(0.1, 0.6), 0.05, 8), LogNormal(0.5, 0.3)),
    inference={1: 0.02, 2: 0.022, 4: 0.026, 8: 0.034},
    tickets=6,
    group=4,
    deadline=0.01,
    chunks=LogNormal(8, 0.3),
    inference_devices=2,
    learner_devices=2,
)


def seconds(workload, mode, updates=6, warm=2):
    """An update's, after the first."""
    found = simulate(workload, MODES[mode], updates=updates, warm=warm)
    return found.seconds / found.updates


@pytest.mark.parametrize("mode", ["synchronous colocated", "synchronous disaggregated"])
def test_synchronous_is_acting_and_then_learning(mode):
    assert seconds(ONE, mode) == pytest.approx(EPISODE + LEARN)


@pytest.mark.parametrize("mode", ["+ level 2", "+ levels 1-2", "all three"])
def test_ahead_of_the_learner_is_the_longer_of_acting_and_learning(mode):
    assert seconds(ONE, mode) == pytest.approx(max(EPISODE, LEARN))
    slow = replace(ONE, update=3.0)
    assert seconds(slow, mode) == pytest.approx(GRADIENT + 3.0)


@pytest.mark.parametrize("mode", MODES)
def test_rates_count_the_chunks_steps_and_the_decisions(mode):
    found = simulate(ONE, MODES[mode], updates=9, warm=3)
    decisions = 6 * 5 / found.seconds
    assert found.samples_per_second == pytest.approx(decisions)
    assert found.steps_per_second == pytest.approx(decisions * ONE.replan_steps, rel=0.2)


def test_slots_in_lockstep_share_a_batch_and_its_devices():
    two = replace(ONE, slots=4, tickets=4, micro=20, inference={1: 0.02, 2: 0.03, 4: 0.05})
    assert seconds(two, "synchronous disaggregated") == pytest.approx(
        RESET + 5 * (0.05 + CHUNK) + LEARN
    )
    assert seconds(two, "synchronous colocated") == pytest.approx(
        RESET + 5 * (0.03 + CHUNK) + LEARN
    )


def test_a_batch_beyond_the_largest_size_is_several():
    three = replace(ONE, slots=5, tickets=5, micro=25, inference={2: 0.03})
    assert seconds(three, "synchronous disaggregated") == pytest.approx(
        RESET + 5 * (3 * 0.03 + CHUNK) + LEARN
    )


def test_observations_are_prepared_one_after_another():
    many = replace(ONE, slots=4, tickets=4, micro=20, inference={4: 0.02}, prepare=0.01)
    assert seconds(many, "synchronous disaggregated") == pytest.approx(
        RESET + 5 * (4 * 0.01 + 0.02 + CHUNK) + LEARN
    )
    one = replace(ONE, prepare=0.01, staleness=0)
    assert seconds(one, "all three") == pytest.approx(EPISODE + 5 * 0.01 + LEARN)


def test_slots_are_told_one_after_another():
    many = replace(ONE, slots=4, tickets=4, micro=20, inference={4: 0.02}, tell=0.01)
    assert seconds(many, "synchronous disaggregated") == pytest.approx(
        3 * 0.01 + RESET + 5 * (0.02 + 3 * 0.01 + CHUNK) + LEARN
    )


def test_threads_wake_for_a_batch_that_is_due_and_for_what_was_drawn():
    one = replace(ONE, wake=0.01, staleness=0)
    assert seconds(one, "all three") == pytest.approx(EPISODE + 5 * 2 * 0.01 + LEARN)
    assert seconds(one, "+ level 2") == pytest.approx(EPISODE + 5 * 0.01 + LEARN)
    # the second of two that come together finds the policy at work: only what it drew is woken for
    two = replace(one, slots=2, tickets=2, micro=10, inference={1: DRAW}, chunks=Constant(1))
    assert seconds(two, "all three") == pytest.approx(RESET + 2 * 0.01 + 2 * DRAW + CHUNK + LEARN)


def test_micro_batches_are_spread_over_the_learners_devices():
    split = replace(ONE, micro=2, learner_devices=2)
    assert seconds(split, "synchronous disaggregated") == pytest.approx(
        EPISODE + 2 * GRADIENT + UPDATE
    )
    assert seconds(split, "synchronous colocated") == pytest.approx(EPISODE + GRADIENT + UPDATE)


def test_streamed_gradients_leave_only_the_last_tickets_for_the_end():
    """One slot acts four tickets, one after another; three are learnt from meanwhile."""
    four = replace(ONE, tickets=4, micro=5, staleness=0)
    whole = seconds(four, "+ levels 1-2")
    assert whole == pytest.approx(4 * EPISODE + 4 * GRADIENT + UPDATE)
    assert seconds(four, "all three") == pytest.approx(4 * EPISODE + GRADIENT + UPDATE)


def test_a_deadline_gathers_slots_that_come_in_time():
    """Two slots in turn: with no deadline each is answered alone, with one both together."""
    pair = replace(ONE, slots=2, tickets=2, micro=10, inference={1: 0.05, 2: 0.05}, staleness=0)
    alone = simulate(pair, MODES["+ levels 1-2"], updates=1, warm=0)
    # the second waits for the first's batch, so their turns interleave: 0.05 s apart
    assert alone.seconds == pytest.approx(RESET + 0.05 + 5 * (0.05 + CHUNK) + LEARN)
    together = simulate(replace(pair, deadline=1.0), MODES["+ levels 1-2"], updates=1, warm=0)
    assert together.seconds == pytest.approx(RESET + 5 * (0.05 + CHUNK) + LEARN)


@pytest.mark.parametrize("seed", [0, 1])
def test_without_staleness_level_2_is_synchronous(seed):
    workload = replace(VARIED, staleness=0)
    ahead, not_ahead = (
        simulate(workload, MODES[mode], seed=seed)
        for mode in ("+ level 2", "synchronous disaggregated")
    )
    assert ahead.seconds == not_ahead.seconds
    assert ahead.steps_per_second == not_ahead.steps_per_second


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_never_faster_than_a_bottleneck_and_never_staler_than_allowed(mode, staleness):
    workload = replace(VARIED, staleness=staleness)
    found = simulate(workload, MODES[mode], updates=10, warm=2)
    devices = 4 if mode == "synchronous colocated" else 2
    chunks = found.steps_per_second / workload.replan_steps
    assert chunks * 1.02 <= workload.slots / workload.latencies.chunk.mean * 1.2
    assert chunks <= devices * 8 / workload.inference[8]
    assert found.samples_per_second <= devices * workload.micro / workload.gradient
    assert found.updates / found.seconds <= 1 / workload.update
    assert found.lag <= staleness
    for use in found.use.lanes.values():
        assert use.seconds == pytest.approx(found.seconds)
        assert use.utilisation <= 1 + 1e-9


def test_a_bound_that_is_needed_is_used():
    assert simulate(VARIED, MODES["all three"]).lag == 1


@pytest.mark.parametrize("mode", MODES)
def test_more_slots_are_not_slower(mode):
    rates = []
    for slots in (1, 2, 4, 8):
        workload = replace(ONE, slots=slots, tickets=8, micro=8, inference={8: 0.02})
        rates.append(simulate(workload, MODES[mode], updates=12, warm=4).samples_per_second)
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]


def test_each_level_helps_where_environments_straggle():
    rates = {
        name: simulate(VARIED, mode, updates=12, warm=2).samples_per_second
        for name, mode in MODES.items()
    }
    assert rates["+ level 2"] > rates["synchronous disaggregated"]
    assert rates["+ levels 1-2"] > 1.5 * rates["+ level 2"]
    assert rates["all three"] >= 0.99 * rates["+ levels 1-2"]


def test_the_same_seed_is_the_same_run_and_another_is_not():
    mode = MODES["all three"]
    first, again, other = (simulate(VARIED, mode, seed=s).seconds for s in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"latencies": Latencies(Constant(2.0), Constant(0.1))}, "environment"),
        ({"inference": {1: 2.0}, "slots": 4}, "inference"),
    ],
)
def test_the_learners_idle_time_is_put_down_to_what_is_slow(change, cause):
    found = simulate(replace(ONE, **change), MODES["all three"])
    idle = found.use.kinds()["learner"].idle
    assert max(idle, key=idle.__getitem__) == cause
    assert cause in found.use.advice().lower()


def test_slots_are_held_by_a_slow_learner_and_by_a_straggler():
    slow = simulate(replace(ONE, update=9.0), MODES["all three"])
    held = slow.use.kinds()["slot"].idle
    assert max(held, key=held.__getitem__) == "learner"
    straggling = replace(
        ONE,
        slots=4,
        tickets=4,
        latencies=Latencies(Stragglers(Constant(0.1), 0.02, 100), ONE.latencies.reset),
    )
    held = simulate(straggling, MODES["all three"], updates=20).use.kinds()["slot"].idle
    assert max(held, key=held.__getitem__) == "staleness"


def test_the_timeline_keeps_spans_for_a_trace_when_asked():
    assert not simulate(ONE, MODES["all three"]).timeline.spans()
    timeline = simulate(ONE, MODES["all three"], updates=3, spans=10_000).timeline
    spans = [s for s in timeline.spans() if s.lane == "learner 0"]
    assert [s.what for s in spans][:4] == ["gradient", "update"] * 2
    assert spans[0].begin == pytest.approx(EPISODE)
    json.dumps(timeline.trace())


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"inference": {}},
        {"gradient": -1.0},
        {"tell": -1.0},
        {"wake": -1.0},
        {"staleness": -1},
        {"micro": 0},
    ],
)
def test_a_workload_out_of_range_is_refused(change):
    with pytest.raises(ValueError, match="expected"):
        replace(ONE, **change)


def test_no_update_to_count_is_refused():
    with pytest.raises(ValueError, match="2 of 2 updates are for warm-up"):
        simulate(ONE, MODES["all three"], updates=2, warm=2)


def test_a_run_that_takes_no_time_is_refused():
    free = replace(
        ONE, latencies=Latencies(Constant(0), Constant(0)), inference={1: 0.0}, gradient=0.0,
        update=0.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="take no time"):
        simulate(free, MODES["all three"])
