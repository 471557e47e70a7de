import numpy as np
import pytest

from data.packing.balance import balanced_order, excess


@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (7, 1), (24, 8), (24, 24), (160, 20)])
def test_an_order_has_every_row_once(rows, ranks):
    costs = np.random.default_rng(rows).integers(1, 1000, rows)
    assert sorted(balanced_order(costs, ranks)) == list(range(rows))


def test_blocks_cost_the_same_where_they_can():
    costs = np.random.default_rng(0).permutation(64)
    for ranks in (2, 4, 8, 16, 32):
        assert excess(costs[balanced_order(costs, ranks)], ranks) == 0


@pytest.mark.parametrize(("size", "most"), [(3, 0.2), (4, 0.05), (5, 0.05), (8, 0.01), (100, 1e-3)])
def test_ranks_cost_nearly_the_same_and_far_more_so_than_by_chance(size, most):
    rng = np.random.default_rng(size)
    for ranks in (2, 6, 10):
        costs = rng.normal(1000, 200, (20, size * ranks)).round().astype(int)
        found = [excess(own[balanced_order(own, ranks)], ranks) for own in costs]
        assert max(found) < most
        assert np.mean(found) < np.mean([excess(own, ranks) for own in costs]) / 2


def test_rows_that_cost_the_same_are_balanced():
    costs = np.full(24, 7)
    assert excess(costs[balanced_order(costs, 6)], 6) == 0
