import json
import logging
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.statistics.pixels import Histogram
from data.statistics.stats import compute, describe, describe_blocks
from tests.helpers.data.recording import make_episode, write

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


@pytest.fixture
def small_blocks(monkeypatch):
    """Several passes over several blocks, as large datasets need them, for a few numbers."""
    monkeypatch.setattr("data.statistics.stats._ROWS", 64)


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_statistics_of_blocks_are_those_of_all_values_at_once(kind, shape, small_blocks):
    values = (np.random.default_rng(0).normal(size=(500, *shape)) * 3).astype(kind)
    described = describe_blocks(lambda: np.split(values, [0, 1, 30, 300]))
    expected = describe(values)
    for key, value in described.items():
        assert value.shape == expected[key].shape
        if key in ("mean", "std"):
            assert np.allclose(value, expected[key], rtol=1e-13, atol=1e-15)
        else:
            assert np.array_equal(value, expected[key])


def test_several_datasets_are_described_as_one(small_blocks):
    one, other = (np.random.default_rng(i).normal(size=(n, 2)) for i, n in enumerate((90, 200)))
    described = describe_blocks(lambda: iter([one, other.astype(np.float32)]))
    joint = np.concatenate([one, other.astype(np.float32)])
    for key, value in describe(joint).items():
        assert np.allclose(described[key], value, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_spread_survives_a_large_offset(kind, small_blocks):
    noise = np.random.default_rng(0).normal(size=(1000, 2))
    values = (noise + 1e6).astype(kind)
    exact = (values.astype(np.longdouble) - 1000000).std(axis=0).astype(float)
    assert np.allclose(describe_blocks(lambda: [values])["std"], exact, rtol=1e-9)


def test_memory_does_not_grow_with_the_number_of_frames():
    def peak(blocks):
        draws = [np.random.default_rng(i).normal(size=(50_000, 2)) for i in range(2)]
        tracemalloc.start()
        describe_blocks(lambda: (draws[i % 2] for i in range(blocks)))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(16) < 1.2 * peak(4)


def test_values_that_are_not_finite_are_named_and_counted(small_blocks):
    values = np.zeros((200, 2), np.float32)
    values[70, 0], values[90] = np.inf, np.nan
    with pytest.raises(ValueError, match=r"^torque is not finite .* in 2 of 200 frames; repair"):
        describe_blocks(lambda: [values], "torque")


def test_no_values_and_mixed_shapes_are_refused():
    with pytest.raises(ValueError, match="torque: no values"):
        describe_blocks(lambda: [], "torque")
    with pytest.raises(
        ValueError, match=r"torque: some values are of shape \(2,\) and some of \(3,\)"
    ):
        describe_blocks(lambda: [np.zeros((70_000, 2)), np.zeros((70_000, 3))], "torque")


def test_a_column_with_holes_is_left_out_with_a_warning_unless_asked_for(tmp_path, caplog):
    episode = make_episode(0, 6)
    root = write(tmp_path / "d", [episode])
    file = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    values = table["action"].to_pylist()
    values[3] = [0.0, float("nan"), 0.0]
    at = table.column_names.index("action")
    pq.write_table(table.set_column(at, "action", pa.array(values, table["action"].type)), file)
    with caplog.at_level(logging.WARNING):
        stats = compute(open_dataset(root))
    assert "action is not finite (NaN or infinite) in 1 of 6 frames and is left out" in caplog.text
    assert "action" not in stats
    assert stats["observation.state"]["count"] == [6]
    with pytest.raises(ValueError, match=r"/d: action is not finite .* in 1 of 6 frames; repair"):
        compute(open_dataset(root), names=["action"])


def test_progress_counts_the_frames_of_each_pass(recorded, small_blocks):
    told = []
    compute(open_dataset(recorded), [0, 1], ["action"], lambda *args: told.append(args))
    assert told[-1][1:] == (19, 19)


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
