from math import factorial

import numpy as np
import pytest

from data.packing.permutation import fold, grouped, permute, scramble, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_every_number_occurs_once(size):
    order = permute(np.arange(size), size, fold(1, 2))
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(np.sort(shuffled(size, 3)), np.arange(size))


def test_a_part_of_the_order_is_computed_without_the_rest():
    order = permute(np.arange(1000), 1000, 5)
    some = np.array([7, 999, 0, 7])
    assert np.array_equal(permute(some, 1000, 5), order[some])


def test_many_orders_are_computed_at_once():
    sizes = np.array([1, 2, 5, 1000, 10**12])
    keys = scramble(np.arange(5, dtype=np.uint64), 7)
    index = np.array([0, 1, 3, 999, 10**11])
    each = [permute(index[n : n + 1], int(sizes[n]), int(keys[n]))[0] for n in range(len(sizes))]
    assert permute(index, sizes, keys).tolist() == each


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_few_things_is_equally_likely(size):
    index, keys = np.tile(np.arange(size), 12_000), scramble(np.arange(12_000, dtype=np.uint64), 1)
    orders = permute(index, size, np.repeat(keys, size)).reshape(-1, size)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == factorial(size)
    expected = 12_000 / len(counts)
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_grouped_sorts_by_group_and_at_random_within():
    group = np.random.default_rng(0).integers(0, 20, 3000)
    orders = [grouped(group, key) for key in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(3000))
        assert np.array_equal(group[order], np.sort(group))
        within = order[group[order] == 7]
        assert abs(np.corrcoef(within, np.arange(len(within)))[0, 1]) < 0.3
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(np.sort(grouped(np.zeros(9, np.int64), 1)), np.arange(9))


def test_huge_ranges_take_no_memory():
    some = np.arange(10**12, 10**12 + 100)
    order = permute(some, 10**13, 5)
    assert len(np.unique(order)) == 100
    assert order.min() >= 0
    assert order.max() < 10**13


def test_another_key_gives_another_order_that_looks_random():
    size = 5000
    orders = np.stack([permute(np.arange(size), size, fold(0, key)) for key in range(4)])
    assert len({order.tobytes() for order in orders}) == 4
    correlation = np.corrcoef(np.vstack([np.arange(size), orders]))
    assert np.abs(correlation - np.eye(5)).max() < 0.06
    assert (np.diff(orders[0]) == 1).sum() < 10


def test_keys_depend_on_every_part_and_their_order():
    keys = {fold(), fold(0), fold(0, 0), fold(1, 0), fold(0, 1), fold(-1), fold(2**63)}
    assert len(keys) == 7


def test_the_order_is_the_same_on_every_machine_and_version():
    assert permute(np.arange(10), 10, fold(0, 1, 2)).tolist() == ORDER_OF_TEN


ORDER_OF_TEN = [2, 4, 0, 8, 5, 1, 9, 3, 6, 7]
