"""The attention benchmark's rows are full, and each sample lies end to end in them."""

import numpy as np
import pytest

from tools.bench.models.attention import Case, rows, segments


@pytest.mark.parametrize("case", [Case(1, 64, 4, 1, 8), Case(3, 50, 6, 1, 8)])
def test_samples_lie_end_to_end_and_fill_their_row(case):
    found = segments(case, np.random.default_rng(0))
    assert found.shape == (case.rows, case.keys)
    for row in found:
        np.testing.assert_array_equal(np.unique(row), np.arange(1, case.segments + 1))
        assert (np.diff(row) >= 0).all()


def test_ratios_are_taken_within_a_round():
    first, second = rows({"auto": [1.0, 10.0, 2.0], "dense": [2.0, 20.0, 8.0]}, "ratio")
    assert first["ratio"] == 1
    assert second["ratio"] == 2
    assert first["ms"] == 2000
