"""The benchmark beside LeRobot loads whole batches of the same samples in every form."""

import sys
from pathlib import Path

import numpy as np
import pytest

from data.loader.loader import Loader
from models.files.terminal import Console
from tools.bench.data import data
from tools.bench.data.data import BenchedRow, ReadRate

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lerobot"


def batch(kind, form, cache):
    feed, processor, plan = data.loading(data.opened(FIXTURES / f"lerobot_{kind}", form, cache))
    with Loader([feed], processor, plan) as loader:
        return next(loader)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["av1", "png"])
def test_every_form_of_a_dataset_gives_the_same_batch_of_a_released_models_size(kind, tmp_path):
    direct, raw, jpeg = (batch(kind, form, tmp_path) for form in ("straight", "raw", "jpeg"))
    assert direct.images.shape == (32, 2, 224, 224, 3)
    assert direct.actions.shape == (32, 1, 50, 32)
    assert (direct.weight == 1).all()
    assert (direct.prefix_segment == 1).any(axis=1).all()
    np.testing.assert_array_equal(direct.images, raw.images)
    assert np.abs(direct.images.astype(int) - jpeg.images).mean() < 3
    for other in (raw, jpeg):
        np.testing.assert_array_equal(direct.actions, other.actions)
        np.testing.assert_array_equal(direct.sample_id, other.sample_id)


def test_a_reading_counts_every_sample_and_rounds_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_WARM", 1)
    steps = []
    loader = data.Loader
    monkeypatch.setattr(
        data, "Loader", lambda *args, **kw: steps.append(kw["start_step"]) or loader(*args, **kw)
    )
    read = data.reader(data.opened(FIXTURES / "lerobot_av1", "raw", tmp_path), 1, 2)
    readings = [read(0), read(1)]
    assert steps == [0, 3]
    assert all(reading.rate > 0 and reading.cpu > 0 for reading in readings)


def test_each_sides_best_options_count_and_ratios_are_taken_within_a_round():
    work = BenchedRow("ours", "av1", "raw", 1, ratio=15)
    first = {
        "ours": {"1": ReadRate(100, 0.01), "2": ReadRate(200, 0.02)},
        "LeRobot 0.4.4": {"0": ReadRate(10, 0.1), "2": ReadRate(20, 0.2)},
        "LeRobot 0.6.1": {"0": ReadRate(40, 0.05)},
    }
    slower = {
        "ours": {"1": ReadRate(50, 0.02), "2": ReadRate(100, 0.04)},
        "LeRobot 0.4.4": {"0": ReadRate(5, 0.2), "2": ReadRate(4, 0.4)},
        "LeRobot 0.6.1": {"0": ReadRate(20, 0.1)},
    }
    names = ["LeRobot 0.4.4", "LeRobot 0.6.1"]
    found = data.row(work, [first, slower, slower], names)
    old, new = (found["peers"][name] for name in names)
    assert (old["ratio"], old["ratios"], new["ratio"]) == (20, [10, 20, 20], 5)
    assert data.row(work, [first], names[:1])["peers"]["LeRobot 0.4.4"]["ratio"] == 10
    assert (old["cpu_ratio"], new["cpu_ratio"]) == (10, 5)
    assert (found["ours"], old["rate"], old["cpu_ms"]) == (100, 5, 200)
    assert (found["options"], old["options"]) == ("2", "0")
    assert found["target"] == {"ratio": 15, "cpu_ratio": None}


def test_without_a_peer_the_benchmark_says_how_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"needs --peer PYTHON.*bench/peers/lerobot\.py"):
        data.run(Console())
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a Python"):
        data.run(Console(), [tmp_path / "nowhere"], tmp_path)


def test_a_peer_without_lerobot_is_told_so(tmp_path):
    with pytest.raises(
        ValueError, match=r"gave no answer to \{'run': 'about'\}.*peers/lerobot\.py"
    ):
        data.run(Console(), [Path(sys.executable)], tmp_path)
