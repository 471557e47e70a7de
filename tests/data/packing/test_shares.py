import numpy as np
import pytest

from data.frames import Runs
from data.packing.order import PlanSource
from data.packing.plan import Plan
from data.packing.shares import share_facts, shares, told_shares
from tests.helpers.data.layouts import layout

FADING = ((0, 1.0), (40, 0.0))


def source(name, weight, cameras):
    runs = Runs(*np.zeros((4, 30), np.int64))._replace(
        episode=np.arange(30), length=np.full(30, 20)
    )
    text = np.full((1, 1), 7 * cameras)
    return PlanSource(name, weight, runs, np.full(30, cameras), text)


def plan(*weights):
    sources = [source(f"set {n}", weight, 1 + n) for n, weight in enumerate(weights)]
    return Plan(sources, layout(512, 12, 10, 320, 36, 1), 16, window=512)


def test_shares_are_those_of_the_samples_drawn_and_of_the_places_they_take():
    planned, counts, places = plan(3.0, 1.0), np.zeros(2), np.zeros(2)
    for step in (4, 5, 6):
        for row in planned.rows(step):
            for draw in row:
                counts[draw.source] += 1
                places[draw.source] += (1 + draw.source) * (36 + 7) + 1
    found = shares(planned, range(4, 7))
    assert [share.name for share in found] == ["set 0", "set 1"]
    assert [share.samples for share in found] == pytest.approx(counts / counts.sum())
    assert [share.places for share in found] == pytest.approx(places / places.sum())
    assert [share.intended for share in found] == [0.75, 0.25]
    assert found[0].samples == pytest.approx(0.75, abs=0.05)


def test_what_is_intended_is_the_mean_over_steps_that_have_other_weights():
    planned = plan(FADING, 1.0)
    (fading, _) = shares(planned, range(10, 12))
    assert fading.intended == pytest.approx((0.75 / 1.75 + 0.725 / 1.725) / 2)
    assert fading.samples == pytest.approx(fading.intended, abs=0.05)
    assert shares(planned, [41])[0] == ("set 0", 0, 0, 0)


def test_the_log_has_them_of_the_steps_since_the_last_line_wherever_the_run_began():
    planned = plan(FADING, 1.0)
    assert [step for step in range(35) if share_facts(planned, step, 10)] == [0, 10, 20, 30]
    facts = share_facts(planned, 20, 10)
    first, second = shares(plan(FADING, 1.0), range(11, 21))
    assert facts == {
        "share/set 0": first.samples,
        "share_of_places/set 0": first.places,
        "share_intended/set 0": first.intended,
        "share/set 1": second.samples,
        "share_of_places/set 1": second.places,
        "share_intended/set 1": second.intended,
    }
    assert not share_facts(plan(1.0), 20, 10)


def test_the_start_tells_them_and_what_they_are_to_become():
    told = told_shares(plan(FADING, 1.0), 5, 100)
    assert told.startswith("In the first 5 steps: set 0 4")
    assert "(intended: 48.7% of the samples, 0.0% at the end); set 1 5" in told
    assert "at the end" not in told_shares(plan(3.0, 1.0), 5, 100)
