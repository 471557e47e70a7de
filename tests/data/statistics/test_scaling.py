"""Scaling by quantiles, z-scores and ranges."""

import logging

import numpy as np
import pytest

from data.statistics.scaling import narrow, normalizer
from data.statistics.stats import describe


def test_normalizer_takes_q01_and_q99_to_minus_one_and_one():
    values = np.random.default_rng(0).normal(size=(1000, 3)) * [1, 10, 0.1] + [0, 5, 2]
    stats = describe(values)
    normal = normalizer(stats, "action")
    assert np.allclose(normal(stats["q01"]), -1, atol=1e-5)
    assert np.allclose(normal(stats["q99"]), 1, atol=1e-5)
    assert np.allclose(normal.inverse(normal(values)), values, atol=1e-5)


def test_a_dimension_that_rarely_moves_is_scaled_by_its_whole_range(caplog):
    values = np.zeros((1000, 2))
    values[:, 0] = np.linspace(-1, 1, 1000)
    values[:5, 1] = 1
    with caplog.at_level(logging.WARNING):
        normal = normalizer(describe(values), "action")
    assert "action[1]" in caplog.text
    assert "action[0]" not in caplog.text
    assert np.abs(normal(values)).max() <= 1.05


def test_a_constant_dimension_keeps_finite_and_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        normal = normalizer(describe(np.full((10, 1), 3.0)), "observation.state")
    assert "observation.state[0]" in caplog.text
    assert normal(np.array([3.0])) == pytest.approx(0)
    assert normal.inverse(np.array([0.5])) == pytest.approx(3.0, abs=1e-3)


def test_narrow_dimensions_are_those_that_the_normalizer_warns_of():
    values = np.random.default_rng(0).normal(size=(1000, 3))
    values[:, 1] = 7
    values[:, 2] = np.arange(1000) < 5
    found = narrow(describe(values))
    assert set(found) == {1, 2}
    assert "hardly changes (7..7)" in found[1]
    assert "98 % of its values lie in 0..0 but all of them lie in 0..1" in found[2]


def test_z_scores_have_mean_0_and_deviation_1_and_min_max_ends_at_1():
    values = np.random.default_rng(0).normal(size=(1000, 3)) * [1, 10, 0.1] + [0, 5, 2]
    scores = normalizer(describe(values), "action", "z-score")(values)
    np.testing.assert_allclose(scores.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(scores.std(axis=0), 1, rtol=1e-5)
    ranged = normalizer(describe(values), "action", "min-max")(values)
    np.testing.assert_allclose(ranged.min(axis=0), -1, rtol=1e-5)
    np.testing.assert_allclose(ranged.max(axis=0), 1, rtol=1e-5)


def test_z_scores_of_a_dimension_that_almost_never_moves_stay_small(caplog):
    values = np.zeros((100_000, 1))
    values[:2] = 1
    with caplog.at_level(logging.WARNING):
        normal = normalizer(describe(values), "action", "z-score")
    assert "action[0]: its values' standard deviation is 0.004" in caplog.text
    assert np.abs(normal(values)).max() == 1
