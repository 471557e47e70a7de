"""Storage that fails some times, or for good."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import open_dataset
from data.errors import DatasetError
from data.frames import Feed
from data.loader import reading
from data.loader.loader import Loader, plan_source
from data.loader.reading import RetryingReader
from data.packing.plan import Plan
from data.store.store import build_store
from models import Embodiment, Normalizer
from tests.helpers.data.memory_frames import MemoryFrames
from tests.helpers.data.recording import FRONT, WRIST
from tests.helpers.data.two_feeds import (
    FEEDS,
    PLAN,
    PROCESSOR,
    SIZE,
    TWO,
    assert_equal,
    batches,
    expected,
)

SHARD = Path("store/wrist-00003.array_record")


@dataclass(frozen=True)
class Failing(MemoryFrames):
    """Pictures of `camera` (or the column of that name) cannot be read: those of some rows, or any
    of the first `times` times."""

    bad: frozenset[int] = frozenset()
    times: int = 0
    fails: str = "wrist"

    def _check(self, rows: Any, name: str) -> None:
        asked = self.__dict__.setdefault("asked", [])
        if name == self.fails:
            asked.append(len(rows))
            if len(asked) <= self.times or not self.bad.isdisjoint(np.ravel(rows).tolist()):
                raise DatasetError(SHARD, "record 7", "cannot be read; convert the dataset again.")

    def images(self, rows: Any, camera: str, out: Any) -> None:
        for into in out:
            into[...] = 77
        self._check(rows, camera)
        super().images(rows, camera, out)

    def column(self, name: str, rows: Any) -> np.ndarray:
        self._check(rows, name)
        return super().column(name, rows)


def failing(**options):
    frames = Failing("two", absent=TWO.absent, **options)
    return (replace(FEEDS[0], frames=frames), FEEDS[1])


@pytest.fixture
def waits(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("fails", ["wrist", "action"])
def test_a_shard_that_fails_twice_is_read_at_the_third_try(waits, caplog, fails):
    feeds = failing(times=2, fails=fails)
    actual = batches(feeds=feeds, threads=0, retry_seconds=0.5)
    for batch, other in zip(actual, expected(), strict=True):
        assert_equal(batch, other)
    assert waits == [0.5, 1.0]
    assert caplog.text.count(f"{SHARD}, record 7: cannot be read") == 2


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": 2}, pytest.param({"workers": 1}, marks=pytest.mark.slow)],
)
def test_a_shard_that_stays_unreadable_ends_the_run_by_its_name(options):
    with (
        Loader(failing(times=10**6), PROCESSOR, PLAN, retry_seconds=0, **options) as loader,
        pytest.raises((DatasetError, RuntimeError), match=str(SHARD)),
    ):
        next(loader)


@pytest.mark.parametrize("skip", [False, True])
def test_a_damaged_shard_of_a_frame_store_is_named_or_skipped(recorded, tmp_path, skip, caplog):
    store = build_store(open_dataset(recorded), tmp_path / "s", SIZE, "jpeg")
    shard = next((tmp_path / "s").rglob("*.array_record"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    same = Normalizer((0.0,) * 4, (1.0,) * 4), Normalizer((0.0,) * 3, (1.0,) * 3)
    robot = Embodiment("arm", ("wrist", "front"), *same)
    processor = replace(PROCESSOR, embodiments=(robot,))
    feed = Feed(store, 0, (WRIST, FRONT), tuple(range(processor.horizon)))
    plan = Plan([plan_source(feed, processor)], PLAN.layout, 4, window=256)
    options = {"retry_seconds": 0, "skip_unreadable": skip, "threads": 0}
    with Loader([feed], processor, plan, **options) as loader:
        if skip:
            batch, info = next(loader)
            assert info.skipped == info.samples[store.name] > 0
            assert not batch.weight.any()
            assert caplog.text.count("Samples that cannot be read because of this are skipped") == 1
        else:
            with pytest.raises(DatasetError, match=shard.name):
                next(loader)


def test_an_oserror_is_retried_too_and_names_its_file(waits):
    def read(items):
        raise OSError(5, "Input/output error", "store/wrist-00003")

    with pytest.raises(OSError, match="store/wrist-00003"):
        RetryingReader(tries=4, seconds=1)(read, 3)
    assert waits == [1, 2, 4]


def test_other_errors_are_not_retried(waits):
    def read(items):
        raise KeyError("a mistake of the program")

    with pytest.raises(KeyError):
        RetryingReader()(read, 3)
    assert waits == []


@pytest.mark.parametrize("fails", ["wrist", "observation.state", "action"])
def test_unreadable_samples_are_masked_and_all_others_stay(waits, caplog, fails):
    bad = frozenset({3, 20, 21, 30})
    skipped = 0
    feeds = failing(bad=bad, fails=fails)
    with Loader(feeds, PROCESSOR, PLAN, threads=0, skip_unreadable=True) as loader:
        for step, other in enumerate(expected()):
            batch, info = next(loader)
            lost = np.zeros(batch.weight.shape, bool)
            for r, row in enumerate(PLAN.rows(step)):
                for k, draw in enumerate(row):
                    rows = TWO.starts[draw.episode] + draw.frame
                    if fails == "action":
                        last = TWO.starts[draw.episode] + TWO.lengths[draw.episode] - 1
                        rows = np.minimum(rows + np.arange(4), last)
                    lost[r, k] = draw.source == 0 and not bad.isdisjoint(np.ravel(rows).tolist())
                    if fails == "wrist" and (draw.episode, "wrist") in TWO.absent:
                        lost[r, k] = False
            assert info.skipped == lost.sum()
            skipped += info.skipped
            assert not batch.weight[lost].any()
            assert not batch.action_mask[lost].any()
            for name in ("weight", "action_mask", "state", "actions", "sample_id", "embodiment"):
                ours, theirs = getattr(batch, name), getattr(other, name)
                np.testing.assert_array_equal(ours[~lost], theirs[~lost])
            for name in ("text", "prefix_source", "prefix_segment", "prefix_position"):
                np.testing.assert_array_equal(getattr(batch, name), getattr(other, name))
            changed = (batch.images != other.images).any(axis=(2, 3, 4))
            assert not batch.images[changed].any()
            assert changed.sum() == (info.skipped if fails == "wrist" else 0)
    assert skipped > 0
    assert caplog.text.count("Samples that cannot be read because of this are skipped") == 1


def test_what_was_given_up_is_not_waited_for_again(waits):
    feeds = failing(times=10**6)
    batches(feeds=feeds, threads=0, skip_unreadable=True)
    assert waits == [1.0, 2.0]


def test_at_least_one_try_is_made():
    with pytest.raises(ValueError, match="tries is 0"):
        RetryingReader(tries=0)
