import numpy as np
import pytest

from data.permutation import fold, permute, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_every_number_occurs_once(size):
    order = permute(np.arange(size), size, fold(1, 2))
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(np.sort(shuffled(size, 3)), np.arange(size))


def test_a_part_of_the_order_is_computed_without_the_rest():
    order = permute(np.arange(1000), 1000, 5)
    some = np.array([7, 999, 0, 7])
    assert np.array_equal(permute(some, 1000, 5), order[some])


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


ORDER_OF_TEN = [7, 6, 8, 1, 9, 3, 4, 0, 2, 5]
