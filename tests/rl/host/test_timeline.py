"""Time is attributed by what the slots do meanwhile; on a clock that the tests set."""

import json
import threading

import pytest

from rl.host.timeline import Timeline


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock=clock)


def test_spans_are_busy_and_waits_are_idle_by_their_cause(timeline, clock):
    with timeline.span("learner", "gradient"):
        clock.now += 3
        with timeline.span("learner", "wait", "environment"):
            clock.now += 1
        clock.now += 2
    use = timeline.summary().lanes["learner"]
    assert use.busy == {"gradient": 5}
    assert use.idle == {"environment": 1}
    assert use.utilisation == 5 / 6


def test_idle_time_is_shared_among_what_the_slots_do(timeline, clock):
    timeline.mark("inference 1", None)
    timeline.mark("slot 0", "step")
    timeline.mark("slot 1", "step")
    timeline.mark("slot 2", "ask", "inference")
    timeline.mark("slot 3", "held", "staleness")
    with timeline.span("inference 0", "draw"):
        clock.now += 8
        with timeline.span("learner", "gradient"):
            clock.now += 4
    timeline.mark("slot 2", "step")
    clock.now += 4
    lanes = timeline.summary().lanes
    assert lanes["learner"].idle == {"environment": 4 + 3, "inference": 2, "staleness": 2 + 1}
    assert lanes["inference 0"].idle == {"environment": 3, "staleness": 1}
    assert lanes["slot 3"].idle == {"learner": 4, "staleness": 12}
    assert lanes["slot 2"].idle == {"inference": 12}
    assert lanes["slot 2"].busy == {"step": 4}


def test_a_held_slot_would_only_queue_while_every_policy_works(timeline, clock):
    timeline.mark("slot 0", "held", "staleness")
    with timeline.span("inference 0", "draw"):
        clock.now += 3
        timeline.mark("inference 1", None)
        clock.now += 2
    idle = timeline.summary().lanes["slot 0"].idle
    assert idle == {"inference": 3, "staleness": 2}


def test_a_slot_that_asks_while_no_policy_works_waits_for_other_slots(timeline, clock):
    timeline.mark("slot 0", "ask", "inference")
    clock.now += 3
    with timeline.span("inference", "draw"):
        clock.now += 2
    assert timeline.summary().lanes["slot 0"].idle == {"environment": 3, "inference": 2}


def test_a_held_slot_blames_the_learner_only_while_that_works(timeline, clock):
    timeline.mark("slot 0", "held", "staleness")
    timeline.mark("inference", None)
    with timeline.span("learner", "update"):
        clock.now += 5
    clock.now += 1
    idle = timeline.summary().lanes["inference"].idle
    assert (idle["learner"], idle["staleness"]) == (5, 1)


def test_time_without_slots_at_work_has_no_cause(timeline, clock):
    timeline.mark("slot 0", "step")
    timeline.mark("slot 0", None)
    with timeline.span("inference", "draw"):
        clock.now += 1
    clock.now += 2
    lanes = timeline.summary().lanes
    assert lanes["inference"].idle["unattributed"] == 2
    assert lanes["slot 0"].idle["unattributed"] == 3


def test_every_second_of_every_lane_is_accounted_for(timeline, clock):
    for i in range(50):
        timeline.mark(f"slot {i % 3}", "step" if i % 2 else "ask", None if i % 2 else "inference")
        clock.now += 0.1 * i
        with timeline.span("inference" if i % 5 else "learner", "draw"):
            clock.now += 0.3
    found = timeline.summary()
    for use in found.lanes.values():
        assert use.seconds == pytest.approx(found.seconds)
        assert min(use.idle.values(), default=0) >= 0


def test_totals_are_exact_beyond_the_spans_that_are_kept(clock):
    timeline = Timeline(capacity=3, clock=clock)
    for i in range(10):
        with timeline.span("inference", str(i)):
            clock.now += 1
    assert [span.what for span in timeline.spans()] == ["7", "8", "9"]
    assert timeline.summary().lanes["inference"].utilisation == 1


def test_summaries_subtract(timeline, clock):
    with timeline.span("learner", "gradient"):
        clock.now += 3
    before = timeline.summary()
    with timeline.span("learner", "gradient"), timeline.span("inference", "draw"):
        clock.now += 2
    found = timeline.summary().since(before)
    assert found.seconds == 2
    assert all(use.seconds == 2 for use in found.lanes.values())
    assert found.lanes["learner"].busy == {"gradient": 2}
    assert found.lanes["inference"].busy == {"draw": 2}


def test_lanes_of_a_kind_are_summed(timeline, clock):
    for i in range(2):
        timeline.mark(f"slot {i}", "step")
    clock.now += 3
    assert timeline.summary().kinds()["slot"].busy == {"step": 6}


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("environment", "Environment-bound"),
        ("inference", "Inference-bound"),
        ("staleness", "raise rollout.staleness"),
    ],
)
def test_advice_names_what_the_learner_waits_for_most(timeline, clock, cause, said):
    timeline.mark("slot 0", "it", None if cause == "environment" else cause)
    with timeline.span("learner", "gradient"):
        clock.now += 1
    if cause == "inference":
        timeline.mark("inference", "draw")
    clock.now += 4
    advice = timeline.summary().advice()
    assert said in advice
    assert "80%" in advice
    assert "\n" not in advice


def test_advice_of_a_busy_learner_is_more_learners(timeline, clock):
    assert timeline.summary().advice() == "Nothing has been learnt yet."
    with timeline.span("learner", "gradient"):
        clock.now += 9
    clock.now += 1
    assert timeline.summary().advice().startswith("Learner-bound: it is busy 90%")


def test_the_trace_has_what_perfetto_needs(timeline, clock, tmp_path):
    timeline.mark("slot 10", "step")
    timeline.mark("slot 9", "ask", "inference")
    clock.now += 0.25
    with timeline.span("inference", "draw 2"):
        clock.now += 0.5
    timeline.mark("slot 9", None)
    timeline.mark("slot 10", None)
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(names.values()) == ["inference", "slot 9", "slot 10"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 3
    for event in complete:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid"} <= set(event)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    drawn = next(e for e in complete if names[e["tid"]] == "inference")
    assert (drawn["ts"], drawn["dur"], drawn["cat"]) == (250_000, 500_000, "work")
    asked = next(e for e in complete if names[e["tid"]] == "slot 9")
    assert (asked["cat"], asked["args"]) == ("wait", {"cause": "inference"})


def test_threads_add_spans_at_once():
    timeline = Timeline(capacity=10_000)

    def work(lane):
        for _ in range(200):
            with timeline.span(lane, "outer"), timeline.span(lane, "inner", "environment"):
                timeline.mark(f"slot {lane}", "step")

    threads = [threading.Thread(target=work, args=(f"lane{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.mark("slot lane0", None)
    found = timeline.summary()
    assert len([s for s in timeline.spans() if s.what == "outer"]) == 800
    for use in found.lanes.values():
        assert use.seconds == pytest.approx(found.seconds)


def test_an_exception_ends_its_span(timeline, clock):
    def work():
        with timeline.span("learner", "gradient"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        work()
    clock.now += 1
    assert timeline.summary().lanes["learner"].utilisation == 0.5
