"""The calibration of the predictor: it recovers rates, and calibrates on no size it predicts."""

import numpy as np
import pytest

from tools.bench.parallel.predict import CALIBRATION, HELD_OUT, Size, calibrate, features


def test_rates_that_made_the_times_are_found():
    rng = np.random.default_rng(0)
    rates = np.array([1e-11, 2e-10, 3e-6, 0.0, 2e-3])
    costs = list(rng.uniform(0.1, 1, (8, 5)) * [1e11, 1e10, 1e4, 1e8, 1])
    found = calibrate(costs, [cost @ rates for cost in costs])
    np.testing.assert_allclose(found, rates, rtol=1e-6, atol=1e-18)


def test_no_size_is_both_calibrated_on_and_predicted():
    assert not set(CALIBRATION) & set(HELD_OUT)
    assert {size.accumulation for size in HELD_OUT} >= {1, 2}


def test_every_size_divides_into_its_micro_batches():
    for size in CALIBRATION + HELD_OUT:
        assert size.rows % size.accumulation == 0


@pytest.mark.slow
def test_costs_follow_width_and_micro_batches():
    one, wide, split = (
        features(size) for size in (Size(64, 1, 4), Size(128, 1, 4), Size(64, 1, 4, 2))
    )
    assert 3 < wide[0] / one[0] < 4.2
    assert split[0] == pytest.approx(one[0], rel=0.02)
    assert 1.5 < split[2] / one[2] < 2.1
