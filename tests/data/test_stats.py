import json
import logging

import numpy as np
import pytest

from data import open_dataset
from data.pixels import Histogram
from data.stats import compute, describe, normalizer

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def assert_describes(stats, values):
    values = values.astype(float)
    assert stats["count"].tolist() == [len(values)]
    for key in ("min", "max", "mean", "std"):
        assert np.allclose(stats[key], getattr(values, key)(axis=0), rtol=1e-12)
    for key, q in QUANTILES.items():
        assert np.allclose(stats[key], np.quantile(values, q, axis=0), rtol=1e-12)


def test_statistics_are_exact_over_all_frames(recorded, episodes):
    stats = compute(open_dataset(recorded))
    for name in ("observation.state", "action"):
        assert_describes(stats[name], np.concatenate([e.columns[name] for e in episodes]))


def test_statistics_of_some_episodes_leave_the_others_out(recorded, episodes):
    stats = compute(open_dataset(recorded), episodes=[4, 1])
    chosen = np.concatenate([episodes[i].columns["action"] for i in (4, 1)])
    assert_describes(stats["action"], chosen)


def test_the_written_stats_file_holds_the_exact_statistics(recorded):
    written = json.loads((recorded / "meta/stats.json").read_text())
    for name, stats in compute(open_dataset(recorded)).items():
        for key, value in stats.items():
            assert np.allclose(written[name][key], value, rtol=1e-12)


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


def test_counted_pixels_have_the_statistics_of_the_pixels():
    frames = np.random.default_rng(0).integers(0, 200, (20, 16, 12, 3), np.uint8)
    stats = Histogram.of(frames).stats(20)
    pixels = frames.reshape(-1, 3) / 255
    for key in ("min", "max", "mean", "std"):
        assert np.allclose(stats[key].ravel(), getattr(pixels, key)(axis=0))
    for key, q in QUANTILES.items():
        exact = np.quantile(pixels, q, axis=0)
        assert np.abs(stats[key].ravel() - exact).max() <= 1 / 255


def test_counts_of_episodes_add_up_to_those_of_all_their_frames():
    frames = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), np.uint8)
    parts = Histogram.of(frames[:11]) + Histogram.of(frames[11:])
    assert np.array_equal(parts.counts, Histogram.of(frames).counts)
