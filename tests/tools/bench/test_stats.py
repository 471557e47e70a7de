"""The statistics benchmark measures exact statistics and tells how far openpi's are from them."""

from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.frames import ACTION, STATE
from data.statistics.stats import describe
from models.files.terminal import Console
from tools.bench.data import stats

DATASET = Path(__file__).parents[2] / "fixtures/lerobot/lerobot_h264"


def test_what_is_measured_are_the_exact_statistics_of_all_frames():
    rates, found = stats.measure(DATASET)
    assert set(rates) == {"frames/s", "frames/CPU-s"}
    for name in (STATE, ACTION):
        expected = describe(open_dataset(DATASET).column(name))
        assert all(np.array_equal(found[name][key], expected[key]) for key in expected)


def test_deviations_are_counted_in_standard_deviations():
    exact = stats.measure(DATASET)[1]
    fields = ("mean", "std", "q01", "q99")
    theirs = {
        key: {field: exact[name][field].tolist() for field in fields}
        for key, name in (("state", STATE), ("actions", ACTION))
    }
    theirs["actions"]["q99"][1] += 2 * exact[ACTION]["std"][1]
    found = stats.deviations(exact, theirs)
    assert found.pop("actions q99") == pytest.approx(2)
    assert set(found.values()) == {0.0}


def test_without_the_other_environment_it_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="needs --peer PYTHON"):
        stats.run(Console())
    with pytest.raises(FileNotFoundError, match="is not a Python"):
        stats.run(Console(), tmp_path / "python", tmp_path / "cache")
