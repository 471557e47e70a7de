from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from data.frames import Runs
from data.packing.order import Order, PlanSource, share_ranges, split


def source(runs=300, tasks=40, wordings=3, seed=0):
    """Zero to three images, of which three are rare; runs as short as one frame."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 30, runs)
    text = rng.integers(5, 30, (tasks, wordings))
    text[:, 1:] *= np.arange(1, wordings) <= rng.integers(0, wordings, tasks)[:, None]
    first = np.cumsum(length) - length
    images = rng.choice(4, runs, p=[0.1, 0.5, 0.39, 0.01])
    parts = Runs(np.zeros(runs, np.int64), first, length, rng.integers(0, tasks, runs))
    return PlanSource("test", 1.0, parts, images, text)


@pytest.fixture(scope="module")
def data():
    return source()


@pytest.mark.parametrize("draws", [(0, 3), (7, 9), (64, 64), (1000, 1001), (9000, 9002)])
def test_no_window_needs_more_room_than_there_is(data, draws):
    order = Order(data, draws, 0)
    rng, low = np.random.default_rng(1), 0
    for _ in range(60):
        high = low + int(rng.integers(draws[0], draws[1] + 1))
        drawn = order.draws(low, high)
        counts = np.bincount(drawn.cell, minlength=len(order.room))
        for images in np.unique(order.images):
            own = order.images == images
            needed, room = counts[own][::-1].cumsum(), order.room[own][::-1].cumsum()
            assert np.all(needed <= room)
        low = high


@pytest.mark.parametrize("draws", [(0, 3), (7, 9), (1000, 1001)])
def test_samples_are_no_larger_than_their_cells(data, draws):
    order = Order(data, draws, 0)
    drawn = order.draws(100, 2000)
    run = np.searchsorted(data.runs.first, drawn.frame, "right") - 1
    assert np.array_equal(data.images[run], order.images[drawn.cell])
    assert np.array_equal(data.runs.task[run], drawn.task)
    text = data.text[drawn.task, drawn.wording]
    assert np.all((text > 0) & (text <= order.text[drawn.cell]))


def test_hardly_any_room_stays_empty(data):
    order = Order(data, (1000, 1000), 0)
    classes = len(np.unique(data.images))
    assert order.room.sum() <= 1000 + 2 * classes


@pytest.mark.parametrize("draws", [(0, 3), (64, 64), (9000, 9002)])
def test_each_sample_is_drawn_once_per_epoch(data, draws):
    order, size = Order(data, draws, 0), int(data.runs.length.sum())
    seen = Counter()
    for epoch in range(4):
        drawn = order.draws(epoch * size, (epoch + 1) * size)
        assert np.array_equal(np.sort(drawn.frame), np.arange(size))
        seen.update(zip(drawn.frame.tolist(), drawn.wording.tolist(), strict=True))
    assert max(seen.values()) == 4


def test_a_part_of_the_order_is_drawn_without_the_rest(data):
    order = Order(data, (60, 60), 0)
    whole = order.draws(0, 600)
    parts = [order.draws(low, low + 60) for low in range(0, 600, 60)]
    for column, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert Counter(np.concatenate(pieces).tolist()) == Counter(column.tolist())


def test_wordings_of_a_run_are_drawn_equally_often_in_every_epoch():
    runs = Runs(*np.array([[0, 0], [0, 100], [30, 31], [0, 1]]))
    data = PlanSource("test", 1.0, runs, np.ones(2, np.int64), np.array([[9, 8, 7], [5, 6, 0]]))
    order, told = Order(data, (61, 61), 0), []
    for epoch in range(6):
        drawn = order.draws(epoch * 61, (epoch + 1) * 61)
        assert np.bincount(drawn.wording[drawn.task == 0]).tolist() == [10, 10, 10]
        assert sorted(np.bincount(drawn.wording[drawn.task == 1])) == [15, 16]
        told.append(drawn.wording[np.argsort(drawn.frame)])
    for one, other in pairwise(told):
        assert not np.array_equal(one, other)


def test_neighbours_in_the_order_are_strangers():
    """Draws in a row come from all over a source of many episodes."""
    runs = Runs(
        np.arange(5000), *np.zeros((1, 5000), np.int64), np.full(5000, 40), np.arange(5000) % 50
    )
    data = PlanSource("test", 1.0, runs, np.ones(5000, np.int64), np.arange(5, 55)[:, None])
    drawn = Order(data, (2000, 2000), 0).draws(6000, 8000)
    assert len(np.unique(drawn.episode)) > 1500
    assert abs(drawn.frame.mean() - 19.5) < 1
    assert np.bincount(drawn.episode // 500).min() > 150


def test_split_hands_every_draw_to_one():
    weights = [3, 5, 1, 700, 1]
    before = split(0, weights)
    for draws in range(1, 2000):
        after = split(draws, weights)
        assert sorted(np.subtract(after, before)) == [0, 0, 0, 0, 1]
        before = after
    assert split(7100, weights) == [30, 50, 10, 7000, 10]


def test_share_ranges_hold_for_any_stretch():
    weights = [3, 5, 1, 700, 1, 11]
    ranges = np.array(share_ranges(60, 62, weights))
    shares = np.array([split(draws, weights) for draws in range(3000)])
    for length in (60, 61, 62):
        given = shares[length:] - shares[:-length]
        assert np.all((given >= ranges[:, 0]) & (given <= ranges[:, 1]))
